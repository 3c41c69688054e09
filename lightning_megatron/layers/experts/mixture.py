"""`MixtureOfExperts`, which replaces an `MLP`."""

import logging
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron._torch.kernels import in_shape
from lightning_megatron.comm.functional import split_to
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.delayed_wgrad import breaks_graphs
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.experts.dispatch import start_experts
from lightning_megatron.layers.experts.dispatch_choice import DispatchSizes, choose
from lightning_megatron.layers.experts.router import Router
from lightning_megatron.layers.experts.row_parts import RowParts
from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.layers.experts.tokens import Tokens, tokens_of
from lightning_megatron.layers.linear import init_matrix
from lightning_megatron.layers.linear_functions import SEQUENCE_DIM
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.size_checks import Activation
from lightning_megatron.topology.coordinates import experts_meet_samples
from lightning_megatron.topology.expert_layout import ExpertDispatch
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.splits import part_of, split_of, whole

log = logging.getLogger(__name__)


class TokenGate(ParallelLayer):
    """Learned sigmoid of each token: ``[..., h]`` to ``[..., 1]``.

    Args:
        hidden_size: size of the residual stream.
        init_std: standard deviation of the initial weights; as ``nn.Linear`` when None.
    """

    def __init__(self, hidden_size: int, *, init_std: float | None = None) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(1, hidden_size))
        self.reset_parameters()

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        init_matrix(full, self.init_std, generator)

    @override
    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        partial = topology.sequence_parallel and topology.tp.size > 1
        return frozenset({"weight"}) if partial else frozenset()

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).sigmoid()


