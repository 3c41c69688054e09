"""Gradient noise scale, an estimate of the critical batch size.

The gradient of a batch of ``b`` samples is the true gradient ``G`` and noise of covariance ``C/b``.
The *simple noise scale* ``tr(C) / |G|^2`` (McCandlish et al., arXiv 1812.06162, section 2) is a
number of samples. Batches much smaller than it gain by being larger almost linearly, batches much
larger gain nothing: it estimates the critical batch size, and grows as training goes on.

``|g|^2`` of a batch is ``|G|^2 + tr(C)/b`` on average, so two sizes of batches tell both unknowns
(appendix A.1). The small one is the batch of an optimizer step, the large one that of two steps in
a row together, whose weights differ by one update: with ``s`` the mean of the two ``|g|^2`` and
``l`` the square of their mean's norm, ``|G|^2 = 2 l - s`` and ``tr(C) = 2 b (s - l)``. All of it
are norms over the whole model, which every layout has: tensor and pipeline parallelism and ZeRO
make no difference, and one rank is enough. Each estimate is noisy, their ratio more so; numerator
and denominator are therefore averaged by themselves, over some ``window`` pairs.

A pair costs a copy of this rank's gradients for one step and two norms.
"""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.errors import raise_if_any
from lightning_megatron.monitoring.flops import count_both
from lightning_megatron.services import services_of
from lightning_megatron.topology.mesh import Topology

_NEEDS = "it needs the gradients"


class GradientNoiseScale(pl.Callback):
    """Logs ``optim/noise_scale`` (samples) and the two averages that it is the ratio of.

    Works under `MegatronStrategy`, with automatic optimization.

    Args:
        every: optimizer steps from one pair to the next.
        window: pairs over which the averages run (their time constant).

    Attributes:
        noise_scale: in samples of the global batch; None until there is a pair, and where the
            averages have no meaning yet (an estimate of ``|G|^2`` below 0).

    Raises:
        ConfigError: ``every`` is smaller than a pair, ``window`` smaller than 1, or the strategy is
            another.
    """

    def __init__(self, every: int = 20, window: int = 20) -> None:
        problems = []
        if every < 2:
            problems.append(f"every={every}: must be at least 2; nearest valid: every=2")
        if window < 1:
            problems.append(f"window={window}: must be at least 1; nearest valid: window=1")
        raise_if_any(problems)
        self._every = every
        self._keep = 1.0 - 1.0 / window
        self._first: tuple[list[Tensor], float, float] | None = None
        self._samples = 0
        self._weight = self._signal = self._noise = 0.0

    @property
    def noise_scale(self) -> float | None:
        """The current estimate."""
        return self._noise / self._signal if self._signal > 0 else None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        services_of(trainer, self, _NEEDS)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first = None
        self._samples = 0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        services = services_of(trainer, self, _NEEDS)
        self._samples += round(count_both(batch)[1] * services.global_batch_factor)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        services = services_of(trainer, self, _NEEDS)
        gradients, first = services.gradients, self._first
        own_samples, self._samples = self._samples, 0
        self._first = None
        begins = (trainer.global_step + 1) % self._every == 0  # alike in a run that is resumed
        if not begins and first is None:
            return
        samples = _mean(own_samples, services.topology)
        if begins:
            own = [gradient.detach().clone() for gradient in gradients.counted()]
            self._first = own, float(gradients.norm()) ** 2, samples
        elif first is not None and first[2] == samples:  # not where the batch size changed
            # A parameter may have had no gradient in one of the two, but not on some ranks only.
            pairs = zip(first[0], gradients.counted(), strict=False)
            together = [earlier.add_(later) for earlier, later in pairs]
            small = (first[1] + float(gradients.norm()) ** 2) / 2
            large = float(gradients.norm_of(together)) ** 2 / 4
            self._add(small, large, samples)
            pl_module.log_dict(self._values(), batch_size=1)

    def _add(self, small: float, large: float, samples: float) -> None:
        signal, noise = 2 * large - small, 2 * samples * (small - large)
        if not abs(signal) + abs(noise) < float("inf"):
            return  # an overflow, which the optimizer does not use either
        self._weight = self._keep * self._weight + 1
        self._signal += (signal - self._signal) / self._weight
        self._noise += (noise - self._noise) / self._weight

    def _values(self) -> dict[str, float]:
        values = {"optim/gradient_signal": self._signal, "optim/gradient_noise": self._noise}
        if self.noise_scale is not None:
            values["optim/noise_scale"] = self.noise_scale
        return values

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"weight": self._weight, "signal": self._signal, "noise": self._noise}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._weight = float(state_dict["weight"])
        self._signal = float(state_dict["signal"])
        self._noise = float(state_dict["noise"])


def _mean(samples: int, topology: Topology) -> float:
    """Mean of what ranks take for the size of the global batch: of a last one they differ."""
    if topology.batch.group is None:
        return samples
    total = torch.tensor(samples, dtype=torch.int64, device=topology.device)
    dist.all_reduce(total, group=topology.batch.group)
    return int(total) / topology.batch.size
