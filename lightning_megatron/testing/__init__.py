"""A pool of warm worker processes that runs a function as if under `torchrun`.

Starting four Python processes that import torch, Lightning and FSDP2 takes 5 to 9 seconds; a test
of a collective takes 50 milliseconds. `WorkerPool` therefore forks its workers once, from a process
which has everything imported, and sends them work:

    def job(scale):                     # a module-level function: workers import it by name
        dist.init_process_group("gloo")
        ...
        return some_tensor

    with WorkerPool(4) as pool:
        results = pool.run(2, job, 3.0)  # [result of rank 0, result of rank 1]

Workers belong to a `WorkerServer`, which forks them and lends them for one run each. A pool begins
one of its own, unless it is told the address of a server that several processes share.

Every run gets fresh rendezvous variables (`RANK`, `WORLD_SIZE`, `MASTER_PORT`, ...) of the form
that `torchrun` sets, so `dist.init_process_group("gloo")` and a Lightning Trainer both find them.
After a run the worker destroys whatever process group is left, restores its environment and seeds
the random generators anew: runs do not see each other, yet they keep torch's warm caches.

When a rank fails, the first failure to arrive is raised as `WorkerError` with that rank's
traceback and output; peers blocked in a collective get a short grace time and are then replaced.
When a run takes too long, every stuck worker first writes its Python stacks, then is killed by its
process id and replaced. The pool stays usable after either. The time of a run counts from the
moment at which all its ranks have called the function: a worker may still be leaving the process
group of the run before, or have just been forked.

Fork is safe here because the server never starts a second OpenMP thread team or CUDA on behalf of
the workers, and each worker calls `torch.set_num_threads(1)` before anything else: a child forked
from a parent with a live OpenMP team hangs in its first parallel region otherwise. Process groups
that the server has (a Trainer leaves its own behind) are forgotten in the worker: their threads do
not survive a fork, so neither using nor destroying them would ever end.
"""

from lightning_megatron.testing.failures import Failure, WorkerError
from lightning_megatron.testing.pool import WorkerPool
from lightning_megatron.testing.server import WorkerServer

__all__ = ["Failure", "WorkerError", "WorkerPool", "WorkerServer"]
