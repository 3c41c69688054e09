"""Modules that are drawn: what a user does in hooks, by which optimizer, in which loop.

A `Run` is a line of names, one for each choice, so that a find can be pasted into a table. Each
name stands for a few lines as users write them.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, vector_to_parameters

from tests.parity.prove import Entry
from tests.parity.strangers import Stranger, Trust
from tests.parity.users_optimizers import DAdapt, GlobalNorm, Lookahead

Action = Callable[[Any], None]


def _gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def _normalise(module: Any) -> None:
    total = sum(g.norm() ** 2 for g in _gradients(module))
    for gradient in _gradients(module):
        gradient.div_(torch.as_tensor(total).sqrt() + 1e-3)


def _sign(module: Any) -> None:
    for p in module.parameters():
        if p.grad is not None:
            p.grad = p.grad.sign() * 0.1


def _centre(module: Any) -> None:
    for gradient in _gradients(module):
        if gradient.ndim > 1:
            gradient.sub_(gradient.mean(1, keepdim=True))


def _first_rows(module: Any) -> None:
    for p in module.net.parameters():
        if p.grad is not None:
            p.grad[:2] = 0


def _decay(module: Any) -> None:
    for p in module.parameters():
        if p.grad is not None:
            p.grad.add_(p.detach(), alpha=0.05)


def _note_norms(module: Any) -> None:
    for gradient in _gradients(module):
        module.note(gradient.norm())


def _clip_each(module: Any) -> None:
    for p in module.parameters():
        clip_grad_norm_([p], 0.1)


ON_GRADIENTS: dict[str, Action] = {
    "nothing": lambda module: None,
    "normalise": _normalise,
    "sign": _sign,
    "centre": _centre,
    "first rows": _first_rows,
    "decay": _decay,
    "note norms": _note_norms,
    "clip each": _clip_each,
    "clip norm": lambda module: module.note(clip_grad_norm_(module.parameters(), 0.2)),
    "clip values": lambda module: clip_grad_value_(module.parameters(), 0.01),
}


@torch.no_grad()
def _max_norm(module: Any) -> None:
    for p in module.parameters():
        if p.ndim > 1:
            p.mul_((0.5 / p.norm(dim=1, keepdim=True)).clamp(max=1.0))


@torch.no_grad()
def _shrink_vector(module: Any) -> None:
    vector = torch.cat([p.flatten() for p in module.parameters()])
    vector_to_parameters(vector * 0.95, module.parameters())


def _assign(module: Any) -> None:
    for p in module.parameters():
        p.data = p.data * 0.9


@torch.no_grad()
def _rescale(module: Any) -> None:
    for p in module.parameters():
        p.div_(p.abs().max() + 1.0)


def _note_weights(module: Any) -> None:
    module.note(sum(float(p.detach().square().sum()) for p in module.parameters()))


@torch.no_grad()
def _tail(module: Any) -> None:
    for p in module.net.parameters():
        p[-1].mul_(0.5)


ON_WEIGHTS: dict[str, Action] = {
    "nothing": lambda module: None,
    "max norm": _max_norm,
    "vector": _shrink_vector,
    "assign": _assign,
    "rescale": _rescale,
    "note": _note_weights,
    "last row": _tail,
}


def _groups(module: Any) -> list[dict[str, Any]]:
    flat = [p for p in module.parameters() if p.ndim < 2]
    return [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": flat, "lr": 0.02, "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda module: torch.optim.SGD(module.parameters(), lr=0.3),
    "momentum": lambda module: torch.optim.SGD(
        module.parameters(), lr=0.1, momentum=0.9, nesterov=True
    ),
    "AdamW in groups": lambda module: torch.optim.AdamW(_groups(module), lr=1e-2, eps=1e-3),
    "RMSprop": lambda module: torch.optim.RMSprop(module.parameters(), lr=1e-2, eps=1e-3),
    "Adagrad": lambda module: torch.optim.Adagrad(module.parameters(), lr=0.05),
    "trust ratio": lambda module: Trust(module.parameters()),
    "lookahead": lambda module: Lookahead(
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    ),
    "adapting": lambda module: DAdapt(module.parameters()),
    "global norm": lambda module: GlobalNorm(module.parameters()),
    "a head's own": lambda module: [
        torch.optim.SGD([p for n, p in module.named_parameters() if "head" not in n], lr=0.2),
        torch.optim.SGD([p for n, p in module.named_parameters() if "head" in n], lr=0.4),
    ],
}
SCHEDULES: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "step": lambda optimizer: {
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        "interval": "step",
    },
    "epoch": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
}
LOOPS: dict[str, dict[str, Any]] = {
    "two epochs": {},
    "accumulates": {"accumulate_grad_batches": 2},
    "clips": {"gradient_clip_val": 0.1},
    "clips values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "stops": {"max_steps": 3},
    "some batches": {"limit_train_batches": 1},
    "validates": {"val_check_interval": 1, "limit_val_batches": 1},
}


@dataclass(frozen=True)
class Run:
    """What a drawn module does; the name of each choice."""

    after_backward: str
    before_step: str
    after_batch: str
    optimizer: str
    schedule: str
    loop: str
    by_hand: bool

    def __str__(self) -> str:
        """Return a line of a table of cases."""
        return f"Run({', '.join(repr(getattr(self, f.name)) for f in fields(self))})"


class Drawn(Stranger):
    """A module that does what a `Run` says."""

    run: Run

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.run.by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        if not self.run.by_hand:
            return loss
        optimizers: Any = self.optimizers()
        several = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer in several:
            optimizer.zero_grad()
        loss.backward() if batch_idx else self.manual_backward(loss)
        for optimizer in several:
            optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def on_after_backward(self) -> None:
        ON_GRADIENTS[self.run.after_backward](self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        ON_GRADIENTS[self.run.before_step](self)

    def on_train_batch_end(self, *_: Any) -> None:
        ON_WEIGHTS[self.run.after_batch](self)

    def configure_optimizers(self) -> Any:
        made = OPTIMIZERS[self.run.optimizer](self)
        schedule = SCHEDULES[self.run.schedule]
        if schedule is None or isinstance(made, list):
            return made
        return {"optimizer": made, "lr_scheduler": schedule(made)}


def draw_run(chance: random.Random) -> Run:
    """Draw what a module does, of what one process itself allows."""
    by_hand, optimizer = chance.random() < 0.25, chance.choice(list(OPTIMIZERS))
    by_hand = by_hand or optimizer == "a head's own"  # Lightning takes several by hand alone
    loops = ["two epochs", "stops", "some batches", "validates"] if by_hand else list(LOOPS)
    loop = chance.choice(loops)
    # Before a step is complete, gradients are those of a rank's own samples, as under DDP.
    early = "nothing" if loop == "accumulates" else chance.choice(list(ON_GRADIENTS))
    clipped = loop.startswith("clips")
    return Run(
        after_backward=early,
        before_step="nothing" if clipped else chance.choice(list(ON_GRADIENTS)),
        after_batch=chance.choice(list(ON_WEIGHTS)),
        optimizer=optimizer,
        schedule="none" if by_hand else chance.choice(list(SCHEDULES)),
        loop=loop,
        by_hand=by_hand,
    )


def entry_of(run: Run) -> Entry:
    """Return the run as an entry that can be trained."""
    kind = type("Drawn", (Drawn,), {"run": run})
    trainer: Mapping[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, **LOOPS[run.loop]}
    return Entry(module=kind, kinds=(), trainer=trainer)
