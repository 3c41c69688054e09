import itertools
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from lightning_megatron import LanguageModel, ThroughputMonitor
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.flops import training_flops_per_token
from lightning_megatron.monitoring.flops import COUNTED, OWN, PALM, count_tokens
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import LAYOUTS, WIDTH, Small, dp_of, loader, make_trainer, run, samples

TOKENS = torch.zeros(2, 5, dtype=torch.int64)


class Recorder:
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log_dict(self, values: Mapping[str, float], prog_bar: bool = False, **kwargs: Any) -> None:
        assert prog_bar == (list(values) == ["perf/tokens_per_s"])
        if prog_bar:
            self.logged.append({})
        self.logged[-1].update(values)


def logged(
    times: list[tuple[float, float]],
    sampler: dict[str, int] | None = None,
    world_size: int = 8,
    **options: Any,
) -> list[dict[str, float]]:
    """Values after batches of 10 tokens in 2 samples that start and end at these times."""
    moments = itertools.chain([times[0][0]], *times)
    callback = ThroughputMonitor(every=1, **options)
    callback._clock = lambda: next(moments)
    trainer: Any = SimpleNamespace(
        world_size=world_size,
        strategy=Mock(
            spec=DDPStrategy if sampler else SingleDeviceStrategy,
            root_device=torch.device("cpu"),
            distributed_sampler_kwargs=sampler,
        ),
        precision_plugin=None,
    )
    module: Any = Recorder()
    callback.on_train_start(trainer, module)
    for i in range(len(times)):
        callback._counter = None
        callback.on_train_batch_start(trainer, module, TOKENS, i)
        callback.on_train_batch_end(trainer, module, None, TOKENS, i)
    return module.logged


def test_rates_count_data_parallel_ranks_only() -> None:
    first, second = logged([(0, 0), (0.5, 1), (2, 3)], {"num_replicas": 2, "rank": 0})
    assert first["perf/tokens_per_s"] == pytest.approx(20)
    assert second["perf/tokens_per_s"] == pytest.approx(40 / 3)
    assert second["perf/samples_per_s"] == pytest.approx(8 / 3)
    assert second["perf/tokens_per_s_per_device"] == pytest.approx(40 / 3 / 8)
    assert second["perf/step_time_s"] == pytest.approx(1.5)
    assert second["time/data_wait_s"] == pytest.approx(0.75)
    assert second["time/data_wait_fraction"] == pytest.approx(0.5)


def test_rates_without_a_sampler_hint_count_all_ranks() -> None:
    assert logged([(0, 0), (0, 1)])[0]["perf/tokens_per_s"] == pytest.approx(80)


def test_rates_are_over_the_window() -> None:
    times: list[tuple[float, float]] = [(0, 0), (0, 10), (10, 11), (11, 12)]
    found = logged(times, {"num_replicas": 1}, window=2)
    assert [v["perf/tokens_per_s"] for v in found] == pytest.approx([1, 20 / 11, 10])


def test_use_of_the_hardware_is_exact_where_flops_and_peak_are_given() -> None:
    (values,) = logged(
        [(0, 0), (0, 2)], {"num_replicas": 1}, 4, flops_per_token=3e12, peak_tflops=10
    )
    # 5 tokens a second on 4 devices.
    assert values["perf/tflops_per_device"] == pytest.approx(1.25 * 3)
    assert values["perf/mfu"] == pytest.approx(0.375)
    assert "perf/hfu" not in values


def test_validation_does_not_count() -> None:
    clock = itertools.count()
    callback = ThroughputMonitor(every=1)
    callback._clock = lambda: float(next(clock))
    trainer: Any = SimpleNamespace(
        world_size=1,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        precision_plugin=None,
    )
    module: Any = Recorder()
    callback.on_train_start(trainer, module)  # 0 s
    callback.on_train_batch_end(trainer, module, None, TOKENS, 0)  # 1 s
    callback.on_validation_start(trainer, module)  # 2 s
    callback.on_validation_end(trainer, module)  # 3 s
    callback.on_train_batch_end(trainer, module, None, TOKENS, 1)  # 4 s, of which 1 s validation
    assert [v["perf/tokens_per_s"] for v in module.logged] == pytest.approx([5])


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"tokens": torch.zeros(4, 8, dtype=torch.int64), "labels": torch.zeros(4, 8)}, 32),
        ((torch.zeros(4, 8), torch.zeros(4, 6, dtype=torch.int32)), 24),
        ([torch.zeros(3, 8), torch.tensor(1)], 3),
        ("text", 0),
    ],
)
def test_tokens_of_a_batch(batch: Any, tokens: int) -> None:
    assert count_tokens(batch) == tokens


