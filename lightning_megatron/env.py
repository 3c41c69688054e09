"""The only file that reads environment variables."""

import os


def global_seed() -> int | None:
    """Seed given to ``lightning.seed_everything``, if it was called."""
    value = os.environ.get("PL_GLOBAL_SEED")
    return int(value) if value else None


def seed_workers() -> bool:
    """Whether ``seed_everything(workers=True)`` asked for seeded DataLoader workers."""
    return os.environ.get("PL_SEED_WORKERS", "0") == "1"
