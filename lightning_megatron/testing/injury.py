"""What faults do to a process, to its weights and to its helpers: the real thing, no imitation.

`ACTS` are what a process does to itself; they need nothing but the fault. The others are called by
whoever holds what they break.
"""

import ctypes
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_megatron.testing.faults import Fault, InjectedFaultError

_LONGEST_S = 2**31 - 1
"""What sleep(3) takes on every machine; 68 years."""


def _kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_LONGEST_S)  # until it arrives


def _segfault(fault: Fault) -> None:
    ctypes.string_at(0)


def _abort(fault: Fault) -> None:
    os.abort()


def _exit(fault: Fault) -> None:
    os._exit(int(fault.amount))


def _exception(fault: Fault) -> None:
    raise InjectedFaultError(f"injected by the fault '{fault}'")


def _hang(fault: Fault) -> None:
    time.sleep(min(fault.amount, _LONGEST_S))


def _hold_gil(fault: Fault) -> None:
    # A PyDLL does not release the lock around its calls, unlike any other library of ctypes.
    ctypes.PyDLL(None).sleep(math.ceil(min(fault.amount, _LONGEST_S)))


def _stop(fault: Fault) -> None:
    if math.isfinite(fault.amount):
        # By somebody else, as this process cannot wake itself; no child, which would want a wait().
        waking = f"(sleep {fault.amount:g}; kill -CONT {os.getpid()}) &"
        subprocess.run(["/bin/sh", "-c", waking], check=True, stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def _terminate(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _slow(fault: Fault) -> None:
    time.sleep(fault.amount / 1e3)


ACTS: dict[str, Callable[[Fault], None]] = {
    "kill": _kill,
    "segfault": _segfault,
    "abort": _abort,
    "exit": _exit,
    "exception": _exception,
    "hang": _hang,
    "gil": _hold_gil,
    "stop": _stop,
    "sigterm": _terminate,
    "slow": _slow,
}
"""What a process does to itself."""


def flip_bit(parameters: Iterable[Tensor], draw: int) -> str:
    """Flip one bit of one of this rank's weights, as a cosmic ray would.

    Args:
        parameters: those to choose from; only what this rank holds of them is touched.
        draw: chooses parameter, element and bit.

    Returns:
        What was flipped, in words.
    """
    held = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    held = [tensor.detach() for tensor in held if tensor.numel()]
    if not held:
        return "nothing: this rank holds no weights"
    draw, which = divmod(draw, len(held))
    tensor = held[which]
    # A mantissa's or the exponent's: not the lowest, which rounding hides.
    draw, element = divmod(draw, tensor.numel())
    bits = tensor.element_size() * 8
    bit = bits - 2 - draw % (bits // 2)
    # By way of a copy, as the tensor may not be contiguous.
    flat = tensor.flatten()[element : element + 1].clone()
    before = float(flat)
    octets = flat.view(torch.uint8)
    place = bit // 8 if sys.byteorder == "little" else tensor.element_size() - 1 - bit // 8
    octets[place] ^= 1 << (bit % 8)
    index = torch.unravel_index(torch.tensor(element), tensor.shape)
    tensor[index] = flat[0]
    return f"bit {bit} of element {element} of parameter {which}: {before:g} -> {float(flat):g}"


def kill_loader_worker(draw: int, sent: signal.Signals = signal.SIGKILL) -> str:
    """Send a signal to one of this process' DataLoader workers.

    Returns:
        What was done, in words.
    """
    workers = [p for p in multiprocessing.active_children() if p.daemon]
    if not workers:
        return "nothing: this rank has no DataLoader workers"
    worker = workers[draw % len(workers)]
    assert worker.pid is not None
    os.kill(worker.pid, sent)
    return f"{sent.name} to worker process {worker.pid}"
