"""The figures of the source find what they are for, and a step is traced."""

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.house import __main__ as house
from benchmarks.house import step, watchers
from benchmarks.house.mechanisms import Figure, mechanisms
from benchmarks.house.size import Lines, count_lines, layer_rows, lines_of_tests, sizes
from benchmarks.house.source import Source
from benchmarks.house.strategy import strategy_figures
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool

FILES = {
    "lightning_megatron/__init__.py": "",
    "lightning_megatron/_torch/__init__.py": """
from lightning_megatron._torch.graphs import TorchDispatchMode as TorchDispatchMode
""",
    "lightning_megatron/_torch/graphs.py": """
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
""",
    "lightning_megatron/layers/__init__.py": "",
    "lightning_megatron/layers/parts.py": '''
"""Lecture."""

import sys
import typing
from typing import Protocol

import torch.overrides
from torch import Tensor, nn

from .._torch import TorchDispatchMode


class Part(Tensor): ...
class Smaller(Part): ...
class Quantized: tensor: Tensor
class Weight(nn.Module): ...
class Port(Protocol): ...
class Typed(typing.Protocol[int]): ...
class Ours(Port): ...
class Tape(TorchDispatchMode): ...


class Watch(torch.overrides.TorchFunctionMode):
    def start(self):
        super().__enter__()

    def caller(self):
        return sys._getframe(1).f_locals


class Quiet(torch.overrides.TorchFunctionMode): ...


def look(tensor, function):
    with Quiet():
        tensor.__class__ = Part
    return function.__code__.co_names, function.__code__.co_name
''',
    "lightning_megatron/checkpoint/peers.py": """
from torch.distributed.checkpoint.metadata import Metadata
from lightning_megatron.layers import parts

class Peers:
    def __init__(self, module, tape):
        self.log = None
        vars(self)["a"] = 1
        module.forward = lambda: None
        made = parts.Tape()
        made.__enter__()
        store = module.default_store()
        self.meta = Metadata({})

class RankManifest: ...

def leave_word(store, settings):
    settings.set("a", 1)
    store.set("a", "b")

def look_up(settings):
    return settings.get("a")
""",
    "lightning_megatron/strategy/megatron.py": """
from lightning.pytorch.strategies import ParallelStrategy

class Reduces:
    def barrier(self): ...

class MegatronStrategy(Reduces, ParallelStrategy):
    tuners: list

    def barrier(self):
        self._steps = None
""",
    "tests/test_layering.py": """
LAYERS = {"layers": 1, "layers/parts": 2, "layers/gone": 3}
""",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkout."""
    made = tmp_path_factory.mktemp("checkout")
    for name, text in FILES.items():
        file = made / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.lstrip())
    return made


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.what: figure for figure in figures}


def test_mechanisms_are_found(root: Path) -> None:
    found = {what: figure.where for what, figure in by_name(mechanisms(Source(root))).items()}
    parts, peers = "layers/parts", "checkpoint/peers"
    assert found == {
        "tensor subclasses": (f"Part ({parts})", f"Smaller ({parts})"),
        "TorchFunctionMode subclasses": (f"Watch ({parts})", f"Quiet ({parts})"),
        "TorchDispatchMode subclasses": (f"Tape ({parts})",),
        "modes entered for longer than a block (`__enter__()`)": (
            f"Tape ({parts})",
            f"Watch ({parts})",
        ),
        "files that read stack frames": (parts,),
        "files that read bytecode": (parts,),
        "places that set `__class__`": (parts,),
        "files that may replace attributes of others' objects": (peers,),
        "Protocol classes": (f"Port ({parts})", f"Typed ({parts})"),
        "named ways for ranks to meet": (f"Peers ({peers})",),
        "files that use a store or object collectives": (peers,),
        "definitions that do": (f"Peers ({peers})", f"leave_word ({peers})"),
        "classes that index a checkpoint": (
            f"RankManifest ({peers})",
            f"torch's Metadata ({peers})",
        ),
    }


def test_an_attribute_of_self_is_not_replaced(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "lightning_megatron" / "own.py"
    file.parent.mkdir()
    file.write_text("def f(self):\n    self.forward = 1\n    vars(self)['a'] = 1\n")
    what = "files that may replace attributes of others' objects"
    assert by_name(mechanisms(Source(tmp_path)))[what].where == ()
    file.write_text("def f(self, x):\n    x.__dict__.update(a=1)\n")
    assert by_name(mechanisms(Source(tmp_path)))[what].where == ("own",)


def test_lines_are_told_apart() -> None:
    text = (
        '"""Lecture.\n\nMore."""\n\n# why\nA = """\n\n"""\n"""About A."""\n\n\ndef f(): return 1\n'
    )
    assert count_lines(text) == Lines(files=1, code=4, docstring=4, other=4)
    assert count_lines(text).all == len(text.splitlines())


def test_sizes(root: Path) -> None:
    found = by_name(sizes(Source(root)))
    assert found["files"].value == len(FILES) - 1
    assert found["lines of tests"].value == lines_of_tests(root).all == 1
    # `parts` by `peers`, `graphs` by the folder above it.
    single = found["modules with a single importer"].where
    assert single == ("_torch/graphs", "layers/parts")
    assert found["their share"].value == 50.0
    assert layer_rows(root) == ("layers/parts",)


def test_hooks_in_several_classes_of_the_strategy(root: Path) -> None:
    found = by_name(strategy_figures(Source(root)))
    assert found["of these in several classes"].where == ("barrier",)
    assert found["public names on it beside Lightning's"].where == ("tuners",)


def test_a_record_says_what_is_new_and_gone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["house", "--root", str(root), "--no-step", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", call)
    house.main()
    [record] = tmp_path.glob("house-*.json")
    assert "| tensor subclasses | 2 | Part (layers/parts), Smaller" in record.with_suffix(
        ".md"
    ).read_text(encoding="utf-8")
    data = json.loads(record.read_text())
    data["figures"]["tensor subclasses"] = {
        "value": 2,
        "unit": "",
        "where": ["Part (layers/parts)", "Old (x)"],
    }
    record.write_text(json.dumps(data))
    monkeypatch.setattr("sys.argv", [*call, "--against", str(record)])
    house.main()
    assert (
        "| tensor subclasses | 2 | 2 | Smaller (layers/parts) | Old (x) |"
        in capsys.readouterr().out
    )


def test_a_step_is_traced(pool: WorkerPool) -> None:
    ranks = pool.run(4, step.run, "LooksInSteps")
    for summary, above, modes in ranks:
        assert "training_step (strategy/megatron.py)" in above
        assert 10 < summary["files visited on the way to training_step"] < 100
        assert summary["calls in the package"] < summary["calls of Python functions"]
        assert modes.keys() >= {"configure_model", "training_step", "on_before_optimizer_step"}


def test_tables_of_torch_functions() -> None:
    names = "abs add sub mul div iadd exp log sin cos tanh"
    assert step._functions_in(frozenset(names.split())) == 11
    assert step._functions_in(
        dict.fromkeys([getattr(Tensor, n) for n in dir(Tensor) if n[0] != "_"])
    )
    assert not step._functions_in([f"word{number}" for number in range(20)])
    assert not step._functions_in([torch.exp] * 9)
    assert step._is_torchs(Tensor.data.__get__)  # type: ignore[attr-defined]
    assert not step._is_torchs(Tensor)
    assert not step._is_torchs(time.sleep)


def test_a_function_is_taken_out_and_put_back() -> None:
    switch = watchers.Switch(**{"errors:ConfigError.__str__": lambda _: "off"})
    with ExitStack() as stack:
        assert switch.install("errors", stack)
        assert str(ConfigError("on")) == "on"
        watchers._without.add("errors")
        assert str(ConfigError("on")) == "off"
    assert str(ConfigError("on")) == "on"
    watchers._without.clear()
    with ExitStack() as stack:
        assert not watchers.Switch(**{"errors:Gone.function": print}).install("gone", stack)


# A watcher that the package has no longer is left out of the table.
def test_every_watcher_is_in_this_checkout() -> None:
    for name, switch in watchers.switches().items():
        with ExitStack() as stack:
            assert switch.install(name, stack), name


@pytest.mark.parametrize(
    "case",
    ["one process, 4 microbatches", "tp=2, the step mentions weights", "pp=2, 4 microbatches"],
)
def test_steps_with_and_without_watchers_take_turns(pool: WorkerPool, case: str) -> None:
    options, _, names = watchers.CASES[case]
    ranks = pool.run(options.get("tp", 1) * options.get("pp", 1), watchers.run, case, 2)
    for seconds in ranks:
        assert seconds.keys() - {*names} == {watchers.ON, watchers.CONTROL}
        assert {len(steps) for steps in seconds.values()} == {2}
