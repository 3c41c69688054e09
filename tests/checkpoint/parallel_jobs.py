"""A small model in any layout, and what the workers of the pool do with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_megatron.checkpoint.chunks import model_chunks, parameter_names, whole
from lightning_megatron.checkpoint.collective_io import Layout, load_directory, save_directory
from lightning_megatron.checkpoint.directory.commit import Staging
from lightning_megatron.checkpoint.optimizer_state import capture_optimizer
from lightning_megatron.checkpoint.save.dcp_writer import offer, write_shards
from lightning_megatron.checkpoint.save.write_assignment import plan_writes
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology

Gathered = dict[str, Tensor]


class Split(ParallelLayer):
    """A linear map whose weight is split over tp along `dim`."""

    def __init__(self, inputs: int, outputs: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def shard_dims(self) -> dict[str, int]:
        return {"weight": 0, "bias": 0} if self.dim == 0 else {"weight": 1}


class Model(nn.Module):
    """Parameters of every kind: split over tp or not, shorter than the data axis, tied, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Split(6, 8, dim=0)
        self.up = Split(6, 20, dim=0)
        self.down = Split(20, 6, dim=1)
        self.short = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.randn(7, 2), requires_grad=False)
        self.register_buffer("mask", torch.arange(4.0), persistent=False)
        self.head = Split(6, 8, dim=0)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embed.weight


def build(seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model()
    model.norm.running_mean = torch.randn(6)
    return model


def shard(model: Model, degrees: Degrees) -> Topology:
    """Apply tensor parallelism and FSDP2."""
    topology = Topology(degrees, torch.device("cpu"))
    for layer in model.modules():
        if isinstance(layer, ParallelLayer):
            layer.distribute(topology)
    model.tie()
    if degrees.dp_shard > 1:
        names = ("dp_replicate", "dp_shard") if degrees.dp_replicate > 1 else "dp_shard"
        for module in (model.down, model):
            fully_shard(module, mesh=topology.mesh[names])
    return topology


def optimizers(model: nn.Module, kind: str) -> list[Optimizer]:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    decay = [p for n, p in trained.items() if n.endswith("weight")]
    plain = [p for n, p in trained.items() if not n.endswith("weight")]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "lr": 0.5}]
    if kind == "adamw":
        return [AdamW(groups, lr=0.25)]
    if kind == "amsgrad":
        return [Adam(groups, lr=0.25, amsgrad=True)]
    return [SGD(decay, lr=0.1, momentum=0.9), SGD(plain, lr=0.2)]


def step(model: nn.Module, chosen: list[Optimizer]) -> None:
    """Two updates; gradients are element-wise functions of the weights, so any layout can do it."""
    for _ in range(2):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name != "short.bias":  # one parameter without state
                parameter.grad = parameter.detach() * 0.5
        for optimizer in chosen:
            optimizer.step()


def gather(tensor: Tensor, like: Any, topology: Topology | None) -> Tensor:
    """Put a tensor together again by collectives: knows nothing of chunks."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    full = full.detach()
    if topology is None or like is None or topology.tp.size == 1 or full.dim() == 0:
        return full.clone()
    parts = [torch.empty_like(full) for _ in range(topology.tp.size)]
    dist.all_gather(parts, full.contiguous(), group=topology.tp.group)
    return torch.cat(parts, dim=like)


def gather_all(model: Model, chosen: list[Optimizer], topology: Topology | None) -> Gathered:
    dims: dict[Tensor, int | None] = dict.fromkeys(model.parameters())
    for layer in model.modules():
        if isinstance(layer, Split):
            dims |= {getattr(layer, n): d for n, d in layer.shard_dims().items()}
    found = {n: gather(p, dims[p], topology) for n, p in model.named_parameters()}
    found |= {n: b.clone() for n, b in model.named_buffers() if n != "mask"}
    names = {p: n for n, p in model.named_parameters()}
    for index, optimizer in enumerate(chosen):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                full = gather(value, dims[parameter], topology) if value is not None else value
                found[f"{index}/{names[parameter]}/{key}"] = full
    return found


def start(degrees: Degrees | None) -> None:
    if degrees is not None:
        dist.init_process_group("gloo")


def options(chosen: list[Optimizer]) -> list[tuple[float, float]]:
    return [(g["lr"], g["weight_decay"]) for o in chosen for g in o.param_groups]


def save_job(path: Path, degrees: Degrees | None, kind: str) -> Gathered:
    start(degrees)
    model = build(seed=1)
    topology = shard(model, degrees) if degrees is not None else None
    chosen = optimizers(model, kind)
    step(model, chosen)
    chosen[0].param_groups[0]["lr"] = 0.125
    chunks = model_chunks(model)
    names = parameter_names(model)
    manifest = save_directory(
        path,
        chunks,
        {"global_step": 2, "loops": {"seen": (1, 2)}},
        optimizers=[capture_optimizer(o, names, chunks) for o in chosen],
        layout={"tp": degrees.tp} if degrees is not None else {},
    )
    assert manifest.layout == ({"tp": degrees.tp} if degrees is not None else {})
    return gather_all(model, chosen, topology)


def load_job(path: Path, degrees: Degrees | None, kind: str) -> Any:
    start(degrees)
    model = build(seed=2 + (dist.get_rank() if degrees is not None else 0))
    topology = shard(model, degrees) if degrees is not None else None
    chosen = optimizers(model, kind)
    state = load_directory(path, model, chosen)
    gathered = gather_all(model, chosen, topology)
    step(model, chosen)  # the state is one that the optimizer can go on with
    return gathered, options(chosen), state, gather_all(model, chosen, topology)


def write_replicated_job(path: Path) -> list[int]:
    dist.init_process_group("gloo")
    chunks = {f"t{i}": whole(torch.full((16, 1024), float(i))) for i in range(8)}
    peers = Peers()
    plan = plan_writes("writing", offer(chunks), peers)
    peers.run("writing", lambda: write_shards(path, plan, chunks), lambda _: None)
    return [file.stat().st_size for file in path.glob("*.distcp")]


class FirstStage(nn.Module):
    """Holds the embedding; the output layer, which shares its weight, is elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.layer = nn.Linear(3, 3)


class LastStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(3)


class BothStages(FirstStage, LastStage):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.head.weight = self.embed.weight


CANONICAL = {"head.weight": "embed.weight"}


def stages_job(path: Path) -> dict[str, Tensor]:
    """Two pipeline stages with a tied weight and different parameter groups save and load."""
    dist.init_process_group("gloo")
    stage: nn.Module = FirstStage() if dist.get_rank() == 0 else LastStage()
    tied = stage.embed if isinstance(stage, FirstStage) else stage.head
    nn.init.constant_(tied.weight, 0.25)
    biases = [p for n, p in stage.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in stage.named_parameters() if not n.endswith("bias")]
    groups = [{"params": weights}, {"params": biases, "lr": 0.5}]
    chosen = SGD(groups, lr=0.1, momentum=0.9)
    for parameter in stage.parameters():
        parameter.grad = parameter.detach() * 0.5
    chosen.step()
    chunks, names = model_chunks(stage, CANONICAL), parameter_names(stage, CANONICAL)
    snapshot = capture_optimizer(chosen, names, chunks)
    save_directory(path, chunks, {}, optimizers=[snapshot])
    expected = {name: p.detach().clone() for name, p in stage.named_parameters()}
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    chosen.state.clear()
    load_directory(path, stage, [chosen], layout=Layout(canonical=CANONICAL))
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, expected[name])
        assert "momentum_buffer" in chosen.state[parameter]
    return expected


def failing_job(path: Path) -> list[str]:
    """Provoke failures on one rank; return the error that this rank saw for each."""
    dist.init_process_group("gloo")
    rank, seen = dist.get_rank(), []

    def attempt(function: Callable[[], object]) -> None:
        try:
            function()
        except (CheckpointError, ConfigError) as error:
            seen.append(f"{type(error).__name__}: {error}")

    model = nn.Linear(2, 2)
    save_directory(path, model_chunks(model), {"global_step": 1})
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # a full disk
            patch.setattr(FileSystemWriter, "write_data", _no_space)
        attempt(lambda: save_directory(path, model_chunks(model), {"global_step": 2}))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:  # the rename fails
            patch.setattr(Staging, "publish", _no_space)
        attempt(lambda: save_directory(path, model_chunks(model), {"global_step": 3}))
    attempt(lambda: save_directory(path, model_chunks(model), {"bad": lambda: 0}))
    attempt(lambda: load_directory(path, nn.Linear(2, 2 + rank)))
    attempt(lambda: load_directory(path, nn.Linear(2, 2, bias=rank == 0)))  # rank 0 has it: fits
    attempt(lambda: load_directory(path, nn.Sequential(nn.Linear(2, 2)) if rank else model))
    return seen


def _no_space(*args: object) -> None:
    raise OSError(28, "No space left on device")


def gathered_parameters_job() -> dict[str, tuple[tuple[int, ...], ...]]:
    """Describe a module whose parameters FSDP2 left gathered, as it does after an evaluation."""
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.zeros(1, 2))
    assert not isinstance(model[0].weight, DTensor)
    chunks = model_chunks(model)
    assert all(isinstance(parameter, DTensor) for parameter in parameter_names(model))
    return {name: (c.full_shape, c.offsets, c.sizes) for name, c in chunks.items()}
