"""Upcycling: a mixture of experts made of a dense model (Komatsuzaki et al., arXiv 2212.05055).

Each expert begins as a copy of the MLP in whose place it stands, and the router with small random
weights. The weights of a token's experts add up to 1, so the mixture computes what the dense model
did, and training pulls the experts apart: each sees other tokens. With ``noise`` they differ from
the start, and the result differs from the dense model.

Tensors are read and written one at a time. The result is an ordinary checkpoint of weights, marked
as `PRETRAINED`: training with it as ``ckpt_path`` starts at step 0.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version

import torch
from torch import Tensor

from lightning_megatron.build.written_values import draw
from lightning_megatron.checkpoint.chunks import Chunk, whole
from lightning_megatron.checkpoint.directory.manifest import local_path
from lightning_megatron.checkpoint.load.file_reader import open_checkpoint
from lightning_megatron.checkpoint.load.reader import MODEL_PREFIX, PRETRAINED, CheckpointReader
from lightning_megatron.checkpoint.offline.huggingface.safetensors_file import TensorInfo
from lightning_megatron.checkpoint.offline.huggingface.transformer import (
    config_of,
    transformer_prefix,
)
from lightning_megatron.checkpoint.offline.offline_writer import (
    FileContent,
    groups,
    target_problems,
    write_in_parts,
)
from lightning_megatron.errors import at_least, raise_if_any, whole_numbers
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.topology.rng import derive_seed


def upcycle(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    experts: MixtureConfig,
    *,
    noise: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 2**30,
    overwrite: bool = False,
) -> TransformerConfig:
    """Make a checkpoint of a mixture of experts from one of a dense model.

    ``Trainer.fit(LanguageModel(path), ckpt_path=path)`` then starts at step 0, under any layout,
    with the logits of the dense model (to rounding) where ``noise`` is 0.

    Args:
        source: checkpoint directory of any layout, of a module with a `Transformer` in it.
        path: the checkpoint directory to make.
        experts: which blocks become mixtures, and of what sizes.
        noise: standard deviation of normal noise on the experts' weights, as a share of that of
            each matrix.
        seed: seed of the routers' initial weights and of the noise.
        dtype: dtype of the weights in the checkpoint; unchanged when None.
        max_shard_bytes: largest size of a file, unless a single matrix is larger.
        overwrite: whether to replace a checkpoint that is there.

    Returns:
        The sizes of the new model, which are also stored in the checkpoint.

    Raises:
        ConfigError: the model is no dense one, or ``experts`` cannot begin as copies of its MLPs;
            it has all faults. Nothing was written.
        CheckpointError: reading or writing failed; ``path`` is unchanged.
    """
    target = local_path(path)
    raise_if_any([*at_least(0.0, noise=noise), *whole_numbers(0, seed=seed)])
    reader = open_checkpoint(source, alone=True)
    dense = config_of(reader)
    raise_if_any([*target_problems(target, overwrite), *_problems(dense, experts)])
    config = replace(dense, experts=experts)
    making = _Making(reader, config, noise, seed, dtype)
    stored = reader.state.get("hyper_parameters") or {}
    state = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        "hyper_parameters": {**stored, "config": asdict(config)},
        PRETRAINED: {"format": "upcycled"},
    }
    write_in_parts(target, making.parts(max_shard_bytes), state)
    return config


def _problems(dense: TransformerConfig, experts: MixtureConfig) -> list[str]:
    """Reasons why a mixture cannot begin as the dense model."""
    if dense.experts is not None:
        return ["the model has experts already: must be a dense one"]
    valid = {
        "shared_size": (experts.shared_size, 0, "would add to the output"),
        "mlp_size": (experts.mlp_size, None, "would be no copy of an MLP"),
        "router.normalize": (experts.router.normalize, True, "weights must add up to 1"),
        "router.scale": (experts.router.scale, 1.0, "weights must add up to 1"),
        "router.noise": (experts.router.noise, 0.0, "in training"),
        "router.capacity_factor": (
            experts.router.capacity_factor,
            None,
            "drops tokens in training",
        ),
    }
    if experts.mlp_size == dense.mlp_width:
        del valid["mlp_size"]
    return [
        f"experts.{name}={value}: the logits would not be those of the dense model ({why}); "
        f"nearest valid: experts.{name}={needed}"
        for name, (value, needed, why) in valid.items()
        if value != needed
    ]


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Tensor of the new model, or one expert's matrix of it."""

    name: str
    """Name in the module that was saved, and in the new checkpoint."""
    info: TensorInfo
    """Shape and dtype."""
    source: str | None = None
    """Stored name of the tensor whose values it takes; None: it is a router's."""
    expert: int | None = None


