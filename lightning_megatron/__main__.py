"""`python -m lightning_megatron` is the `lightning-megatron` command."""

import sys

from lightning_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
