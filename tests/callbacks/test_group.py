"""A group does what its members would do by themselves."""

from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron.callback_group import HOOKS, CallbackGroup
from lightning_megatron.errors import ConfigError
from tests.strategy.small import Small, loader, make_trainer


class Notes(pl.Callback):
    def __init__(self, name: str = "") -> None:
        self.name, self.batches, self.seen = name, 0, []

    @property
    def state_key(self) -> str:
        return f"Notes {self.name}"

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1
        args[1].log(f"noted_{self.name}", float(self.batches))

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


def recording(name: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        if name not in self.seen:
            self.seen.append(name)

    return hook


All = type("All", (Notes,), {name: recording(name) for name in HOOKS})


def test_members_see_every_hook_that_lightning_calls() -> None:
    alone, member = All("alone"), All("member")
    trainer = make_trainer(None, callbacks=[alone, CallbackGroup([member])])
    module = Small()
    trainer.fit(module, loader())
    assert member.seen == alone.seen
    assert {"setup", "on_fit_start", "on_before_optimizer_step", "teardown"} <= set(member.seen)
    assert {"on_exception", "on_save_checkpoint", "on_predict_batch_end"} <= set(HOOKS)


def test_members_log_and_keep_their_state() -> None:
    group = CallbackGroup([Notes("a"), Notes("b"), pl.Callback()])
    trainer = make_trainer(None, callbacks=[group])
    trainer.fit(Small(), loader())
    assert {"noted_a", "noted_b"} <= trainer.callback_metrics.keys()
    resumed = CallbackGroup([Notes("b"), Notes("c")])
    resumed.load_state_dict(group.state_dict())
    assert [m.batches for m in resumed.members] == [4, 0]
    assert resumed.member(Notes) is resumed.members[0]
    assert resumed.member(All) is None


def test_members_must_differ() -> None:
    with pytest.raises(ConfigError, match="Notes a occurs 2 times"):
        CallbackGroup([Notes("a"), Notes("a")])
