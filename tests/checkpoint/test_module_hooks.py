"""Hooks that look at or change weights while a checkpoint is saved or loaded, under every layout.

Each module is a habit of its own. It is trained for an epoch, saved and loaded into a new one, and
every layout is to find what plain Lightning finds: the names and values in the file, the values
that hooks saw, and the weights after loading.
"""

import copy
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import lightning_megatron
from lightning_megatron import PipelineSequential
from lightning_megatron.checkpoint.load.lazy_tensor import LazyCache, LazyTensor
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import GLOBAL_BATCH, WIDTH, Small, dp_of, make_trainer, samples
from tests.strategy.small import loader as loader_of


def loader(dp: int = 1) -> Any:
    """Of two batches: the second step has moments."""
    return loader_of(samples(2 * GLOBAL_BATCH), dp=dp)


class Net(Small):
    """Layers that tp cuts and a trunk that pp cuts; the base of all others."""

    strict = True

    def __init__(self, *, seed: int = 1, head: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = PipelineSequential(
            layers=[
                nn.Sequential(ColumnParallelLinear(WIDTH, 8), RowParallelLinear(8, WIDTH))
                for _ in range(2)
            ],
            head=nn.Linear(WIDTH, head),
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.double()  # plain Lightning loads before it does so
        self.seen: list[float] = []
        self.strict_loading = self.strict

    def loss(self, batch: Any) -> Tensor:
        out = self.net(self.norm(batch[0]))
        return (out[:, :WIDTH] - batch[1][:, : out.shape[1]]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def note(self, value: Any) -> None:
        self.seen.append(round(float(value), 10))


class Reads(Net):
    """Looks at everything, on all ranks, on one, and through state_dict of its parts."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.note(sum(float(v.sum()) for _, v in sorted(state.items())))
        self.note(sum(v.numel() for v in self.state_dict().values()))
        self.note(torch.equal(state["norm.weight"], self.norm.state_dict()["weight"]))
        if self.trainer.is_global_zero:
            largest = float(state["net.layers.0.0.weight"].abs().max())
            checkpoint["mine"] = {"head": state["net.head.weight"], "largest": largest}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.note(state["net.layers.0.0.weight"].double().norm())
        self.note(checkpoint["mine"]["largest"])
        self.note(torch.equal(checkpoint["mine"]["head"], state["net.head.weight"]))
        self.note(sum(v.shape == state[k].shape for k, v in self.state_dict().items()))


class Renames(Net):
    """Saves under other names, drops one, adds one, changes one; and undoes it."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in list(state):
            state["old." + name] = state.pop(name)
        state["old.net.head.bias"] = state["old.net.head.bias"] * 2
        state["own"] = torch.arange(3.0)
        del state["old.norm.bias"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.note(state.pop("own").sum())
        for name in list(state):
            state[name.removeprefix("old.")] = state.pop(name)
        state["net.head.bias"] /= 2
        state["net.head.weight"][0] = 7.0
        state["norm.bias"] = torch.full((WIDTH,), float(self.global_rank))


class NewHead(Net):
    """Takes over what fits, by the snippet that is in many a forum, into a head of another size."""

    strict = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state, own = checkpoint["state_dict"], self.state_dict()
        for name in list(state):
            if name in own and state[name].shape != own[name].shape:
                state[name] = own[name]
                self.note(1)
        checkpoint["optimizer_states"] = []


class DropsHead(Net):
    """Leaves the head out, whose optimizer state begins anew."""

    strict = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in ("net.head.weight", "net.head.bias"):
            del checkpoint["state_dict"][name]


class Adapters(Net):
    """Saves and loads a part of itself only, under a name of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {"lora." + k: v for k, v in state.items() if "layers.1" in k}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        own = {k.removeprefix("lora."): v for k, v in state_dict.items()}
        keys = super().load_state_dict(own, strict=False)
        self.note(len(keys.missing_keys) > 0)
        self.note(len(keys.unexpected_keys))
        return keys


class Migrated(nn.Linear):
    """A layer whose weight had another name and lay the other way round in version 1."""

    _version = 2

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state.pop(prefix + "kernel").T
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Layers(Net):
    """Layers that do something of their own with state_dict."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net.get_submodule("layers.0").append(Migrated(WIDTH, WIDTH).double())
        self.norm = Noted(WIDTH).double()
        column = self.net.get_submodule("layers.1.0")
        column._register_state_dict_hook(_doubled)
        column.register_load_state_dict_pre_hook(_halved)
        self.register_load_state_dict_post_hook(lambda module, _: module.note(_first(module)))


def _first(module: Any) -> float:
    found = lightning_megatron.gather(module)["norm.weight"]
    return float(found.sum())


class Noted(nn.LayerNorm):
    def get_extra_state(self) -> Any:
        return {"sum": float(self.weight.detach().double().sum())}

    def set_extra_state(self, state: Any) -> None:
        self.found = state["sum"]


def _doubled(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[prefix + "doubled"] = state.pop(prefix + "weight") * 2


def _halved(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    state[prefix + "weight"] = state.pop(prefix + "doubled") / 2


class Found(NamedTuple):
    """What one layout gives."""

    trained: dict[str, Tensor]
    loaded: dict[str, Tensor]
    went_on: dict[str, Tensor]
    seen_saving: list[float]
    seen_loading: list[float]


HABITS: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "Reads": (Reads, {}),
    "Renames": (Renames, {}),
    "NewHead": (NewHead, {"head": 3}),
    "DropsHead": (DropsHead, {}),
    "Adapters": (Adapters, {}),
    "Layers": (Layers, {}),
}


def habits_job(
    layout: dict[str, Any] | None, devices: int, folder: str, names: Sequence[str]
) -> dict[str, Found]:
    """What habits save, see and load."""
    return {name: _habit(name, layout, devices, f"{folder}/{name}.ckpt") for name in names}


def _habit(name: str, layout: Any, devices: int, path: str) -> Found:
    dp = dp_of(devices, layout or {})
    kind, options = HABITS[name]
    first = kind()
    trainer = make_trainer(layout, devices)
    trainer.fit(first, loader(dp=dp))
    trainer.save_checkpoint(path)
    trained = lightning_megatron.gather(first)
    second = kind(seed=2, **options)
    looks = AtStart()
    resumed = make_trainer(layout, devices, callbacks=[looks], max_epochs=2)
    resumed.fit(second, loader(dp=dp), ckpt_path=path)
    return Found(trained, looks.weights, lightning_megatron.gather(second), first.seen, second.seen)


class AtStart(pl.Callback):
    """Notes the weights and whether state_dict of the checkpoint can still be read."""

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        module.note(
            sum(float(v.sum()) for v in checkpoint["state_dict"].values() if isinstance(v, Tensor))
        )

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = lightning_megatron.gather(module)


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 1": {"zero": 1},
    "zero 3": {"zero": 3},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
}


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: Any) -> dict[str, Found]:
    """What plain Lightning gives in one process."""
    found = pool.run(1, habits_job, None, 1, str(tmp_path_factory.mktemp("plain")), [*HABITS])
    return found[0]  # type: ignore[no-any-return]


PAIRS = {
    "zero 3": ("Reads", "NewHead", "Layers"),
    "tp": ("Renames", "DropsHead", "Layers"),
    "pp": ("Reads", "Renames", "NewHead", "Adapters"),
}
"""Habits under each layout; the others are tried by `make test-all`."""


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        *PAIRS.items(),
        *(pytest.param(layout, tuple(HABITS), marks=pytest.mark.thorough) for layout in LAYOUTS),
    ],
)
def test_hooks_see_and_change_what_they_do_in_one_process(layout, names, alone, pool, tmp_path):
    for found in pool.run(2, habits_job, LAYOUTS[layout], 2, str(tmp_path), names):
        for name in names:
            ours, expected = found[name], alone[name]
            assert ours.seen_saving == expected.seen_saving, name
            assert ours.seen_loading == expected.seen_loading, name
            for weights, plain in zip(ours[:3], expected[:3], strict=True):
                torch.testing.assert_close(
                    dict(weights), dict(plain), rtol=1e-9, atol=1e-12, msg=lambda m, n=name: n + m
                )
            check_file(name, tmp_path / f"{name}.ckpt", expected.trained)


def check_file(name: str, path: Path, trained: dict[str, Tensor]) -> None:
    """What is stored has the names and values that hooks left."""
    if name == "Renames":
        renamed = load_full_state_dict(path)
        assert renamed.keys() == {f"old.{n}" for n in trained if n != "norm.bias"} | {"own"}
        torch.testing.assert_close(renamed["old.net.head.bias"], trained["net.head.bias"] * 2)
    elif name == "Layers":
        weight = load_full_state_dict(path)["net.layers.1.0.doubled"]
        torch.testing.assert_close(weight, trained["net.layers.1.0.doubled"])
    elif name == "Reads":
        mine = CheckpointReader(path, alone=True).state["mine"]
        torch.testing.assert_close(mine["head"], trained["net.head.weight"])


class InPlace(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["net.layers.0.0.weight"].mul_(2)


class OwnPart(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weight = self.net.get_submodule("layers.0.0").weight
        checkpoint["state_dict"]["net.layers.0.0.weight"] = weight.detach()


class ChangesOptimizers(Net):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = [{}]


class KeepsOptimizer(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["state_dict"]["net.layers.0.0.weight"]


def refusals_job(folder: str) -> list[str]:
    """What is said to hooks that do what cannot be done."""
    said = []
    for kind in (InPlace, OwnPart, ChangesOptimizers, KeepsOptimizer):
        module, trainer = kind(), make_trainer({"tp": 2, "gather_at_end": False}, 2)
        trainer.fit(module, loader())
        path = f"{folder}/{kind.__name__}.ckpt"
        try:
            trainer.save_checkpoint(path)
            if kind is KeepsOptimizer:
                module.kept.sum()
            make_trainer({"tp": 2, "gather_at_end": False}, 2).fit(kind(), loader(), ckpt_path=path)
        except (ConfigError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_what_cannot_be_done_is_refused_by_name(pool, tmp_path):
    for in_place, part, optimizers, late in pool.run(2, refusals_job, str(tmp_path)):
        name = r"checkpoint\['state_dict'\]\['net.layers.0.0.weight'\]"
        assert re.search(f"on_save_checkpoint changes {name} in place.*nearest valid", in_place)
        assert re.search(f"sets {name} to this rank's shard .*nearest valid", part)
        assert re.search(r"\['optimizer_states'\].*nearest valid: .* = \[\]", optimizers)
        assert re.search(r"net.layers.0.0.weight: .* in on_save_checkpoint only", late)


class FailsToLoad(Net):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        raise RuntimeError("not this one")

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def failed_load_job(folder: str) -> tuple[int, int]:
    """Hooks of ``state_dict`` that a module has before and after a validation that cannot load."""
    path = f"{folder}/saved.ckpt"
    trainer = make_trainer({"tp": 2}, 2)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(path)
    module = FailsToLoad()
    before = sum(len(child._state_dict_hooks) for child in module.modules())
    with pytest.raises(RuntimeError, match="not this one"):
        make_trainer({"tp": 2}, 2).validate(module, loader(), ckpt_path=path)
    return before, sum(len(child._state_dict_hooks) for child in module.modules())


def test_a_load_that_fails_leaves_the_state_dict_alone(pool, tmp_path):
    for before, after in pool.run(2, failed_load_job, str(tmp_path)):
        assert after == before


def test_values_are_fetched_when_they_are_looked_at_and_let_go_afterwards():
    fetched = []

    def lazy(name: str) -> LazyTensor:
        def fetch() -> Tensor:
            fetched.append(name)
            return torch.arange(6.0).view(2, 3)

        return LazyTensor(name, (2, 3), torch.float32, torch.device("cpu"), fetch, cache)

    cache = LazyCache()
    a, b = lazy("a"), lazy("b")
    assert (a.shape, a.dtype, a.dim(), len(a), a.is_floating_point()) == (
        (2, 3),
        torch.float32,
        2,
        2,
        True,
    )
    assert "a" in repr(a)
    assert fetched == []
    assert float(a.sum()) == 15
    assert torch.equal(a, torch.arange(6.0).view(2, 3))
    assert fetched == ["a"]
    layer = nn.Linear(3, 2, bias=False)
    layer.load_state_dict({"weight": b})
    assert layer.weight.tolist() == b.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert a.held() is None  # b took its place
    assert a.changed() is None
    a[0].zero_()
    b.sum()
    assert a.changed().tolist() == [[0, 0, 0], [3, 4, 5]]
    buffer = io.BytesIO()
    torch.save({"a": a}, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)["a"].tolist() == a.tolist()
    assert type(copy.deepcopy(b)) is Tensor
