"""The import of a Hugging Face model as a checkpoint, in one process, file by file.

The result is an ordinary checkpoint of weights, which every layout loads. It is marked as
`PRETRAINED`: training with it as ``ckpt_path`` takes the weights and starts at step 0. Any other
checkpoint without optimizer state is refused, as its run could not go on from it.

A script that imports a model and then trains runs in every process of the run, and again after a
restart. So an import stores a hash of its source, and does nothing if the result exists already.
The processes of a machine take turns.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from lightning_megatron.checkpoint.chunks import Chunk, whole
from lightning_megatron.checkpoint.directory.manifest import local_path, read_manifest
from lightning_megatron.checkpoint.directory.verify import check_files
from lightning_megatron.checkpoint.load.reader import PRETRAINED
from lightning_megatron.checkpoint.offline.huggingface.directory import HuggingFaceDirectory
from lightning_megatron.checkpoint.offline.offline_writer import (
    FileContent,
    groups,
    target_problems,
    write_in_parts,
)
from lightning_megatron.checkpoint.trainer_state.state_files import read_state_files
from lightning_megatron.errors import CheckpointError, raise_if_any
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.hf_config import config_from_hugging_face
from lightning_megatron.models.weights import EMBEDDING, HEAD, Weight, match_names, weights_of

logger = logging.getLogger(__name__)

_SAMPLE = 1 << 16
"""Bytes at either end of a file that identify it, with its size."""
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def import_hugging_face(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    pad_vocab_to_multiple: int = 1,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 2**30,
    overwrite: bool = False,
) -> TransformerConfig:
    """Make a checkpoint directory from a Hugging Face model.

    `Trainer.fit(LanguageModel(path), ckpt_path=path)` then starts at step 0 from its weights, under
    any layout. The import needs the memory of ``max_shard_bytes``, or of twice the largest tensor.

    Nothing is done if ``path`` is already an import of the same files with the same options. So the
    call may be at the top of a training script: one process of a machine writes, the others wait
    for it. Machines without a shared file system each make their own.

    Args:
        directory: a directory with ``config.json`` and safetensors files.
        path: the checkpoint directory to make.
        pad_vocab_to_multiple: number to a multiple of which the vocabulary is padded, so that tp
            can split it.
        dtype: dtype of the weights in the checkpoint; unchanged when None. Training converts them
            to its own.
        max_shard_bytes: largest size of a file, unless a single tensor is larger.
        overwrite: whether to replace another checkpoint that is there.

    Returns:
        The sizes of the model, which are also stored in the checkpoint.

    Raises:
        ConfigError: the directory is no model of a known family, or weights are missing,
            superfluous or of another shape; it has all faults. Nothing was written.
        CheckpointError: reading or writing failed; ``path`` is unchanged.
    """
    source, target = HuggingFaceDirectory(directory), local_path(path)
    config = config_from_hugging_face(source.config, pad_vocab_to_multiple=pad_vocab_to_multiple)
    kind = source.config["model_type"]
    weights = weights_of(config, kind)
    names = _without_second_tokens(source, config)
    matched, problems = match_names(weights, names, tied_embeddings=config.tied_embeddings)
    problems += _tensor_problems(source, weights, matched)
    origin = _origin(source, pad_vocab_to_multiple, dtype)
    exists = _is_import(target, origin)
    raise_if_any([*([] if exists else target_problems(target, overwrite)), *problems])
    if not exists:
        target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if exists else _turn(target.parent):
        if exists or _is_import(target, origin):
            logger.info("%s is an import of %s already", target, source.path)
            return config
        raise_if_any(target_problems(target, overwrite))
        reading = _Reading(source, matched, config, dtype)
        state = {
            "epoch": 0,
            "global_step": 0,
            "pytorch-lightning_version": version("lightning"),
            "hyper_parameters": {"config": asdict(config)},
            PRETRAINED: {"format": "hugging face", "model_type": kind, "origin": origin},
        }
        parts = [reading.part(group) for group in reading.groups(weights, max_shard_bytes)]
        write_in_parts(target, parts, state)
    return config


def _without_second_tokens(source: HuggingFaceDirectory, config: TransformerConfig) -> list[str]:
    """Names of the tensors without those of DeepSeek-V3's modules that predict a second token."""
    count = source.config.get("num_nextn_predict_layers") or 0
    further = tuple(f"model.layers.{config.num_layers + i}." for i in range(count))
    kept = [name for name in source.tensors if not (further and name.startswith(further))]
    if len(kept) < len(source.tensors):
        logger.warning(
            "%s: %d tensors of %s are left out: they predict tokens after the next one",
            source.path,
            len(source.tensors) - len(kept),
            ", ".join(name.rstrip(".") for name in further),
        )
    return kept


