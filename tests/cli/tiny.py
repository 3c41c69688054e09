"""Options of a training that takes a moment."""

import email
from pathlib import Path

TINY = [
    *["--model.config.hidden_size=16", "--model.config.num_layers=1"],
    *["--model.config.num_heads=2", "--data.max_bytes=60000", "--data.seq_len=16"],
    f"--data.files=[{Path(email.__file__).parent}/*.py]",  # to list all modules takes longer
    *["--data.batch_size=2", "--trainer.accelerator=cpu", "--trainer.devices=1"],
    *["--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--trainer.logger=false"],
    *["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"],
]