class MixtureOfExperts(ParallelLayer):
    """MLPs of which each token uses ``top_k``, chosen by a router; in place of an `MLP`.

    Input and output ``[b, s, hidden_size]``, equal on all tp ranks; under sequence parallelism
    ``[b, s / tp, hidden_size]``.

    Args:
        hidden_size: size of the residual stream.
        mlp_size: size of the hidden layer of each expert.
        num_experts: experts over all ranks.
        top_k: experts of a token.
        activation: see `MLP`.
        shared_size: size of the hidden layer of an MLP that all tokens use as well; 0: none.
        shared_gate: whether a learned sigmoid of the token weighs that MLP (Qwen2-MoE).
        router: how experts are chosen and kept in balance.
        init_std: standard deviation of the initial weights; as ``nn.Linear`` when None.
        out_init_std: that of ``down``; ``init_std`` when None.

    Raises:
        ConfigError: options do not fit each other.
    """

    never_in_graphs = True
    dispatch: ExpertDispatch = "once"
    """How tokens travel; chosen by `distribute`."""

    def __init__(
        self,
        hidden_size: int,
        mlp_size: int,
        num_experts: int,
        top_k: int = 2,
        activation: Activation = "swiglu",
        *,
        shared_size: int = 0,
        shared_gate: bool = False,
        router: RouterConfig = RouterConfig(),  # noqa: B008 (frozen)
        init_std: float | None = None,
        out_init_std: float | None = None,
    ) -> None:
        super().__init__()
        self.router = Router(hidden_size, num_experts, top_k, router, init_std=init_std)
        self.experts = Experts(
            num_experts,
            hidden_size,
            mlp_size,
            activation,
            init_std=init_std,
            out_init_std=out_init_std,
        )
        self.shared: MLP | None = None
        self.shared_gate: TokenGate | None = None
        if shared_size:
            self.shared = MLP(
                hidden_size,
                shared_size,
                activation,
                init_std=init_std,
                out_init_std=out_init_std,
            )
            if shared_gate:
                self.shared_gate = TokenGate(hidden_size, init_std=init_std)

    @override
    def distribute(self, topology: Topology) -> None:
        super().distribute(topology)
        self.dispatch = topology.dispatch
        if topology.dispatch == "auto" and topology.ep.size > 1:
            self.dispatch = self._chosen_dispatch(topology)

    @override
    def withdraw(self) -> None:
        super().withdraw()
        self.dispatch = "once"

    def _chosen_dispatch(self, topology: Topology) -> ExpertDispatch:
        router = self.router
        groups = router.config.groups, router.config.top_groups
        return chosen_dispatch(topology, router.num_experts, router.top_k, *groups)

    @override
    @breaks_graphs
    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Apply to every position.

        Args:
            x: ``[b, s, h]``.
            token_mask: which tokens count, ``[b, s]`` booleans; others get no expert.
        """
        caller = self.wgrad_queue or self.without_graphs
        if torch.compiler.is_compiling():
            y: Tensor
            if caller is None:  # the compiler is the user's own
                y = torch.compiler.disable(self._apply_to)(x, token_mask)  # type: ignore[no-untyped-call]
            else:
                y = caller.outside_graphs(self._apply_to, x, token_mask)
            return y
        return self._apply_to(x, token_mask)

    def _apply_to(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        x, topology = self._entering(x), self.topology
        tokens, rows = self._tokens(x, token_mask), x.reshape(-1, x.shape[-1])
        parts = None  # of the rows, which tp ranks divide here
        if topology is not None and topology.tp.size > 1 and not topology.sequence_parallel:
            parts = RowParts(len(rows), topology.tp)
            tokens, rows = tokens.rows(parts.start, parts.stop), parts.own(rows)
        routes, loss_b, tokens_b = self.router(rows, tokens)
        # Not behind `y`: the caller may change that in place, which torch refuses for such a view.
        rows = self.router.attach_losses(rows, loss_b, tokens_b, tokens.parts)
        ep = None if topology is None else topology.ep
        known = most_tokens(topology, rows, parts)
        sent = start_experts(rows, routes, self.experts, ep, self.dispatch, known)
        z = None if self.shared is None else self._shared(x)
        y = sent.finish()
        # No view: ZeRO 3 hooks on outputs, and the caller may change this one in place.
        y = in_shape(y if parts is None else parts.whole(y), x.shape)
        return y if z is None else y + z

    def _entering(self, x: Tensor) -> Tensor:
        """The input as a plain tensor; one of which ranks have parts is gathered."""
        if split_of(x) is None and part_of(x) is None:
            return x
        x, topology = whole(x), self.topology
        if topology is not None and topology.sequence_parallel:
            return split_to(x, topology.tp, SEQUENCE_DIM)
        return x

    def _shared(self, x: Tensor) -> Tensor:
        """Output of the MLP that all tokens use."""
        assert self.shared is not None
        z: Tensor = self.shared(x)
        return z if self.shared_gate is None else self.shared_gate(x) * z

    def _tokens(self, x: Tensor, token_mask: Tensor | None) -> Tokens:
        """Tokens of the rows of ``x``, as this cp rank has them.

        Raises:
            ConfigError: rows that belong to no sequence are to be balanced by sequence.
        """
        if x.dim() < 3 and self.router.needs_sequences:
            raise ConfigError(
                f"balance={self.router.config.balance!r}, "
                f"capacity_factor={self.router.config.capacity_factor}: tokens of shape "
                f"{tuple(x.shape)} belong to no sequence; nearest valid: an input [b, s, h], or "
                "balance='none' or 'batch', without a capacity"
            )
        return tokens_of(x, self.topology, self.context, token_mask)


def chosen_dispatch(
    topology: Topology, num_experts: int, top_k: int, groups: int = 1, top_groups: int = 1
) -> ExpertDispatch:
    """How tokens travel where ``dispatch="auto"`` leaves it open; see `DispatchSizes`."""
    sizes = DispatchSizes(
        ep=topology.ep.size,
        num_experts=num_experts,
        top_k=top_k,
        groups=groups,
        top_groups=top_groups,
        same_samples=not experts_meet_samples(topology.degrees),
    )
    choice = choose(sizes)
    if topology.rank == 0:
        _say(choice.reason)
    return choice.kind


def most_tokens(topology: Topology | None, rows_th: Tensor, parts: RowParts | None) -> int | None:
    """Most tokens of a rank of ep; None where it is not known, as ranks read different samples."""
    if topology is None or experts_meet_samples(topology.degrees):
        return None
    return len(rows_th) if parts is None else parts.largest


@lru_cache
def _say(reason: str) -> None:
    log.info(reason)
