"""LightningModule of the recipes: a decoder-only transformer that predicts the next token.

It is an ordinary LightningModule and uses nothing that a user's own could not use: a
`PipelineSequential` of parallel layers built in `configure_model`, one call of it per step, a loss
that takes vocabulary-parallel logits. Copy it as the start of your own.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from typing_extensions import override

from lightning_megatron._lightning.hooks import trainer_of
from lightning_megatron._lightning.loaders import evaluation_source
from lightning_megatron.checkpoint.directory.manifest import is_checkpoint
from lightning_megatron.checkpoint.offline.export import load_from_checkpoint
from lightning_megatron.checkpoint.offline.huggingface.transformer import stored_config
from lightning_megatron.errors import (
    ConfigError,
    at_least,
    holds,
    raise_if_any,
    switches,
    whole_numbers,
)
from lightning_megatron.layers.linear_loss import LinearCrossEntropy
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import build_trunk
from lightning_megatron.optim.build import (
    OptimizerName,
    ScheduleName,
    make_lr_schedule,
    make_optimizer,
    name_problems,
)
from lightning_megatron.services import services_if_any
from lightning_megatron.whole.splits import whole


class LanguageModel(pl.LightningModule):
    """LightningModule that trains a transformer to predict the next token.

    A batch is `(tokens, labels)` or a dict with these keys: int64 `[b, s]`, where `labels[:, t]` is
    the token that follows `tokens[:, : t + 1]`, or -100 where no loss is wanted. A dict may also
    hold `documents` `[b, s]`, the number of the document of each token, none of which sees another
    (`layers.packed_documents`), and `token_mask` `[b, s]`, False for padding, which goes to no
    expert of a mixture and into none of its counts. Logs `train_loss` every step, and `val_loss`
    and `val_perplexity` (likewise `test_...`) every evaluation, in nats per token.

    Args:
        config: sizes of the model, name of a preset of `TransformerConfig`, mapping of its fields,
            or path of a checkpoint directory whose model is to be trained further (as
            `import_hugging_face` makes one; the weights come with `ckpt_path`).
        lr: peak learning rate.
        warmup_steps: number of steps of linear warmup.
        min_lr_ratio: learning rate at the Trainer's last step, as a share of the peak.
        weight_decay: weight decay of matrices; vectors (norms, biases) do not decay.
        betas: betas of AdamW and Lion.
        label_smoothing: probability mass spread over the vocabulary.
        z_loss: weight of the squared log-partition that keeps logits from drifting.
        chunked_loss: whether to compute head and loss together, 1024 tokens at a time, so that the
            logits of a batch are never in memory (`layers.linear_loss`).
        optimizer: ``adamw``, ``muon`` or ``lion``, also with quantized state (``adamw-bfloat16``,
            ``adamw-int8``, ...), or ``adafactor`` (`optim.build`).
        schedule: learning rate after the warmup: ``cosine``, ``stable-decay`` (a plateau, and a
            fall in the last fifth), ``inverse-sqrt`` or ``constant``.

    Raises:
        ConfigError: an option is out of range.
    """

    trunk: PipelineSequential

    def __init__(
        self,
        config: TransformerConfig | str | dict[str, Any] = "tiny",
        *,
        lr: float = 1e-3,
        warmup_steps: int = 20,
        min_lr_ratio: float = 0.1,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunked_loss: bool = False,
        optimizer: OptimizerName = "adamw",
        schedule: ScheduleName = "cosine",
    ) -> None:
        super().__init__()
        raise_if_any(
            _option_problems(lr, warmup_steps, min_lr_ratio, weight_decay)
            + name_problems(optimizer, schedule)
            + switches(chunked_loss=chunked_loss)
        )
        self.config = _as_config(config)
        if self.config.vocab_padding and label_smoothing:
            raise ConfigError(
                f"label_smoothing={label_smoothing}, vocab_padding={self.config.vocab_padding}: "
                "smoothing would predict padding; nearest valid: label_smoothing=0.0"
            )
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        self.weight_decay = weight_decay
        self.betas = (betas[0], betas[1])
        self.chunked_loss = chunked_loss
        self.optimizer = optimizer
        self.schedule = schedule
        # Plain values only: they are stored in the checkpoint and read by `load_from_checkpoint`.
        self.save_hyperparameters(
            {
                "config": asdict(self.config),
                "lr": lr,
                "warmup_steps": warmup_steps,
                "min_lr_ratio": min_lr_ratio,
                "weight_decay": weight_decay,
                "betas": list(self.betas),
                "label_smoothing": label_smoothing,
                "z_loss": z_loss,
                "chunked_loss": chunked_loss,
                "optimizer": optimizer,
                "schedule": schedule,
            }
        )
        self.loss = VocabParallelCrossEntropy(
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction="sum",
            vocab_size=self.config.vocab_size,
        )

    @override
    def configure_model(self) -> None:
        """Build the trunk; under the strategy this runs on the meta device."""
        if not hasattr(self, "trunk"):
            self.trunk = build_trunk(self.config, self._chunked_head if self.chunked_loss else None)

    def _chunked_head(self) -> LinearCrossEntropy:
        return LinearCrossEntropy(
            self.config.hidden_size,
            self.config.vocab_size,
            num_tokens=self.config.num_tokens,
            label_smoothing=self.loss.label_smoothing,
            z_loss=self.loss.z_loss,
            reduction="sum",
            init_std=self.config.init_std,
        )

    @override
    def forward(
        self, tokens: Tensor, documents: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Tensor:
        """Return the logits `[b, s, vocab_size]` of the next token at every position."""
        given = {"documents": documents, "token_mask": token_mask}
        kwargs = {name: value for name, value in given.items() if value is not None}
        logits: Tensor = self.trunk(tokens, **kwargs)
        return logits

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the sum of the tokens' losses and their number.

        `MegatronStrategy` divides one by the other over all microbatches and ranks, so that every
        token of a batch counts alike wherever it is. Under another strategy, which would take the
        sum for the loss, the mean is returned.
        """
        total, tokens = self._batch_loss(batch)
        self._log_mean("train_loss", total, tokens)
        trainer = trainer_of(self)
        if trainer is None or services_if_any(trainer) is None:
            return _mean(total, tokens)
        return {"loss": total, "num_tokens": tokens}

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log `val_loss`; of several loaders, `val_loss/NAME` if the datamodule names them."""
        self._log_evaluation("val", batch, dataloader_idx)

    @override
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log `test_loss`."""
        self._log_evaluation("test", batch, dataloader_idx)

    @override
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the logits `[b, s, vocab_size]` of the whole vocabulary, padding included."""
        tokens = batch if isinstance(batch, Tensor) else _tokens_and_labels(batch)[0]
        logits: Tensor = whole(self(tokens, **_keywords(batch)))
        return logits

    @override
    def on_validation_epoch_end(self) -> None:
        """Log the perplexity of the mean loss, which is not the mean of perplexities."""
        self._log_perplexity("val")

    @override
    def on_test_epoch_end(self) -> None:
        """Log the perplexity of the mean loss."""
        self._log_perplexity("test")

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and a schedule over the Trainer's steps."""
        optimizer = make_optimizer(
            self.optimizer, self, lr=self.lr, weight_decay=self.weight_decay, betas=self.betas
        )
        schedule = make_lr_schedule(
            self.schedule,
            optimizer,
            warmup_steps=self.warmup_steps,
            total_steps=self.trainer.estimated_stepping_batches,
            min_lr_ratio=self.min_lr_ratio,
        )
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: Any, map_location: Any = None, *args: Any, **kwargs: Any
    ) -> "LanguageModel":
        """Return the model of a checkpoint directory of any layout, or of a Lightning file.

        For a module of your own, `lightning_megatron.load_from_checkpoint(Module, path)` does this.
        """
        if Path(checkpoint_path).is_dir():
            return load_from_checkpoint(cls, checkpoint_path, map_location, **kwargs)
        return super().load_from_checkpoint(checkpoint_path, map_location, *args, **kwargs)

    def _batch_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Sum of the losses of the tokens that count, and their number."""
        tokens, labels = _tokens_and_labels(batch)
        if self.chunked_loss:
            total = self.trunk(tokens, targets=labels, **_keywords(batch))
        else:
            total = self.loss(self(tokens, **_keywords(batch)), labels)
        return total, (labels != self.loss.ignore_index).sum()

    def _log_mean(self, name: str, total: Tensor, tokens: Tensor, **options: Any) -> None:
        """Log the mean loss of the tokens, weighted by their number."""
        # A number would have to wait for the device.
        weight: Any = tokens
        self.log(name, _mean(total, tokens), prog_bar=True, batch_size=weight, **options)

    def _log_evaluation(self, split: str, batch: Any, dataloader_idx: int) -> None:
        source = evaluation_source(self.trainer)  # loaders that are given have no names
        names = getattr(source, "val_names", [])
        named = len(names) > 1
        self._log_mean(
            f"{split}_loss/{names[dataloader_idx]}" if named else f"{split}_loss",
            *self._batch_loss(batch),
            sync_dist=True,
            add_dataloader_idx=not named,
        )

    def _log_perplexity(self, split: str) -> None:
        for name, loss in [*self.trainer.callback_metrics.items()]:
            metric, slash, which = name.partition("/")
            if metric == f"{split}_loss":
                perplexity = f"{split}_perplexity{slash}{which}"
                # Its name says already which loader it is of.
                self.log(perplexity, loss.detach().exp(), sync_dist=True, add_dataloader_idx=False)


def _mean(total: Tensor, tokens: Tensor) -> Tensor:
    return total / tokens.clamp(min=1)


def _as_config(config: TransformerConfig | str | Mapping[str, Any]) -> TransformerConfig:
    if isinstance(config, TransformerConfig):
        return config
    if isinstance(config, str) and is_checkpoint(config):
        return stored_config(config)
    if isinstance(config, str):
        return TransformerConfig.preset(config)
    return TransformerConfig.from_fields(config, "config.")


def _tokens_and_labels(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping) and {"tokens", "labels"} <= batch.keys():
        return batch["tokens"], batch["labels"]
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    found = f"a dict with {sorted(batch)}" if isinstance(batch, Mapping) else f"{type(batch)}"
    raise ConfigError(
        f"batch={found}: LanguageModel takes (tokens, labels), or a dict with these keys"
    )


def _keywords(batch: Any) -> dict[str, Tensor]:
    """Keywords of the trunk that a batch holds."""
    held = batch if isinstance(batch, Mapping) else {}
    return {n: held[n] for n in ("documents", "token_mask") if held.get(n) is not None}


def _option_problems(
    lr: float, warmup_steps: int, min_lr_ratio: float, weight_decay: float
) -> list[str]:
    problems = whole_numbers(0, warmup_steps=warmup_steps)
    problems += at_least(0.0, weight_decay=weight_decay)
    if not holds(lambda lr: lr > 0, lr):
        problems.append(f"lr={lr!r}: must be positive; nearest valid: lr=1e-3")
    if not holds(lambda ratio: 0 <= ratio <= 1, min_lr_ratio):
        nearest = 0.0 if holds(lambda ratio: ratio < 0, min_lr_ratio) else 1.0
        problems.append(
            f"min_lr_ratio={min_lr_ratio!r}: must lie in [0, 1]; "
            f"nearest valid: min_lr_ratio={nearest}"
        )
    return problems
