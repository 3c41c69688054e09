"""Everything that keeps a run alive, switched on by one callback: ``callbacks=[FaultTolerance()]``.

==================== ===================================================================== =======
member               what it answers                                                       default
==================== ===================================================================== =======
`Preemption`         SIGTERM, SIGUSR1 and Ctrl-C: save the same step on all ranks, end     on
`HangDetector`       a rank that stands still: name it, with stacks, and end the attempt   on
`SlowRankDetector`   a rank that is slower than its peers: name it and the section         on
`NumberGuard`        loss or gradients that are not finite: raise before the update        on
`WorkerGuard`        DataLoader workers that die or hang: replace them, same batches       on
`RestartPolicy`      three attempts without a new step: stay down, and say why             on
`ReplicaCheck`       copies of weights that differ in a bit: name the rank, raise or heal  off
==================== ===================================================================== =======

Each can be used by itself. Here each is an argument: True for its defaults, False for none of it,
or one that is set up otherwise, ``FaultTolerance(numbers=NumberGuard(nonfinite="skip"))``.

What it cannot do from inside the processes is to start them again: that is torchrun's part
(``--max-restarts``) or the cluster's; with ``fit(ckpt_path="auto")`` and a checkpoint every so
often a restarted run goes on from the newest one that is whole. What a lost machine costs is the
steps since then: few with ``CheckpointConfig(local=True)``, which machines keep for each other.

Machines that vanish: ``torchrun --nnodes 1:2 --max-restarts 3`` goes on with those that are left,
where the checkpoints are on a disk that they share. The machine that ``--rdzv-endpoint`` names is
the exception, as torchrun's own store is there, without which no agent can restart anything. A
store on a machine that takes no part in the training (a login node) outlives each of them::

    python -c "import time; from torch.distributed import TCPStore; store = TCPStore('0.0.0.0',
        29400, is_master=True, wait_for_workers=False); time.sleep(1e9)"       # on that machine
    torchrun --rdzv-backend c10d --rdzv-endpoint THAT_MACHINE:29400 --rdzv-id A_NEW_ONE ...

It listens on all interfaces and asks nobody who he is, as torchrun's own does. After a failure
torchrun waits half a minute for further machines; ``--rdzv-conf last_call_timeout=5`` waits less.
"""

import os
from typing import Any

import lightning.pytorch as pl

from lightning_megatron.callback_group import CallbackGroup
from lightning_megatron.callbacks.hang_detector import HangDetector
from lightning_megatron.callbacks.number_guard import NumberGuard
from lightning_megatron.callbacks.preemption import Preemption
from lightning_megatron.callbacks.replica_check import ReplicaCheck
from lightning_megatron.callbacks.restart_policy import RestartPolicy
from lightning_megatron.callbacks.slow_rank_detector import SlowRankDetector
from lightning_megatron.callbacks.worker_guard import WorkerGuard
from lightning_megatron.errors import raise_if_any


class FaultTolerance(CallbackGroup):
    """Detects faults, says what they are, and does what lets the run go on.

    Works under `MegatronStrategy`.

    Args:
        run_dir: where reports of hangs and the record of attempts go; None: the Trainer's
            ``default_root_dir``. All attempts of a run must have the same.
        preemption: answer to signals.
        hang: answer to ranks that stand still.
        slow_rank: answer to ranks that are slow.
        numbers: answer to bad numbers.
        workers: answer to DataLoader workers that fail.
        restarts: answer to attempts that all fail.
        replicas: check of the copies of weights and optimizer state, every 100 steps.

    Raises:
        ConfigError: an argument is neither a bool nor the callback it stands for.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        preemption: bool | Preemption = True,
        hang: bool | HangDetector = True,
        slow_rank: bool | SlowRankDetector = True,
        numbers: bool | NumberGuard = True,
        workers: bool | WorkerGuard = True,
        restarts: bool | RestartPolicy = True,
        replicas: bool | ReplicaCheck = False,
    ) -> None:
        chosen: dict[str, tuple[Any, type[pl.Callback], dict[str, Any]]] = {
            "preemption": (preemption, Preemption, {}),
            "hang": (hang, HangDetector, {"run_dir": run_dir}),
            "slow_rank": (slow_rank, SlowRankDetector, {}),
            "numbers": (numbers, NumberGuard, {}),
            "workers": (workers, WorkerGuard, {}),
            "restarts": (restarts, RestartPolicy, {"run_dir": run_dir}),
            "replicas": (replicas, ReplicaCheck, {}),
        }
        raise_if_any(
            [
                f"{name}={value!r}: must be True, False or a {kind.__name__}; nearest valid: True"
                for name, (value, kind, _) in chosen.items()
                if not isinstance(value, bool | kind)
            ]
        )
        super().__init__(
            [
                kind(**options) if value is True else value
                for value, kind, options in chosen.values()
                if value is not False
            ]
        )
