"""A strategy as a value: what it is made of, copied, and given to one Trainer after the other.

A strategy is its options. Everything else belongs to the Trainer that it was given to and to its
run: devices, precision, process groups, the module. So a copy, and what is pickled, is a strategy
of the same options that no Trainer has had; and one that is given to a further Trainer begins anew,
so that this Trainer's own ``accelerator``, ``devices``, ``precision`` and ``plugins`` count.
"""

from typing import Any

from lightning.pytorch.trainer.states import TrainerStatus
from typing_extensions import Self, override

from lightning_megatron._lightning.connectors import cluster_environment
from lightning_megatron._lightning.launch import LaunchingStrategy
from lightning_megatron._lightning.package_names import UNITING, other_package
from lightning_megatron.errors import ConfigError


class StrategyValue(LaunchingStrategy):
    """A strategy that remembers the arguments it was made of."""

    _given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make one, and remember of what."""
        made = super().__new__(cls)
        made._given = args, kwargs
        return made

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy, and what is pickled, anew."""
        return _make, (type(self), *self._given)

    @override
    def __str__(self) -> str:
        """Text that makes the same strategy."""
        args, kwargs = self._given
        options = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        return f"{type(self).__name__}({', '.join(options)})"

    @override
    def __repr__(self) -> str:
        """The same; where the package ``pytorch_lightning`` is in use, with what it needs.

        Lightning's refusal of a strategy shows this. A Trainer of the other package cannot be told
        more if that was imported after the strategy was made (`strategy.names`).
        """
        foreign = other_package("pytorch_lightning") is not None
        return f"{self}, for lightning.pytorch ({UNITING})" if foreign else str(self)

    def begin_anew(self) -> None:
        """Forget the Trainer that it was given to, as a further one takes it.

        Raises:
            ConfigError: that Trainer runs.
        """
        if self.accelerator is None:  # it had none
            return
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        runs = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        if trainer is not None and trainer.strategy is self and runs:
            raise ConfigError(
                f"Trainer(strategy={self}): this strategy is at work in a Trainer that has not "
                "ended; nearest valid: strategy=copy.deepcopy(strategy), which has the same options"
            )
        args, kwargs = self._given
        self.__init__(*args, **kwargs)  # type: ignore[misc]

    def check_trainer(self) -> None:
        """Refuse to run for a Trainer that this strategy has left.

        Raises:
            ConfigError: a further Trainer was given it.
        """
        assert self.lightning_module is not None
        if cluster_environment(self.lightning_module.trainer) is not self.cluster_environment:
            raise ConfigError(
                f"Trainer(strategy={self}): this strategy was given to another Trainer later, "
                "and has its devices; nearest valid: a strategy for each Trainer that is to go "
                "on, such as strategy=copy.deepcopy(strategy)"
            )


def _make(kind: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a strategy of its class and arguments."""
    return kind(*args, **kwargs)
