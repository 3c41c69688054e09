"""Exchange of tokens between the ranks that have them and those that have their experts.

Each of ``p`` ranks of ep has some tokens and ``E / p`` experts. Two ways bring them together:

* ``once``: a token goes *once* to each rank that holds any of its experts, with its weights; the
  rank adds up what its experts return, and one partial sum comes back. A row for each token and
  expert, as in Megatron-LM's all-to-all, is up to ``k`` times as much. How many rows there are
  follows from the routes, so ranks tell each other first (`comm.row_exchange`).
* ``gather``: every rank gets all tokens and returns a partial sum of each, by an all-gather and a
  reduce-scatter. Nothing depends on the routes.

`layers.experts.dispatch_choice` has the bytes of each and the choice of ``dispatch="auto"``. In
both, ranks may have different numbers of tokens, none included, and all take part in every message.
Tokens without any expert (padding, masked and dropped ones) go nowhere; their output is 0.

Order of sums. Rows of an expert lie in the order of ranks and tokens; a rank adds up the outputs
for a token in the order of its choices, and the token's rank adds partial sums in the order of
ranks (``gather``: as the reduce-scatter does). So a layout changes rounding and nothing else.

Overlap. `start_experts` sends tokens off, and ``finish`` of its result waits for them: an MLP that
all tokens share runs in between, in backward beside the gradient's way back.

Legend: t tokens of this rank, m rows that reach this rank, n rows of its experts, k choices of a
token, c choices that travel with a row, h hidden size.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import start_gather
from lightning_megatron.comm.functional import reduce_scatter
from lightning_megatron.comm.in_flight import begin_all_gather
from lightning_megatron.comm.row_exchange import NumberedRows, RowExchange, exchange_counts
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.delayed_wgrad import compute_dtype
from lightning_megatron.layers.experts.decisions import kept
from lightning_megatron.layers.experts.routing import Routes
from lightning_megatron.layers.experts.row_sums import (
    RowSums,
    collect,
    inverse,
    spread,
    starts,
    take,
)
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.expert_layout import ExpertDispatch


class ExpertStack(Protocol):
    """Experts that a rank holds, as `Experts` are."""

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        ...

    @property
    def held(self) -> int:
        """Experts of this rank."""
        ...

    @property
    def number(self) -> int:
        """Number of the layer, the same on all ranks."""
        ...

    def __call__(self, x_nh: Tensor, counts: Sequence[int], scale_n: Tensor, /) -> Tensor:
        """Apply each expert to its rows; see `Experts.forward`."""
        ...


class TokensUnderWay(Protocol):
    """Tokens on the way to their experts."""

    def finish(self) -> Tensor:
        """Sum the outputs of each token's experts, times their weights; ``[t, h]``."""
        ...


def start_experts(
    x_th: Tensor,
    routes: Routes,
    experts: ExpertStack,
    ep: Axis | None,
    kind: ExpertDispatch = "once",
    most: int | None = None,
) -> TokensUnderWay:
    """Send tokens to their experts; all ranks of ep must.

    Args:
        x_th: this rank's tokens ``[t, h]``; there may be none.
        routes: their experts.
        experts: those that this rank holds.
        ep: ranks that hold the others; None: this one holds all.
        kind: ``once`` or ``gather``.
        most: most tokens of a rank of ep, if known without asking.
    """
    x_th = x_th.to(compute_dtype(x_th))
    if x_th.is_meta:
        return _Unknown(x_th, routes, experts)
    if ep is None or ep.size == 1:
        return _Here(x_th, routes, experts)
    if kind == "gather":
        return _Gathered(x_th, routes, experts, ep, most)
    return _Sent(x_th, routes, experts, ep)


