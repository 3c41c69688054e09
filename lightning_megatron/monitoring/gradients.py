"""The norm of the gradients: logged, watched, and clipped by rules that follow it.

Gradients are those of the optimizer that is about to step. Their norm is computed once a step, over
all shards of all axes: whoever asks for it again, the clipping of ``gradient_clip_val`` included,
gets the same number while no gradient changes.
"""

import math
from typing import Any, Literal, cast, get_args

import lightning.pytorch as pl
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.errors import raise_if_any, whole_numbers
from lightning_megatron.monitoring.window import LoggingSteps
from lightning_megatron.optim.clip import PercentileClip, UnitClip, ZScoreClip
from lightning_megatron.services import services_of

Nonfinite = Literal["keep", "skip", "raise"]


_NEEDS = "it needs the gradients"


class GradientMonitor(pl.Callback):
    """Logs ``optim/grad_norm``, clips by a rule, and catches gradients that are not finite.

    Works under `MegatronStrategy`, with automatic optimization. A constant limit is the Trainer's
    ``gradient_clip_val``; it applies after the rule, if both are given.

    Args:
        clip: how far to clip; None to leave the gradients alone.
        nonfinite: what follows a norm that is infinite or no number: the step is taken as it is
            (``"keep"``), left out, on all ranks and with the schedule standing still (``"skip"``,
            counted in ``optim/skipped_steps``), or training ends (``"raise"``). Looking at it waits
            for the device once a step, as ``clip`` does.
        every: optimizer steps from one logged norm to the next, where nothing else needs it; None:
            the first step, and those in which the Trainer logs.

    Attributes:
        nonfinite: the argument.
        skipped: steps left out so far.

    Raises:
        ConfigError: an argument is none of these.
    """

    def __init__(
        self,
        clip: PercentileClip | ZScoreClip | UnitClip | None = None,
        nonfinite: Nonfinite = "keep",
        every: int | None = 1,
    ) -> None:
        problems = [] if every is None else whole_numbers(1, every=every)
        if nonfinite not in get_args(Nonfinite):
            problems.append(
                f"nonfinite={nonfinite!r}: must be 'keep', 'skip' or 'raise'; nearest valid: 'keep'"
            )
        if not isinstance(cast(object, clip), PercentileClip | ZScoreClip | UnitClip | None):
            problems.append(
                f"clip={clip!r}: must be a rule of optim.clip; nearest valid: "
                "clip=PercentileClip() (a constant limit is the Trainer's gradient_clip_val)"
            )
        raise_if_any(problems)
        self._every = every
        self._steps = 0
        self._logging = LoggingSteps()
        self._clip = clip
        self.nonfinite = nonfinite
        self.skipped = 0

    @property
    def clips(self) -> bool:
        """Whether a rule needs the norm in every step."""
        return self._clip is not None or self.nonfinite != "keep"

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        services_of(trainer, self, _NEEDS)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._steps += 1
        if not self.clips and not self._is_due(trainer):
            return
        services = services_of(trainer, self, _NEEDS)
        gradients, precision = services.gradients, services.precision
        norm = gradients.norm(optimizer)
        values: dict[str, Any] = {"optim/grad_norm": norm}
        watched = self.nonfinite != "keep" or isinstance(self._clip, PercentileClip | ZScoreClip)
        if precision.will_skip:
            pass  # a loss scale that is too large, or what NumberGuard has dealt with
        elif watched and not math.isfinite(float(norm)):
            self._handle_nonfinite(trainer, float(norm))
        elif isinstance(self._clip, UnitClip):
            gradients.clip_units(self._clip, optimizer)
        elif self._clip is not None:
            limit = self._clip.limit(float(norm))
            values["optim/grad_clip"] = min(limit, float(norm))
            gradients.clip_norm(limit, optimizer)
        if self.nonfinite == "skip":
            values["optim/skipped_steps"] = float(precision.skipped_steps)
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        if self._steps == 1:
            return True
        if self._every is None:
            return self._logging.now(trainer, under_way=1)
        return self._steps % self._every == 0

    def _handle_nonfinite(self, trainer: pl.Trainer, norm: float) -> None:
        if self.nonfinite == "raise":
            raise FloatingPointError(
                f"step {trainer.global_step}: the norm of the gradients is {norm}"
            )
        if self.nonfinite == "skip":
            services_of(trainer, self, _NEEDS).precision.skip_step()
            self.skipped += 1

    @override
    def state_dict(self) -> dict[str, Any]:
        clip = self._clip
        rule = clip.state_dict() if isinstance(clip, PercentileClip | ZScoreClip) else {}
        return {"skipped": self.skipped, "rule": rule}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = int(state_dict["skipped"])
        if state_dict["rule"] and isinstance(self._clip, PercentileClip | ZScoreClip):
            self._clip.load_state_dict(state_dict["rule"])
