"""The only file that reads environment variables."""

import os


def global_seed() -> int | None:
    """Seed given to ``lightning.seed_everything``, if it was called."""
    value = os.environ.get("PL_GLOBAL_SEED")
    return int(value) if value else None


def seed_workers() -> bool:
    """Whether ``seed_everything(workers=True)`` asked for seeded DataLoader workers."""
    return os.environ.get("PL_SEED_WORKERS", "0") == "1"


def chaos_faults() -> str | None:
    """Faults that `ChaosMonkey` is to inject, as text, if a rehearsal was asked for."""
    return os.environ.get("LIGHTNING_MEGATRON_CHAOS") or None


def chaos_directory() -> str | None:
    """Where a rehearsal keeps what it did, if whoever started it said so."""
    return os.environ.get("LIGHTNING_MEGATRON_CHAOS_DIR") or None


def restart_count() -> int:
    """How often torchrun has restarted this node's processes; 0 under other launchers."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