class _Unknown:
    """Tokens on the meta device, of which nobody knows the experts: equally many of each."""

    def __init__(self, x_th: Tensor, routes: Routes, experts: ExpertStack) -> None:
        self._tokens, self._routes, self._experts = x_th, routes, experts

    def finish(self) -> Tensor:
        x, weights, held = self._tokens, self._routes.weights_tk, self._experts.held
        n = weights.numel()
        counts = [(n + i) // held for i in range(held)]
        x = x.repeat_interleave(weights.shape[1], 0)
        y: Tensor = self._experts(x, counts, weights.reshape(-1))
        return y.view(*weights.shape, -1).sum(1)


class _Here:
    """Tokens of a rank that holds all experts."""

    def __init__(self, x_th: Tensor, routes: Routes, experts: ExpertStack) -> None:
        self._tokens, self._routes, self._experts = x_th, routes, experts

    def finish(self) -> Tensor:
        chosen, weights = self._routes.experts_tk, self._routes.weights_tk
        return _apply(self._tokens, chosen, weights, self._experts)


def _apply(
    x_mh: Tensor,
    choices_mc: Tensor,
    weights_mc: Tensor,
    experts: ExpertStack,
    counts: list[int] | None = None,
) -> Tensor:
    """Sum the weighted outputs of the experts that this rank holds, ``[m, h]``.

    Args:
        x_mh: rows.
        choices_mc: which of this rank's experts, from 0; others are not this rank's, or none.
        weights_mc: their weights.
        experts: the experts.
        counts: rows of each expert, if known.
    """
    held, c = experts.held, choices_mc.shape[1]
    own_mc = (choices_mc >= 0) & (choices_mc < held)
    if counts is None:
        chosen = torch.where(own_mc, choices_mc, held)
        counts = kept(lambda: _tally(chosen, held).tolist())
    place_n = _places(own_mc, sum(counts))
    order_n = choices_mc.reshape(-1)[place_n].argsort(stable=True)
    place_n = place_n[order_n]
    sums = RowSums(place_n // c, inverse(order_n), starts(own_mc.sum(1)))
    return collect(experts(spread(x_mh, sums), counts, take(weights_mc, place_n)), sums)


def _tally(chosen: Tensor, size: int) -> Tensor:
    """Number of times that each index below ``size`` stands in ``chosen``, which has no higher one.

    ``bincount`` of a tensor on a GPU waits for its maximum.
    """
    flat = chosen.reshape(-1)
    counts = flat.new_zeros(size + 1)
    return counts.scatter_add_(0, flat, flat.new_ones(1).expand(flat.shape))[:size]


def _places(mask: Tensor, n: int) -> Tensor:
    """Places of the ``n`` elements that are true, ``[n]``; the host waits for nothing."""
    return torch.nonzero_static(mask.reshape(-1), size=n).squeeze(-1)


class _Sent:
    """Tokens that go once to each rank that holds any of their experts."""

    def __init__(self, x_th: Tensor, routes: Routes, experts: ExpertStack, ep: Axis) -> None:
        chosen, held = routes.experts_tk, experts.held
        goes_pt = _destinations(chosen, held, ep.size)
        sent, received = kept(lambda: _told(goes_pt, chosen, experts, ep))
        self._experts = experts
        self._exchange = RowExchange(
            ep, tuple(row[0] for row in sent), tuple(row[0] for row in received)
        )
        self._counts = [sum(of_expert) for of_expert in zip(*received, strict=True)][1:-1]
        rows = _rows(goes_pt, chosen, held, sum(self._exchange.sent))
        self._tokens = rows.tokens
        weights = take(routes.weights_tk, rows.place_nc)
        self._weights = NumberedRows(self._exchange, weights, rows.choices_nc)
        self._rows = self._exchange.begin(spread(x_th, self._tokens))

    def finish(self) -> Tensor:
        weights_mc, choices_mc = self._weights.wait()
        x_mh = self._rows.wait()
        y_mh = _apply(x_mh, choices_mc, weights_mc, self._experts, self._counts)
        y_nh = self._exchange.opposite().begin(y_mh).wait()
        return collect(y_nh, self._tokens)


def _destinations(chosen_tk: Tensor, held: int, p: int) -> Tensor:
    """Whether each token goes to each rank, ``[p, t]``."""
    goes_pt = chosen_tk.new_zeros((p + 1, chosen_tk.shape[0]), dtype=torch.bool)
    return goes_pt.scatter_(0, (chosen_tk // held).T, True)[:p]  # the last is none


def _told(
    goes_pt: Tensor, chosen_tk: Tensor, experts: ExpertStack, ep: Axis
) -> tuple[list[list[int]], list[list[int]]]:
    """Numbers that this rank sends to each, and each to it; the host waits for both.

    Of each rank: rows, choices of each of its experts, and the number of the layer.
    """
    held = experts.held
    of_experts = _tally(chosen_tk, ep.size * held).view(ep.size, held)
    layer = of_experts.new_full((ep.size, 1), experts.number)
    counts = torch.cat((goes_pt.sum(1, keepdim=True), of_experts, layer), 1)
    sent: list[list[int]]
    received: list[list[int]]
    sent, received = torch.stack((counts, exchange_counts(counts, ep))).tolist()
    _check_layer([row[-1] for row in received], experts.number, ep)
    return sent, received


def _check_layer(numbers: Sequence[int], own: int, ep: Axis) -> None:
    """Refuse tokens that other ranks have sent to the experts of another layer."""
    if any(number != own for number in numbers):
        raise ConfigError(
            f"ep={ep.size}: ranks {ep.ranks} run different layers with experts at the same time, "
            f"by their places in the module {sorted(set(numbers))}, and each would compute the "
            "tokens of another's layer; nearest valid: the same layers in the same order on all "
            "ranks in each step, chosen by what all ranks know alike, or ep=1"
        )


class _Rows(NamedTuple):
    """Rows that a rank sends: each of its tokens to each rank with any of its experts."""

    tokens: RowSums
    """Rows by the tokens that they are, in the order of ranks, then of tokens."""
    choices_nc: Tensor
    """Choices of each row: experts as their rank counts them, or ``E / p`` for none."""
    place_nc: Tensor
    """Place of their weights among those of all tokens; one past the end for none."""


def _rows(goes_pt: Tensor, chosen_tk: Tensor, held: int, n: int) -> _Rows:
    t, k = chosen_tk.shape
    row_n = _places(goes_pt, n)  # rank * t + token
    rank_n, token_n = row_n // max(t, 1), row_n % max(t, 1)
    choices = chosen_tk[token_n] - (rank_n * held).unsqueeze(-1)
    choices = choices.masked_fill((choices < 0) | (choices >= held), held)
    slot = torch.arange(k, device=chosen_tk.device).expand_as(choices)
    if held < k:  # others' choices need no room
        choices, slot = choices.sort(dim=-1, stable=True)
        choices, slot = choices[:, :held], slot[:, :held]
    place = (token_n.unsqueeze(-1) * k + slot).masked_fill(choices == held, t * k)
    by_token = token_n.argsort(stable=True)
    return _Rows(RowSums(token_n, by_token, starts(goes_pt.sum(0))), choices, place)


class _Gathered:
    """Tokens that go to all ranks."""

    def __init__(
        self, x_th: Tensor, routes: Routes, experts: ExpertStack, ep: Axis, most: int | None
    ) -> None:
        self._count = x_th.shape[0]
        self._experts = experts
        self._ep = ep
        size = kept(lambda: max(_sizes(x_th, experts, ep))) if most is None else most
        chosen, weights = routes
        nowhere = experts.num_experts
        # Plain, as it has no gradient.
        self._choices = start_gather(_filled(chosen, size, nowhere).int(), ep, 0)
        self._weights = begin_all_gather(_filled(weights, size, 0), ep, 0)
        self._rows = begin_all_gather(_filled(x_th, size, 0), ep, 0)

    def finish(self) -> Tensor:
        choices = self._choices.wait().long() - self._ep.rank * self._experts.held
        weights, x = self._weights.wait(), self._rows.wait()
        y = _apply(x, choices, weights, self._experts)
        return reduce_scatter(y, self._ep, 0)[: self._count]


def _sizes(x_th: Tensor, experts: ExpertStack, ep: Axis) -> list[int]:
    """Numbers of tokens of all ranks."""
    mine = torch.tensor([x_th.shape[0], experts.number], device=x_th.device)
    received = exchange_counts(mine.expand(ep.size, 2).contiguous(), ep).tolist()
    _check_layer([number for _, number in received], experts.number, ep)
    return [size for size, _ in received]


def _filled(x: Tensor, size: int, value: int) -> Tensor:
    missing = size - x.shape[0]
    return torch.cat((x, x.new_full((missing, *x.shape[1:]), value))) if missing else x
