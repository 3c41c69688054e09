"""Building on the meta device what can be given its values later, and only that.

``configure_model`` runs where tensors have a shape and no values; `build.init` makes the values
once it is known what this rank holds: those that modules draw themselves, and those that the hook
wrote, which `build.init_tape` has noted. Where the hook needs values in order to go on, or leaves
modules that cannot be filled later, it is called again with real tensors, after everything that it
did to the module has been undone.

A metric has no rule to make its values: its constructor says what its state begins with
(``torch.tensor(0.0)``, ``torch.zeros(num_classes)``), and the answer is lost on the meta device. So
what the constructor of a metric makes is real.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.build.init import uninitialisable
from lightning_megatron.build.init_tape import InitTape
from lightning_megatron.build.written_values import WrittenValues, written_values
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.rng import HostRandomness

_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_CONSTRUCTORS = _FROM_DATA | {
    torch.scalar_tensor,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.empty,
    torch.eye,
    torch.arange,
    torch.linspace,
    torch.logspace,
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
}
"""Functions that make a tensor from no other."""
_ASKS_FOR_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SETS_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


OTHER_AXES = ("tensor_parallel", "data_parallel")
"""Names of the axes of ``ModelParallelStrategy``'s mesh."""


def axis_problem(name: object) -> str:
    """Message for a module that asks for an axis of ``ModelParallelStrategy``."""
    return (
        f"device_mesh[{name!r}]: that is an axis of ModelParallelStrategy; MegatronStrategy splits "
        "layers itself, and its axes are 'pp', 'dp_replicate', 'dp_shard', 'cp' and 'tp'; nearest "
        "valid: layers of lightning_megatron.layers, which tp=2 splits, and zero=3, which shards "
        "all others"
    )


def refuse_spread(module: nn.Module) -> None:
    """Refuse a module that its ``configure_model`` has spread over processes itself.

    Raises:
        ConfigError: parameters are spread by ``parallelize_module`` or ``fully_shard``.
    """
    spread = [name for name, p in module.named_parameters() if isinstance(p, DTensor)]
    if spread:
        shown = ", ".join(spread[:3]) + (", ..." if len(spread) > 3 else "")
        raise ConfigError(
            f"{shown}: spread over processes by parallelize_module, fully_shard or "
            "distribute_tensor in configure_model, where MegatronStrategy spreads whole "
            "parameters itself; nearest valid: no such calls, but layers of "
            "lightning_megatron.layers, which tp=2 splits, and zero=3, which shards all others"
        )


class _Construction(TorchFunctionMode):
    """Lets what is lost on the meta device be seen, or keeps it off that device.

    Args:
        tape: notes it.
    """

    def __init__(self, tape: InitTape) -> None:
        super().__init__()
        self._tape = tape

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func == _ASKS_FOR_META and func(*args):
            return self._is_meta(args[0], sys._getframe(1))
        if func == _SETS_DATA and args[0].is_meta:
            return func(args[0], args[1].to("meta"))
        if func in _CONSTRUCTORS and options.get("device") is None:
            if _builds_metric(sys._getframe(1)):
                options["device"] = torch.device("cpu")
            elif func in _FROM_DATA:
                return _from_data(func, args, options)
            else:  # torch.device forgets those that transformers replaced at its first use
                options["device"] = torch.device("meta")
        return func(*args, **options)

    def _is_meta(self, tensor: Tensor, asker: FrameType) -> bool:
        """Answer ``is_meta``, on which torch leaves out writes, or warns of them.

        Initialisations return at once, as they would have to read what they have drawn.
        """
        where, code = asker.f_globals, asker.f_code
        if where.get("__name__") == "torch.nn.init":
            given = {name: asker.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
            self._tape.note_initialisation(where[code.co_name], tensor, given)
            return True
        return where.get("__name__") != "torch.nn.modules.module"


def _from_data(func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Tensor:
    """A tensor on meta whose values an operator has put there, which the tape sees."""
    if args and isinstance(args[0], Tensor) and func is not torch.tensor:
        return func(*args, **{**options, "device": args[0].device})  # type: ignore[no-any-return]
    needs_gradient = bool(options.pop("requires_grad", False))
    real = func(*args, **{**options, "device": torch.device("cpu")})
    made: Tensor = real.to("meta")
    return made.requires_grad_(needs_gradient)


def _builds_metric(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__":
            first = code.co_varnames[0] if code.co_varnames else ""
            if isinstance(frame.f_locals.get(first), Metric):
                return True
        frame = frame.f_back
    return False


@contextmanager
def on_meta(tape: InitTape) -> Iterator[None]:
    """Within the block tensors are made on the meta device, but for the state of metrics."""
    with torch.device("meta"), _Construction(tape), tape:
        yield


class Attempt:
    """One call of ``configure_model`` on the meta device, which can be undone.

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tape = InitTape(module)
        self._attributes = [
            (part, {name: _contents(value) for name, value in vars(part).items()})
            for part in module.modules()
        ]
        self._frozen = [(p, p.requires_grad) for p in module.parameters()]
        self._host = HostRandomness.capture()
        self.error: Exception | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surrounds the call; an error of it becomes `error`, as it may be due to the device."""
        try:
            with on_meta(self._tape):
                yield
        except Exception as error:
            self.error = error

    def undo(self) -> None:
        """Leave the module and the generators of this process as they were."""
        for part, attributes in self._attributes:
            vars(part).clear()
            for name, (value, contents) in attributes.items():
                vars(part)[name] = value
                if contents is not None:
                    _refill(value, contents)
        for parameter, needed in self._frozen:
            parameter.requires_grad_(needed)
        self._tape.undo()
        self._host.restore()

    def written(self) -> WrittenValues | None:
        """Values that the call wrote; None if the module has to be built with real tensors."""
        if self.error is not None or uninitialisable(self._module):
            return None
        if any(_lacks_initialisation(m) for m in self._module.modules()):
            return None
        written = written_values(self._tape, self._module)
        return None if self._tape.reason is not None else written

    @property
    def needs_values(self) -> bool:
        """Whether the call would need real tensors whenever it is made."""
        return self._tape.reason is not None

    @property
    def reason(self) -> str:
        """Reason why the module has to be built with real tensors."""
        without_rule = uninitialisable(self._module)
        if self._tape.reason is not None:
            return f"configure_model needs values: {self._tape.reason}"
        if self.error is not None:
            said = str(self.error).partition("\n")[0]
            return f"configure_model fails on the meta device ({type(self.error).__name__}: {said})"
        if without_rule:
            return (
                "these modules own parameters, buffers or other tensors but have no "
                f"reset_parameters(): {', '.join(without_rule)}"
            )
        return "modules of transformers are not initialised on the meta device"


def _lacks_initialisation(module: nn.Module) -> bool:
    """Whether a module is of transformers and on meta, where it leaves out its initialisation.

    What `adopt` has opened from a directory is not on meta.
    """
    if not any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__):
        return False
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def _contents(value: Any) -> tuple[Any, Any]:
    """A container and a copy of what is in it, or any other value and None."""
    return value, copy.copy(value) if isinstance(value, dict | list | set) else None


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(contents)
    else:
        container.update(contents)