def _origin(source: HuggingFaceDirectory, padding: int, dtype: torch.dtype | None) -> str:
    """Return a hash of the source and the options."""
    options = {"config": source.config, "padding": padding, "dtype": str(dtype)}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    files = {file.path.name: file.path for file in source.tensors.values()}
    for name in sorted(files):
        with files[name].open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{name} {size}".encode())
            for begin in (0, max(size - _SAMPLE, 0)):
                file.seek(begin)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _is_import(target: Path, origin: str) -> bool:
    """Return whether ``target`` is a complete import of this origin."""
    try:
        # Not its sibling that another process is about to rename: the caller opens the target.
        manifest = read_manifest(target)
        check_files(target, manifest)
        state = read_state_files(target, manifest)[0]["state"]
    except (CheckpointError, OSError):
        return False
    made_of = state.get(PRETRAINED)
    return isinstance(made_of, Mapping) and made_of.get("origin") == origin


@contextlib.contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, so that one process at a time runs the block."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # without locks the last import stays
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Reading:
    """Converts weights of the source to our tensors."""

    def __init__(
        self,
        source: HuggingFaceDirectory,
        matched: Mapping[str, str],
        config: TransformerConfig,
        dtype: torch.dtype | None,
    ) -> None:
        self._source = source
        self._matched = matched
        self._tied = config.tied_embeddings
        self._dtype = dtype

    def groups(self, weights: Sequence[Weight], most: int) -> Iterator[list[Weight]]:
        """Yield consecutive weights of at most ``most`` bytes together."""
        return groups(((w, self._source.info(self._matched[w.name]).size) for w in weights), most)

    def part(self, group: Sequence[Weight]) -> FileContent:
        """Return one file of the checkpoint."""

        def load() -> dict[str, Chunk]:
            return self._chunks(group, self._source.read)

        def describe(name: str) -> Tensor:
            info = self._source.info(name)
            return torch.empty(info.shape, dtype=info.dtype, device="meta")

        return FileContent(planned=self._chunks(group, describe), load=load)

    def _chunks(self, group: Sequence[Weight], read: Callable[[str], Tensor]) -> dict[str, Chunk]:
        chunks: dict[str, Chunk] = {}
        stacks: dict[str, list[tuple[Weight, Tensor]]] = {}
        for weight in group:
            dtype = None if weight.keeps_dtype else self._dtype
            parts = weight.to_ours(read(self._matched[weight.name]))
            for name, value in zip(weight.ours, parts, strict=True):
                own = value.to(dtype or value.dtype)
                if weight.expert is None:
                    chunks[name] = whole(own.contiguous())
                else:
                    stacks.setdefault(name, []).append((weight, own))
        chunks |= {name: _stack(matrices) for name, matrices in stacks.items()}
        if self._tied and EMBEDDING in chunks:
            chunks[EMBEDDING] = replace(chunks[EMBEDDING], aliases=(HEAD,))
        return chunks


def _stack(matrices: Sequence[tuple[Weight, Tensor]]) -> Chunk:
    """Return the chunk of neighbouring experts."""
    first = matrices[0][0]
    stacked = torch.stack([matrix for _, matrix in matrices])
    shape = (first.num_experts, *stacked.shape[1:])
    assert first.expert is not None
    return Chunk(tensor=stacked, full_shape=shape, offsets=(first.expert, 0, 0))


def _tensor_problems(
    source: HuggingFaceDirectory, weights: Sequence[Weight], matched: Mapping[str, str]
) -> list[str]:
    problems = []
    for weight in weights:
        if weight.name not in matched:
            continue
        info = source.info(matched[weight.name])
        if info.shape != weight.shape:
            problems.append(
                f"{weight.name}: shape {info.shape}, config.json asks for {weight.shape}"
            )
        if info.dtype not in _FLOATS:
            problems.append(f"{weight.name}: {info.dtype}: quantised weights are not read")
    return problems
