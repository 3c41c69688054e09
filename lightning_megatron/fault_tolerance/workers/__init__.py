"""DataLoader workers that die, hang or raise: `WorkerGuard` replaces them."""