def test_reaches_bar_and_logger(tmp_path: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=4,
        limit_val_batches=1,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[ThroughputMonitor()],
        logger=CSVLogger(tmp_path),
    )
    trainer.fit(BoringModel())
    assert trainer.progress_bar_metrics["perf/tokens_per_s"] > 0
    assert trainer.logged_metrics["time/data_wait_fraction"] > 0


class Slow(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


class Late(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.data = samples(96)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return self.data[index]


class Outside(pl.Callback):
    """A clock of its own."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.starts.append(time.monotonic())

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.monotonic())


def test_agrees_with_an_outside_clock() -> None:
    """One that is read before the monitor reads its own, and one after: it lies between them."""
    monitor, first, last = ThroughputMonitor(every=1), Outside(), Outside()
    trainer = make_trainer({}, callbacks=[first, monitor, last])
    trainer.fit(Slow(), loader(Late()))
    count = len(first.ends) - 1
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    least, most = first.ends[-1] - last.ends[0], last.ends[-1] - first.ends[0]
    slack = 1e-5  # logged in single precision
    assert least / count - slack < found["perf/step_time_s"] < most / count + slack
    for rate in ("perf/samples_per_s", "perf/tokens_per_s"):
        assert 8 * count / most * 0.9999 < found[rate] < 8 * count / least * 1.0001
    least = sum(start - end for start, end in zip(first.starts[1:], last.ends, strict=False))
    most = sum(start - end for start, end in zip(last.starts[1:], first.ends, strict=False))
    assert least / count - slack < found["time/data_wait_s"] < most / count + slack
    # 8 samples of at least 2 ms; what is not data is at least the 20 ms of the step.
    assert 0.016 < found["time/data_wait_s"] < found["perf/step_time_s"] - 0.02


def counted(
    layout: Mapping[str, Any] | None, devices: int, recompute: str = "none"
) -> tuple[float | None, float | None, str | None]:
    monitor = ThroughputMonitor(peak_tflops=1)
    memory = {} if layout is None else {"activations": ActivationConfig(recompute=recompute)}  # type: ignore[arg-type]
    trainer = make_trainer(
        None if layout is None else {**layout, **memory}, devices, callbacks=[monitor]
    )
    dp = 1 if layout is None else dp_of(devices, layout)
    trainer.fit(Small(), loader(samples(64), dp=dp))
    model = None if monitor._model is None else monitor._model.per_token
    return model, monitor._hardware, monitor.formula


# Per sample: four products forward, four gradients of weights, three of inputs.
PER_SAMPLE = (4 + 4 + 3) * 2 * WIDTH * WIDTH


@pytest.mark.parametrize("layout", [None, "pp=2", "dp=2, 2 microbatches"])
def test_counts_the_operations_of_any_network(pool: WorkerPool, layout: str | None) -> None:
    for found in run(pool, layout, counted):
        assert found == (PER_SAMPLE, PER_SAMPLE, COUNTED)


def test_what_is_computed_again_counts_for_the_hardware_only(pool: WorkerPool) -> None:
    devices, options = LAYOUTS["pp=2"]
    for found in pool.run(devices, counted, options, devices, "full"):
        assert found == (None, PER_SAMPLE + 4 * 2 * WIDTH * WIDTH, None)


def test_knows_the_formula_of_a_transformer_or_what_a_module_tells() -> None:
    from lightning_megatron.monitoring.flops import model_flops

    model = LanguageModel("tiny")
    batch = (torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int64))
    found = model_flops(model, batch, 32)
    assert found == (training_flops_per_token(model.config, 16), PALM)
    own: Any = SimpleNamespace(flops_per_batch=lambda: 640)
    assert model_flops(own, batch, 32) == (20.0, OWN)
    assert model_flops(SimpleNamespace(), batch, 32) is None


def test_options_are_checked_together() -> None:
    with pytest.raises(ConfigError, match=r"window=0[\s\S]*peak_tflops=-1"):
        ThroughputMonitor(window=0, peak_tflops=-1)
