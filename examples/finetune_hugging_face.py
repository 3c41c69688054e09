"""Any Hugging Face model under ZeRO: ``python examples/finetune_hugging_face.py``.

The model is trained as it is: ZeRO asks nothing of a module. (Tensor and pipeline parallelism do:
import the weights into `LanguageModel` then, as the recipe `finetune-qwen3` does.) By default a
tiny model with random weights is trained on bytes, so that this runs anywhere;
``--model DIRECTORY [--file TEXT]`` takes a real one, with its tokenizer.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lightning_megatron import MegatronStrategy

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class FineTuning(L.LightningModule):
    def __init__(self, path=None, lr=1e-3):
        super().__init__()
        self.path, self.lr = path, lr

    def configure_model(self):
        if not hasattr(self, "model"):  # `from_pretrained` reads values: every rank reads the file
            load = AutoModelForCausalLM
            made = load.from_pretrained(self.path) if self.path else load.from_config(TINY)
            self.model = made.float()  # bf16-mixed keeps float32 values for the optimizer

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss  # shifts the labels itself
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def sequences(path, file, length):
    """Rows of tokens of a text."""
    text = Path(file).read_text("utf-8")
    tokens = AutoTokenizer.from_pretrained(path)(text)["input_ids"] if path else text.encode()
    row = torch.tensor(list(tokens))
    return row[: len(row) // length * length].view(-1, length)


def main(args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model directory; default: a tiny one")
    parser.add_argument("--file", default=__file__, help="text to train on; default: this file")
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(args)
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="auto",
        devices=options.devices,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        strategy=MegatronStrategy(zero=options.zero),
        max_steps=options.steps,
        log_every_n_steps=5,
        logger=False,
        enable_checkpointing=False,
    )
    rows = sequences(options.model, options.file, length=64)
    module = FineTuning(options.model, lr=1e-5 if options.model else 1e-2)
    trainer.fit(module, DataLoader(rows, batch_size=4, shuffle=True))
    if trainer.is_global_zero:
        print(f"final loss {trainer.callback_metrics['train_loss']:.3f}")
    return trainer.callback_metrics


if __name__ == "__main__":
    main()
