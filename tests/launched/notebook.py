"""What a user does in a notebook, cell by cell, in one real Jupyter kernel."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

LIMIT_S = 300.0

PREPARE = """
import multiprocessing, os, pathlib, time
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_megatron import ConnectionConfig, FaultTolerance, MegatronStrategy, Preemption
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from torch.nn import functional as F

class Net(pl.LightningModule):
    def __init__(self, pause=0.0, fails=False):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = ColumnParallelLinear(4, 8), RowParallelLinear(8, 4)
        self.pause, self.fails = pause, fails

    def training_step(self, batch, batch_idx):
        if self.fails and self.trainer.global_rank == 1:
            raise ZeroDivisionError("of the second rank")
        if self.pause:
            time.sleep(self.pause)
            pathlib.Path(f"begun{self.trainer.global_rank}").touch()
        torch.ones(100_000).exp()  # by several threads
        loss = F.mse_loss(self.down(torch.tanh(self.up(batch))), batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(module, devices, *callbacks, dp=1, epochs=1, start="auto", **layout):
    strategy = MegatronStrategy(connection=ConnectionConfig(start=start), **layout)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, precision="64-true", logger=False,
        max_epochs=epochs, enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks), enable_checkpointing=bool(callbacks),
    )
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(32, 4, generator=generator, dtype=torch.float64)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8 // dp))
    return trainer

def off(module):
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)

def children():
    return pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

os.environ["OMP_NUM_THREADS"] = "2"
torch.set_num_threads(2)
torch.randn(2000, 2000).exp()  # has OpenMP start threads, which forks do not have
alone = Net()
print(fit(alone, 1).strategy.launcher, children())
"""

FORKED = """
module, best = Net(), ModelCheckpoint("best", "{step}", monitor="loss")
trainer = fit(module, 2, best, tp=2)
print(off(module) < 1e-12, trainer.global_step, trainer.current_epoch, trainer.state.status.value)
print(float(trainer.callback_metrics["loss"]) == float(best.best_model_score))
print(pathlib.Path(best.best_model_path).relative_to(os.getcwd()), children())
"""

AGAIN = """
module = Net()
trainer = fit(module, 2, FaultTolerance(), dp=2, zero=3)
print(off(module) < 1e-12, trainer.global_step)
trainer.fit_loop.max_epochs = 2
trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8, 4, dtype=torch.float64), 8))
print(trainer.global_step, trainer.current_epoch, off(module) > 1e-3, children())
"""

INTERRUPTED = """
fit(Net(pause=0.05), 2, Preemption(dirpath="kept"), dp=2, epochs=1000)
"""

CELLS = {
    "one device": PREPARE,
    "forked": FORKED,
    "again": AGAIN,
    "a rank fails": "fit(Net(fails=True), 2, dp=2)",
    "script": "fit(Net(), 2, start='script')",
    "interrupted": INTERRUPTED,
    "what is left": "print([p.name[:9] for p in pathlib.Path('kept').iterdir()], children())",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What a cell has shown."""

    text: str
    """Its standard output."""
    error: str
    """Name and text of the exception; empty if there was none."""
    traceback: str


def run(folder: Path) -> dict[str, Cell]:
    """Run all `CELLS`, and interrupt the kernel in one of them."""
    manager, client = start_new_kernel(startup_timeout=LIMIT_S, cwd=str(folder))
    try:
        found = {}
        for name, text in CELLS.items():
            begun = [folder / f"begun{rank}" for rank in range(2)]
            interrupt = manager.interrupt_kernel if name == "interrupted" else None
            found[name] = execute(client, text, interrupt, begun)
        return found
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def execute(
    client: BlockingKernelClient,
    text: str,
    interrupt: Callable[[], None] | None,
    begun: list[Path],
) -> Cell:
    """Run a cell to its end; ``interrupt`` is called once all files of ``begun`` are there."""
    request, deadline = client.execute(text), time.monotonic() + LIMIT_S
    out, error, traceback = "", "", ""
    while time.monotonic() < deadline:
        if interrupt is not None and all(file.exists() for file in begun):
            interrupt()
            interrupt = None
        try:
            message = client.get_iopub_msg(timeout=0.1)
        except Empty:
            continue
        kind, content = message["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != request:
            continue
        if kind == "stream" and content["name"] == "stdout":
            out += content["text"]
        elif kind == "error":
            error = f"{content['ename']}: {content['evalue']}"
            traceback = "\n".join(content["traceback"])
        elif kind == "status" and content["execution_state"] == "idle":
            return Cell(text=out, error=error, traceback=traceback)
    raise TimeoutError(f"{text}\n{out}")
