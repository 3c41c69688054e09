"""Warnings of Lightning that do not hold here, by their texts."""

import warnings


def hide_pytree_warning() -> None:
    """Hide that Lightning uses a deprecated name of torch.

    `lightning.pytorch.utilities._pytree` calls ``LeafSpec``, with torch 2.13 on every rank; a user
    can do nothing about it. Unnecessary when Lightning does without it.
    """
    warnings.filterwarnings(
        "ignore", ".*LeafSpec.*is deprecated", module=r"lightning\.pytorch\.utilities\._pytree"
    )


def hide_resuming_warning() -> None:
    """Hide that a run cannot go on within an epoch, where the strategy has moved the loaders."""
    warnings.filterwarnings("ignore", ".*your dataloader is not resumable.*")
