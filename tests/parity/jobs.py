"""What the workers do: the reference's model built from our layers, trained by a Trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_megatron._torch.graphs import tree_map
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.linear_loss import LinearCrossEntropy
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.topology.mesh import Topology
from tests.parity import reference
from tests.parity.prove import quiet_trainer as quiet_trainer
from tests.parity.reference import Architecture, Data

_PARTS = {
    "q": "attention.wq",
    "k": "attention.wk",
    "v": "attention.wv",
    "o": "attention.wo",
    "q_norm": "attention.q_norm",
    "k_norm": "attention.k_norm",
    "gate": "mlp.gate",
    "up": "mlp.up",
    "down": "mlp.down",
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
}
_TABLES = {"tokens": "embedding.tokens", "positions": "embedding.positions", "norm": "norm"}


def our_name(name: str) -> str:
    """Name in `Transformer` of a parameter of `DenseTransformer`."""
    *path, leaf = name.split(".")
    if "mixture" in path:
        return ".".join(("trunk.layers", path[1], "mlp", *path[3:], leaf))
    if path[0] == "blocks":
        return f"trunk.layers.{path[1]}.{_PARTS[path[2]]}.{leaf}"
    return f"trunk.{_TABLES[path[0]]}.{leaf}"


def transformer_config(architecture: Architecture) -> TransformerConfig:
    """The sizes of the reference."""
    llama = architecture != "gpt"
    return TransformerConfig(
        vocab_size=reference.VOCABULARY,
        hidden_size=reference.HIDDEN,
        num_layers=reference.LAYERS[architecture],
        num_heads=reference.HEADS,
        num_kv_heads=reference.KV_HEADS,
        mlp_size=reference.MLP,
        max_seq_len=reference.LONGEST,
        activation="swiglu" if llama else "gelu",
        norm="rmsnorm" if llama else "layernorm",
        positions="rotary" if llama else "learned",
        qk_norm=architecture == "qwen",
        qkv_bias=not llama,
        bias=not llama,
        tied_embeddings=True,
    )


def batch_share(batch: Any, size: int, rank: int) -> Any:
    """The part of a global batch that one data-parallel rank reads."""
    return tree_map(lambda t: t.chunk(size)[rank], batch)


class GlobalBatches(L.LightningModule):
    """A module that trains on given global batches, of which each rank reads its share."""

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        axis = self.trainer.strategy.topology.batch
        shares = [batch_share(batch, axis.size, axis.rank) for batch in self.batches]
        return DataLoader(shares, batch_size=None, shuffle=False)  # type: ignore[arg-type]


def mixture() -> MixtureOfExperts:
    """The experts of the reference."""
    layer = MixtureOfExperts(
        reference.HIDDEN,
        reference.MLP,
        reference.EXPERTS,
        reference.TOP_K,
        router=RouterConfig(balance_weight=reference.BALANCE, z_loss=reference.Z_LOSS),
    )
    return layer.double()


class ParityModule(GlobalBatches):
    """The reference's training in the form of an ordinary LightningModule.

    Args:
        architecture: of the reference model.
        data: the global batches.
        by_token: return the sum of the losses and the number of tokens instead of a mean.
        chunked_loss: never hold the logits of more than five positions.
    """

    def __init__(
        self,
        architecture: Architecture,
        data: Data,
        by_token: bool = False,
        chunked_loss: bool = False,
    ) -> None:
        super().__init__(data.batches())
        weights = reference.initial_weights(architecture)
        self.model = Transformer(transformer_config(architecture)).double()
        if architecture == "mixture":
            for layer in self.model.trunk.layers:
                layer.mlp = mixture()
        state = {our_name(name): value for name, value in weights.items()}
        self.model.load_state_dict({**state, "trunk.head.weight": weights["tokens.weight"]})
        self.by_token, self.chunked_loss = by_token, chunked_loss
        if chunked_loss:
            self._chunk_loss()
        self.loss = VocabParallelCrossEntropy(
            ignore_index=reference.IGNORED, reduction="sum" if by_token else "mean"
        )

    def _chunk_loss(self) -> None:
        trunk = self.model.trunk
        trunk.head = LinearCrossEntropy(
            reference.HIDDEN,
            reference.VOCABULARY,
            chunk_size=5,
            ignore_index=reference.IGNORED,
            reduction="sum" if self.by_token else "mean",
        )
        trunk.head.weight = trunk.embedding.tokens.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        if self.chunked_loss:
            loss = self.model.trunk(tokens, targets=targets)
        else:
            loss = self.loss(self.model(tokens), targets)
        if not self.by_token:
            return loss
        return {"loss": loss, "num_tokens": (targets != reference.IGNORED).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **reference.ADAMW)


class Recorder(L.Callback):
    """Losses of all batches and norms of all optimizer steps."""

    def __init__(self, batch_accumulation: int) -> None:
        self.losses: list[Tensor] = []
        self.norms: list[float] = []
        self._accumulate = batch_accumulation

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning hands out the loss divided for accumulation.
        self.losses.append(outputs["loss"].detach() * self._accumulate)
        if (batch_idx + 1) % self._accumulate == 0:
            self.norms.append(trainer.strategy.parallel.gradients.last_norm.item())


@dataclass
class Outcome:
    """What one rank found."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Whole parameters of this rank's stage."""
    extra: Any = None


def whole_parameters(module: nn.Module, topology: Topology) -> dict[str, Tensor]:
    """Every parameter of this rank put together over ZeRO and tp; collective."""
    found = {}
    for name, parameter in module.named_parameters():
        tensor = parameter.detach()
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        owner, _, leaf = name.rpartition(".")
        layer = module.get_submodule(owner)
        shard = layer.tensor_shards.get(leaf) if isinstance(layer, ParallelLayer) else None
        axis = topology.axes_of("tp" if shard is None else shard.axis).layer
        if shard is not None and shard.dim is not None and axis.group is not None:
            pieces = [torch.empty_like(tensor) for _ in range(axis.size)]
            dist.all_gather(pieces, tensor.contiguous(), group=axis.group)
            tensor = torch.cat(pieces, dim=shard.dim)
            assert tuple(tensor.shape) == shard.full_shape, name
        found[name] = tensor.clone()
    return found


def merge_stages(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    """The weights of the whole model; every rank that holds one must hold the same, to the bit."""
    merged: dict[str, Tensor] = {}
    for rank, outcome in enumerate(outcomes):
        for name, value in outcome.weights.items():
            if name.endswith("placeholder"):
                continue
            kept = merged.setdefault(name, value)
            assert torch.equal(kept, value), f"rank {rank} holds another {name}"
    return merged


def train_job(
    strategy_options: Mapping[str, Any],
    architecture: Architecture,
    data: Data,
    by_token: bool = False,
    accumulate: int = 1,
    checkpointed: bool = False,
    chunked_loss: bool = False,
) -> Outcome:
    """Train the parity module under one layout; the user may have ``checkpointed`` blocks."""
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(**strategy_options)
    recorder = Recorder(accumulate)
    trainer = quiet_trainer(
        strategy,
        callbacks=[recorder],
        gradient_clip_val=reference.CLIP,
        accumulate_grad_batches=accumulate,
    )
    module = ParityModule(architecture, data, by_token, chunked_loss)
    if checkpointed:
        for layer in module.model.trunk.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    trainer.fit(module)
    losses = [float(strategy.reduce(loss)) for loss in recorder.losses]
    return Outcome(losses, recorder.norms, whole_parameters(module.model, strategy.topology))