class _Making:
    """Makes the tensors of the new model from those of the dense one."""

    def __init__(
        self,
        reader: CheckpointReader,
        config: TransformerConfig,
        noise: float,
        seed: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._reader, self._noise, self._seed, self._dtype = reader, noise, seed, dtype
        self._prefix = transformer_prefix(reader)
        with torch.device("meta"):
            self._model = Transformer(config)
        self._shapes = {n: tuple(t.shape) for n, t in self._model.state_dict().items()}
        self._last: tuple[str, Tensor] | None = None
        self._used: set[str] = set()
        problems: list[str] = []
        self._pieces = [piece for name in self._shapes for piece in self._find(name, problems)]
        problems += [
            f"{name}: not a weight of the dense model"
            for name in (*reader.model_names(), *reader.extras)
            if name not in self._used
        ]
        raise_if_any(problems)

    def _find(self, name: str, problems: list[str]) -> list[_Piece]:
        """Return what is to be made of a tensor, or add why it cannot."""
        shape, full = self._shapes[name], self._prefix + name
        block, is_mixture, part = name.partition(".mlp.experts.")
        router = name.partition(".mlp.router.")
        if router[1]:
            dtype = torch.float32 if router[2] == "bias" else self._stored_dtype(router[0])
            return [_Piece(name=full, info=TensorInfo(dtype=dtype, shape=shape))]
        dense = f"{block}.mlp.{part}.weight" if is_mixture else name
        source = self._reader.stored_name(self._prefix + dense)
        if source is None:
            problems.append(f"{dense}: a weight of the model that the checkpoint does not have")
            return []
        if source in self._used and not is_mixture:  # a tied head
            return []
        self._used.add(source)
        own = shape[1:] if is_mixture else shape
        entry = self._reader.manifest.tensors[f"{MODEL_PREFIX}.{source}"]
        if tuple(entry.shape) != own:
            problems.append(f"{dense}: shape {entry.shape} in the checkpoint, the model has {own}")
        info = TensorInfo(dtype=self._dtype or entry.torch_dtype, shape=own)
        if not is_mixture:
            return [_Piece(name=source, info=info, source=source)]
        return [
            _Piece(name=full, info=info, source=source, expert=expert) for expert in range(shape[0])
        ]

    def _stored_dtype(self, block: str) -> torch.dtype:
        stored = self._reader.stored_name(f"{self._prefix}{block}.mlp.up.weight")
        if self._dtype is not None or stored is None:
            return self._dtype or torch.float32
        return self._reader.manifest.tensors[f"{MODEL_PREFIX}.{stored}"].torch_dtype

    def parts(self, most: int) -> list[FileContent]:
        """Return the files of the new checkpoint, of at most ``most`` bytes each."""
        found = groups(((piece, piece.info.size) for piece in self._pieces), most)
        return [self._part(group) for group in found]

    def _part(self, group: Sequence[_Piece]) -> FileContent:
        def describe(piece: _Piece) -> Tensor:
            return torch.empty(piece.info.shape, dtype=piece.info.dtype, device="meta")

        return FileContent(
            planned=self._chunks(group, describe), load=lambda: self._chunks(group, self._value)
        )

    def _chunks(
        self, group: Sequence[_Piece], value: Callable[[_Piece], Tensor]
    ) -> dict[str, Chunk]:
        chunks: dict[str, Chunk] = {}
        experts: dict[str, list[_Piece]] = {}
        for piece in group:
            if piece.expert is not None:
                experts.setdefault(piece.name, []).append(piece)
                continue
            known = self._reader.manifest.aliases.items()
            aliases = tuple(alias for alias, owner in known if owner == piece.name)
            chunks[piece.name] = replace(whole(value(piece)), aliases=aliases)
        for name, pieces in experts.items():
            first = pieces[0].expert
            assert first is not None
            chunks[name] = Chunk(
                tensor=torch.stack([value(piece) for piece in pieces]),
                full_shape=self._shapes[name.removeprefix(self._prefix)],
                offsets=(first, 0, 0),
            )
        return chunks

    def _value(self, piece: _Piece) -> Tensor:
        if piece.source is None:
            return self._router(piece).to(piece.info.dtype)
        values = self._read(piece.source)
        if piece.expert is not None and self._noise:
            seed = derive_seed(self._seed, "upcycle", piece.name, piece.expert)
            wide = values.to(torch.promote_types(values.dtype, torch.float32))
            drawn = torch.randn(
                wide.shape, dtype=wide.dtype, generator=torch.Generator().manual_seed(seed)
            )
            values = wide + self._noise * wide.std() * drawn
        return values.to(piece.info.dtype)

    def _router(self, piece: _Piece) -> Tensor:
        """Draw a router's weights as a new model has them."""
        owner, _, local = piece.name.removeprefix(self._prefix).rpartition(".")
        layer = self._model.get_submodule(owner)
        assert isinstance(layer, ParallelLayer)
        cpu = torch.device("cpu")
        return draw(layer, local, piece.name, piece.info.shape, self._seed, cpu)

    def _read(self, stored: str) -> Tensor:
        """Read a tensor; the last one is kept, as each expert takes it."""
        if self._last is None or self._last[0] != stored:
            self._last = stored, self._reader.tensor(stored)
        return self._last[1]
