"""The random numbers that a resumed run draws are those of the run that was interrupted.

Every process' generators (Python's, numpy's, PyTorch's on the host and on its device, and the
streams of `topology.rng`) go into a checkpoint: one row of some 20 KB per process in one tensor.
Under the layout that it was saved with, each process takes its own row. Another layout has other
processes, and giving one the stream of another could correlate what must not be (dropout of tp
peers, samples of data-parallel ranks); there every stream begins anew, at a place that follows from
the seed, the step and its coordinates, so that this, too, happens twice in the same way.

Rows are restored when training starts, after all that a start draws by itself. Data loading does
not matter, as it draws from generators of its own, nor does validation, after which training goes
on where it was: a checkpoint may be saved before, during or after it. A checkpoint that is saved
while gradients are accumulated holds the rows of when accumulation began, like the position in the
data, and the running statistics of batch norms as they were then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron._torch.devices import is_cuda
from lightning_megatron.checkpoint.chunks import Chunk, clean_name
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.rng import (
    HostRandomness,
    default_state,
    derive_seed,
    seed_generators,
    set_default_state,
)
from lightning_megatron.whole.memory import own_weights


@dataclass(frozen=True)
class RngSnapshot:
    """State of the generators of this process."""

    host: HostRandomness
    others: dict[str, Tensor]


@dataclass(frozen=True)
class _Window:
    """State at the beginning of an accumulation of gradients, of what changes within it."""

    at: tuple[int, int]
    moment: RngSnapshot
    statistics: dict[str, Tensor]
    loss_per_token: bool | None


class RandomState:
    """Takes the generators of this process into checkpoints and back.

    Args:
        topology: which process this is.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._began: _Window | None = None
        self._training: RngSnapshot | None = None
        self._row: dict[str, Tensor] | None = None
        self._anew: tuple[int, int] | None = None

    def note(self, at: tuple[int, int], module: nn.Module, loss_per_token: bool | None) -> None:
        """Remember the present, when the gradients of several batches begin to be accumulated.

        Args:
            at: epoch, and number of the batch that is about to be trained on.
            module: whose running statistics the batches change.
            loss_per_token: what `Steps.loss_per_token` is.
        """
        self._began = _Window(at, self.now(), _statistics(module), loss_per_token)

    def begin_validation(self) -> None:
        """Keep validation's draws from now on from changing what training draws afterwards."""
        self._training = self.now()

    def end_validation(self) -> None:
        """Go on where training was."""
        training, self._training = self._training, None
        if training is not None:
            self.return_to(training)

    def now(self) -> RngSnapshot:
        """Present state of the generators of this process."""
        others = self._topology.rng.state_dict()
        if is_cuda(self._topology.device):
            others["cuda"] = default_state(self._topology.device)
        return RngSnapshot(HostRandomness.capture(), others)

    def return_to(self, moment: RngSnapshot) -> None:
        """Draw from now on as from then on."""
        moment.host.restore()
        if "cuda" in moment.others:
            set_default_state(self._topology.device, moment.others["cuda"].clone())
        self._topology.rng.load_state_dict(moment.others)

    def save(
        self, at: tuple[int, int], model: dict[str, Any], loss_per_token: bool | None, group: Any
    ) -> dict[str, Any]:
        """The rows of all processes, on the first; collective.

        Args:
            at: epoch and number of the first batch that no optimizer step has used.
            model: of the checkpoint; its running statistics are taken back if need be.
            loss_per_token: what `Steps.loss_per_token` is.
            group: all processes, for tensors on the host.
        """
        moment = self._training or self.now()
        if self._began is not None and self._began.at == at:
            moment, loss_per_token = self._began.moment, self._began.loss_per_token
            for name, value in self._began.statistics.items():
                chunk = model.get(name)
                if isinstance(chunk, Chunk):
                    model[name] = replace(chunk, tensor=value)
        fields = {**moment.host.to_tensors(), **moment.others}
        row = torch.cat(list(fields.values()))
        rows = [row]
        if self._topology.world_size > 1:
            rows = [torch.empty_like(row) for _ in range(self._topology.world_size)]
            dist.gather(row, rows if dist.get_rank() == 0 else None, group=group)
        return {
            "by_token": loss_per_token,
            "layout": _layout(self._topology),
            "seed": self._topology.seed,
            "fields": {name: value.numel() for name, value in fields.items()},
            "rows": torch.stack(rows),
        }

    def load(self, saved: Mapping[str, Any], step: int) -> bool | None:
        """Take what `restore` needs from a checkpoint of ``step``; return its ``by_token``."""
        loss_per_token: bool | None = saved["by_token"]
        rows, fields = saved["rows"], saved["fields"]
        same_device = ("cuda" in fields) == (is_cuda(self._topology.device))
        if saved["layout"] == _layout(self._topology) and same_device:
            parts = rows[self._topology.rank].split(list(fields.values()))
            self._row = dict(zip(fields, parts, strict=True))
        else:
            self._anew = saved["seed"], step
        return loss_per_token

    def restore(self) -> None:
        """Go on drawing as the checkpoint says; nothing where none was loaded."""
        row, self._row = self._row, None
        anew, self._anew = self._anew, None
        if row is not None:
            self.return_to(RngSnapshot(HostRandomness.from_tensors(row), row))
        elif anew is not None:
            seed, step = anew
            torch.manual_seed(derive_seed(seed, "default", step))
            seed_generators(derive_seed(seed, "default", step))
            self._topology.rng.reseed(step)


def _layout(topology: Topology) -> dict[str, Any]:
    degrees = {axis: len(getattr(topology, axis).ranks) for axis in ("pp", "batch", "cp", "tp")}
    return {**degrees, "sequence_parallel": topology.sequence_parallel}


@own_weights
def _statistics(module: nn.Module) -> dict[str, Tensor]:
    """Copies of what batch norms and the like gather in every forward."""
    found = {}
    for path, child in module.named_modules():
        if getattr(child, "track_running_stats", False):
            for name, value in child.named_buffers(path, recurse=False):
                found[clean_name(name)] = value.detach().clone()
    return found
