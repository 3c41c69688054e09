"""Optimizers as users write them: around others, with closures and hooks, across parameters."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron import PipelineSequential
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from tests.parity.strangers import CLASSES, Stranger, Trust


class Lookahead(Optimizer):
    """Shares groups with the optimizer inside, and keeps slow weights in that one's state."""

    def __init__(self, inner: Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state: Any = defaultdict(dict)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.inner.state[p]
                if "slow" not in state:
                    state["slow"] = torch.empty_like(p).copy_(p)
                if self.steps % 2 == 0:
                    state["slow"].add_(p - state["slow"], alpha=0.5)
                    p.copy_(state["slow"])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class SlowCopies(Optimizer):
    """Copies all weights when it is made, and has groups of its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": 0.5})
        self.inner = inner
        self.slow = [[p.clone().detach() for p in g["params"]] for g in inner.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for group, copies in zip(self.param_groups, self.slow, strict=True):
            for p, q in zip(group["params"], copies, strict=True):
                q.add_(p.data - q, alpha=0.5)
                p.data.copy_(q)
        return loss


class Sam(Optimizer):
    """Climbs, evaluates the loss again, and lets the optimizer inside step from where it was."""

    def __init__(self, params: Any, inner: type[Optimizer], rho: float = 0.5, **options: Any):
        super().__init__(params, {"rho": rho, **options})
        self.inner = inner(self.param_groups, **options)  # type: ignore[call-arg]
        self.param_groups = self.inner.param_groups

    def _norm(self) -> Tensor:
        norms = [
            p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        return torch.norm(torch.stack(norms), p=2)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = self._norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.inner.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step(zero_grad=True)
        closure()
        self.second_step()
        return loss


class GlobalNorm(Optimizer):
    """One factor from the gradients of all parameters."""

    def __init__(self, params: Any, lr: float = 0.3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.pow(2).sum() for p in every]).sum().sqrt()
        for p in every:
            state = self.state[p]
            if not state:
                state["mean"] = torch.zeros_like(p)
            state["mean"].mul_(0.9).add_(p.grad / (norm + 0.1))
            p.sub_(state["mean"], alpha=self.param_groups[0]["lr"])
        return loss


class DAdapt(Optimizer):
    """A learning rate that follows from sums over all parameters, as D-Adaptation and Prodigy."""

    def __init__(self, params: Any, lr: float = 1.0, d: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "d": d})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        over, under = 0.0, 1e-8
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "begin" not in state:
                    state["begin"], state["sum"] = p.detach().clone(), torch.zeros_like(p)
                over += (p.grad * (state["begin"] - p.data)).sum().item()
                state["sum"].add_(p.grad, alpha=group["d"])
                under += state["sum"].abs().sum().item()
        for group in self.param_groups:
            group["d"] = max(group["d"], 20 * over / under)
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"] * group["d"])
        return loss


class Distance(Optimizer):
    """Keeps where all weights began, and takes its rate from how far they have come (DoG)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})
        self.first = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        every = [p for g in self.param_groups for p in g["params"]]
        far = torch.stack([(p - q).norm() for p, q in zip(every, self.first, strict=True)]).norm()
        for p in every:
            if p.grad is not None:
                p.add_(p.grad * -(far + 0.1))
        return loss


class LooksAhead(Stranger):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9))


class LooksAheadTwice(Stranger):
    def configure_optimizers(self) -> Any:
        return Lookahead(SlowCopies(torch.optim.Adam(self.parameters(), lr=0.1)))


class CopiesAtFirst(Stranger):
    def configure_optimizers(self) -> Any:
        return SlowCopies(torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9))


class SharpnessAware(Stranger):
    def configure_optimizers(self) -> Any:
        return Sam(self.parameters(), torch.optim.SGD, lr=0.3, momentum=0.9)


class SharpnessByHand(Stranger):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return Sam(self.parameters(), torch.optim.SGD, lr=0.3, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        optimizer.first_step(zero_grad=True)
        self.manual_backward(self.loss(*batch))
        optimizer.second_step(zero_grad=True)


class NormOfAll(Stranger):
    def configure_optimizers(self) -> Any:
        return GlobalNorm(self.parameters())


class NormOfShort(NormOfAll):
    """One weight on the last stage of two."""

    def make_net(self) -> PipelineSequential:
        return PipelineSequential(
            up=ColumnParallelLinear(6, 8),
            act=nn.Tanh(),
            down=RowParallelLinear(8, 6),
            head=nn.Linear(6, CLASSES),
        )


class NormOfLong(NormOfAll):
    """A stage without weights."""

    def make_net(self) -> PipelineSequential:
        return PipelineSequential(
            up=ColumnParallelLinear(6, 8),
            act=nn.Tanh(),
            down=RowParallelLinear(8, 6),
            more=nn.Tanh(),
            norm=nn.LayerNorm(6),
            head=nn.Linear(6, CLASSES),
        )


class CopiesOfLong(NormOfLong):
    def configure_optimizers(self) -> Any:
        return SlowCopies(torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9))


class Adapts(Stranger):
    def configure_optimizers(self) -> Any:
        return DAdapt(self.parameters())


class SumsFromTheStart(Stranger):
    """Has its state when it is made."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1, initial_accumulator_value=0.2)


class Strays(Stranger):
    def configure_optimizers(self) -> Any:
        return Distance(self.parameters())


class SearchesLine(Stranger):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(
            self.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe"
        )


def _normalise(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.div_(p.grad.norm() + 0.1)


class HookBeforeStep(Stranger):
    """Lightning calls it before the backward, so it sees the gradients of the step before."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        optimizer.register_step_pre_hook(self.look)
        return optimizer

    def look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                self.note(-1.0 if p.grad is None else p.grad.norm())


class HookBeforeStepByHand(Stranger):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        optimizer.register_step_pre_hook(_normalise)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        optimizer.step()


class HookAfterStep(Stranger):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self.renormalise)
        return optimizer

    @torch.no_grad()
    def renormalise(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                self.note(p.grad.abs().max())
                p.div_(p.norm() + 0.5)


class HooksOfTrust(HookAfterStep):
    def configure_optimizers(self) -> Any:
        optimizer = Trust(self.parameters())
        optimizer.register_step_pre_hook(self.count)
        optimizer.register_step_post_hook(self.renormalise)
        return optimizer

    def count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.note(sum(p.numel() for group in optimizer.param_groups for p in group["params"]))


OPTIMIZERS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(LooksAhead, LooksAheadTwice, CopiesAtFirst, Strays, SumsFromTheStart),
        *(SharpnessAware, SharpnessByHand, SearchesLine),
        *(NormOfAll, Adapts),
        *(HookBeforeStep, HookBeforeStepByHand, HookAfterStep, HooksOfTrust),
    )
}
STAGES: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (NormOfShort, NormOfLong, CopiesOfLong)
}
