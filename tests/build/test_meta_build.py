"""What ``configure_model`` makes besides parameters, and how often and when it is called."""

import os
import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils import _device
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_megatron import ConfigError
from tests.strategy.small import Small, loader, make_trainer


class Late(Small):
    """Makes everything in ``configure_model``, metrics among it."""

    def configure_model(self):
        if hasattr(self, "mean"):
            return
        self.more = nn.Linear(4, 4)
        self.was_meta = self.more.weight.is_meta
        self.mean = MeanMetric()
        self.accuracy = MetricCollection([MulticlassAccuracy(num_classes=3)])

    def training_step(self, batch, batch_idx):
        self.mean(batch[0].new_tensor(2.0))
        self.accuracy(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 2, 0]))
        self.log_dict(self.accuracy)
        self.log("mean", self.mean)
        return self.loss(batch) + 0 * self.more.weight.sum()


class Weighted(Late):
    """Holds a tensor that is no buffer."""

    def configure_model(self):
        super().configure_model()
        self.factors = {"loss": torch.tensor(2.0)}

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factors["loss"]


def test_metrics_keep_the_state_that_they_begin_with(recwarn):
    module = Late()
    make_trainer({}).fit(module, loader())
    found = module.trainer.callback_metrics
    assert module.was_meta
    assert found["mean"] == 2
    assert found["MulticlassAccuracy"] == pytest.approx(2.5 / 3)
    assert not [w for w in recwarn if "real weights" in str(w.message)]


def _fit_late(layout):
    module = Late()
    make_trainer(layout, 2).fit(module, loader(dp=1))
    return float(module.trainer.callback_metrics["mean"])


def test_metrics_of_a_stage(pool):
    assert pool.run(2, _fit_late, {"tp": 2}) == [2, 2]
    assert pool.run(2, _fit_late, {"pp": 2}) == [2, 2]


def test_tensors_that_nothing_registers_are_made_for_real(recwarn):
    module = Weighted()
    make_trainer({}).fit(module, loader())
    assert not module.factors["loss"].is_meta
    said = [str(w.message) for w in recwarn if "real weights" in str(w.message)]
    assert len(said) == 1
    assert "reset_parameters(): Weighted" in said[0]


class NeedsSetup(Small):
    """Builds what only ``setup`` can tell, and says so."""

    def __init__(self):
        super().__init__()
        self.order = ["init"]

    def prepare_data(self):
        self.order.append("prepare_data")

    def setup(self, stage):
        self.order.append("setup")
        self.num_classes = 3
        self.draw = torch.randperm(16).tolist()

    def configure_model(self):
        self.order.append("configure_model")
        self.head = nn.Linear(4, self.num_classes)
        self.was_meta = self.head.weight.is_meta
        print("built")


class WritesOnRankZero(NeedsSetup):
    """Loads weights where they were downloaded, as ``DistributedDataParallel`` spreads them."""

    def configure_model(self):
        super().configure_model()
        if self.global_rank == 0:
            nn.init.constant_(self.head.weight, 0.5)


def test_a_hook_that_needs_setup_is_called_in_order_and_once(capsys, recwarn):
    for layout in (None, {}):
        module = NeedsSetup()
        make_trainer(layout).fit(module, loader())
        assert module.order == ["init", "prepare_data", "setup", "configure_model"]
        assert capsys.readouterr().out.count("built") == 1
    assert module.was_meta
    assert not [w for w in recwarn if "real weights" in str(w.message)]


def test_the_users_error_is_the_one_that_is_raised():
    class Broken(NeedsSetup):
        def configure_model(self):
            raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        make_trainer({}).fit(Broken(), loader())


def _before_training(kind, layout, devices):
    pl.seed_everything(5, verbose=False)
    module = kind()
    make_trainer(layout, devices, max_steps=0).fit(module, loader())
    return module.draw, module.was_meta, module.head.weight.tolist()


def test_ranks_draw_alike_before_training_and_begin_with_the_weights_of_rank_zero(pool):
    (plain, _, _), *_ = pool.run(1, _before_training, NeedsSetup, None, 1)
    found = pool.run(2, _before_training, WritesOnRankZero, {}, 2)
    assert [draw for draw, *_ in found] == [plain, plain]
    assert not any(was_meta for _, was_meta, _ in found)
    assert [weight for *_, weight in found] == 2 * [[[0.5] * 4] * 3]


class ForModelParallel(Small):
    """Spreads its layers itself, as ``ModelParallelStrategy`` has it."""

    axis = "tensor_parallel"

    def configure_model(self):
        mesh = self.device_mesh[self.axis]
        self.more = nn.Linear(4, 4)
        if self.axis == "dp_shard":
            fully_shard(self.more, mesh=mesh)
        else:
            parallelize_module(self.more, mesh, ColwiseParallel())


class WithOurAxis(ForModelParallel):
    axis = "tp"


class WithOurShards(ForModelParallel):
    axis = "dp_shard"


FOREIGN = {
    ForModelParallel: ({"tp": 2}, r"device_mesh\['tensor_parallel'\].*its axes are .*'tp'"),
    WithOurAxis: ({"tp": 2}, "more.weight, more.bias: spread .* by parallelize_module"),
    WithOurShards: ({"zero": 1}, "more.weight, more.bias: spread .* fully_shard"),
}


def _refusals():
    found = []
    for kind, (layout, _) in FOREIGN.items():
        with pytest.raises(ConfigError) as raised:
            make_trainer(layout, 2).fit(kind(), loader())
        found.append(str(raised.value))
    return found


def test_modules_that_spread_themselves_are_refused_with_the_remedy(pool):
    found = pool.run(2, _refusals)
    assert found[0] == found[1]
    for text, (_, pattern) in zip(found[0], FOREIGN.values(), strict=True):
        assert re.search(pattern + ".*nearest valid: .*zero=3", text)


class WritesByRank(Small):
    """Writes to its weights what another process writes otherwise."""

    def configure_model(self):
        if not hasattr(self, "more"):
            self.more = nn.Linear(4, 4)
            self.was_meta = self.more.weight.is_meta
            nn.init.constant_(self.more.weight, float(os.environ["RANK"]))


def _reason_of_real_weights():
    module = WritesByRank()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make_trainer({}, 2).fit(module, loader(dp=2))
    assert not module.was_meta
    return [str(w.message) for w in said if "real weights" in str(w.message)]


def test_writes_that_differ_between_ranks_are_named_as_the_reason_of_real_weights(pool):
    reasons, others = pool.run(2, _reason_of_real_weights)
    assert len(reasons) == 1
    assert "writes other values there" in reasons[0]
    assert not others


class Spaced(Small):
    """Makes a tensor by a function that transformers replaces while it loads a model."""

    def configure_model(self):
        if not hasattr(self, "steps"):
            steps = torch.linspace(0, 1, 4)
            self.was_meta = steps.is_meta
            self.steps = nn.Linear(4, 4)
            with torch.no_grad():
                self.steps.bias.copy_(steps)


def test_what_torch_has_forgotten_to_make_on_meta_is_made_there(monkeypatch):
    kept = frozenset(_device._device_constructors()) - {torch.linspace}
    monkeypatch.setattr(_device, "_device_constructors", lambda: kept)
    with torch.device("meta"):
        assert not torch.linspace(0, 1, 4).is_meta
    module = Spaced()
    make_trainer({}, max_epochs=0).fit(module, loader())
    assert module.was_meta
    torch.testing.assert_close(module.steps.bias.detach(), torch.linspace(0, 1, 4).double())
