"""Losses that couple the samples of a batch, where batches are cut into microbatches.

A contrastive loss has as many negatives, and a batch norm computes its statistics from as many
samples, as are in a microbatch. No loss tells; what is looked for is ``self.all_gather``, batch
norms in training mode, and what a module says of itself by an attribute ``couples_samples``.
"""

import warnings

from lightning.pytorch import LightningModule
from torch import nn

from lightning_megatron.whole.memory import weights_in_parts

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SampleCoupling:
    """Warns, once, of losses that couple samples of a batch which is cut into microbatches.

    Args:
        module: the user's.
        speaks: whether this rank is one that warns.
    """

    def __init__(self, module: LightningModule, *, speaks: bool) -> None:
        self._module = module
        self._speaks = speaks
        self._told: bool | None = getattr(module, "couples_samples", None)
        self._checked = False
        self._done = self._told is False

    def check(self, count: int) -> None:
        """Look for what couples samples, before the first batch of ``count`` microbatches."""
        if self._checked or self._done:
            return
        self._checked = True
        if self._told:
            self.warn("has couples_samples = True", count)
        with weights_in_parts():  # without those of other stages, which say so themselves
            norms = [
                name
                for name, child in self._module.named_modules()
                if isinstance(child, _BATCH_NORMS) and child.training
            ]
        if norms:
            several = f" and {len(norms) - 1} more" if norms[1:] else ""
            self.warn(f"has batch norms in training mode ({norms[0]}{several})", count)

    def warn(self, what: str, count: int) -> None:
        """Say it, unless something of the kind has been said."""
        if self._done:
            return
        self._done = True
        if not self._speaks:
            return
        warnings.warn(
            f"{type(self._module).__name__} {what}, and its training_step runs on each of {count} "
            f"microbatches of a batch: every sample meets those of its microbatch only, so that "
            f"the weights are not those of a whole batch; num_microbatches=1 keeps batches whole, "
            f"and couples_samples = False in the module says that this is as it should be",
            stacklevel=2,
        )
