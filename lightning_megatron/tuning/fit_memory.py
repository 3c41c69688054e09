"""``microbatch_size="auto"``: the largest microbatch for which every rank has memory.

A rank that is out of memory has lost its forward or backward. Its peers wait for its gradients in a
collective that it will not reach, and cannot be told amid the step. Here a batch *on trial* runs
without any communication: the reductions of gradients, which else overlap with the last backward,
wait until all microbatches have run, and before them all ranks vote once, on the host. If one rank
was out of memory, all of them throw their gradients away, return to the random numbers, running
statistics and logged sums that they had before the batch, halve the microbatch, and run the same
batch again. Since a batch's loss does not depend on how it is cut, the weights are those of a run
that had begun with the smaller size.

Batches are on trial until two in a row have passed, the second of them with the optimizer's state
in memory, and again as soon as any rank reads a microbatch with more elements than any that has
passed. Whether one does, ranks tell each other before the batch: one small exchange on the host.
What runs out of memory otherwise ends the run, as it does without this option: a batch that is no
larger than one that fitted, validation, or the optimizer's step.

On a GPU the first size is not the whole batch but what measurement suggests: forward and backward
of the first sample, and of the first two, tell what a sample takes, and the largest power of two
for which that leaves `_MARGIN` of the memory is tried first.
"""

import gc
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.devices import device_module, is_cuda
from lightning_megatron._torch.graphs import tree_flatten
from lightning_megatron.errors import ConfigError
from lightning_megatron.pipeline.microbatch import (
    MicrobatchRule,
    SplitBatch,
    batch_size_of,
    split,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_TRIALS = 2
"""Batches that have to pass: the optimizer makes its state after the first."""
_MARGIN = 0.1
"""Share of a device's memory that the first size leaves free."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, of a device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class Memory(Protocol):
    """Memory of a device."""

    @property
    def total(self) -> int:
        """Bytes that the device has."""
        ...

    def peak_of(self, call: Callable[[], None]) -> int:
        """Bytes that are held at most while something runs."""
        ...


class CudaMemory(Memory):
    """Memory of a GPU, as PyTorch's allocator counts it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    @override
    def total(self) -> int:
        return int(device_module(self._device).get_device_properties(self._device).total_memory)

    @override
    def peak_of(self, call: Callable[[], None]) -> int:
        forget_memory(self._device)
        device_module(self._device).reset_peak_memory_stats(self._device)
        call()
        device_module(self._device).synchronize(self._device)
        return int(device_module(self._device).max_memory_allocated(self._device))


class NoReduction:
    """Stands in for what reduces gradients while a batch is on trial: nothing is communicated."""

    def before_forward(self, stage: int) -> None:
        """No-op."""

    def before_backward(self, stage: int, *, last: bool, split: bool) -> None:
        """No-op."""

    def after_weights(self, stage: int, *, last: bool) -> None:
        """No-op."""


class Trial(Protocol[T_co]):
    """A batch that is on trial."""

    def attempt(self, args: Sequence[Any]) -> T_co:
        """Run forward and backward without communication.

        Args:
            args: of ``training_step``; the batch, or some of its samples, first.
        """
        ...

    def discard(self) -> None:
        """Drop the gradients of an attempt."""
        ...


class FittingMicrobatch:
    """Size of the microbatches of a run, found by trial.

    Args:
        device: of this rank.
        host_group: all processes, for tensors on the host; None for the default group.
        note: notes what a batch may change, and returns the function that puts it back.
        alone: whether there are no other ranks.
        say: tells the user what was found.

    Attributes:
        memory: of the device; None where nothing measures it.
        size: samples of a microbatch; None before the first batch.
        attempts: batches on trial so far, those that did not fit included.
    """

    def __init__(
        self,
        device: torch.device,
        host_group: dist.ProcessGroup | None,
        note: Callable[[], Callable[[], None]],
        *,
        alone: bool,
        say: Callable[[str], None],
    ) -> None:
        self.memory: Memory | None = CudaMemory(device) if is_cuda(device) else None
        self._device = device
        self._group = host_group
        self._alone = alone
        self._say = say
        self._passed = 0
        self._largest = self._mine = 0
        self._note = note
        self.size: int | None = None
        self.attempts = 0

    @property
    def rule(self) -> MicrobatchRule:
        """Rule by which batches are cut now."""
        return MicrobatchRule(size=self.size or 1)

    def begin(self, args: Sequence[Any], trial: Trial[Any], own: SplitBatch | None) -> bool:
        """Whether the batch is on trial; collective.

        Args:
            args: of ``training_step``, the batch first.
            trial: runs the first samples, where there is memory to measure.
            own: the module's own way to cut a batch.
        """
        batch = args[0]
        rows = batch_size_of(batch)
        if rows is None:
            MicrobatchRule(size=1).count(None)  # says what to do
        samples = rows or 1
        if self.size is None:
            most = self._most(samples)
            # The first guess must be one that all ranks share.
            fits = most
            if self.memory is not None:
                fits = -self._most(-self._suggested(args, samples, trial, own, self.memory))
            self.size = max(min(fits, most), 1)
        mine = math.ceil(elements_of(batch) / samples) * min(self.size, samples)
        new = mine > self._largest or self._passed < _TRIALS
        self._mine = mine
        return bool(self._most(int(new)))

    def run(self, args: Sequence[Any], trial: Trial[T]) -> T:
        """Run a batch, in smaller and smaller microbatches until all ranks have memory for it.

        Args:
            args: of ``training_step``, the batch first.
            trial: runs them.

        Returns:
            The result of the attempt that passed on every rank; collective.
        """
        put_back = self._note()
        while True:
            ran: T | None = None
            failed = False
            try:
                ran = trial.attempt(args)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failed = True
            if not self._most(int(failed)):  # the vote that ends a trial
                self._pass()
                return cast(T, ran)
            ran = None
            trial.discard()
            put_back()
            forget_memory(self._device)
            self._halve()

    def _suggested(
        self,
        args: Sequence[Any],
        samples: int,
        trial: Trial[Any],
        own: SplitBatch | None,
        memory: Memory,
    ) -> int:
        """Size of microbatches with which a GPU begins."""
        put_back = self._note()

        def run(count: int) -> None:
            [first, *_] = split(args[0], MicrobatchRule(size=count), own).batches
            self.size = count
            try:
                trial.attempt((first, *args[1:]))
            finally:
                trial.discard()
                put_back()

        return suggested_size(run, samples, memory)

    def _pass(self) -> None:
        """A batch on trial has run on every rank."""
        self.attempts += 1
        self._passed += 1
        self._largest = max(self._largest, self._mine)
        if self._passed == _TRIALS:
            self._say(f"microbatch_size='auto': {self.size} samples fit on every rank")

    def _halve(self) -> None:
        """Take half as many samples.

        Raises:
            ConfigError: there is one only.
        """
        assert self.size is not None
        self.attempts += 1
        if self.size == 1:
            raise ConfigError(
                "microbatch_size='auto': a rank has no memory for a single sample; nearest valid: "
                "activations=ActivationConfig(recompute='full'), zero=3 with a microbatch_size, or "
                "more ranks along tp or pp"
            )
        self.size = (self.size + 1) // 2
        self._passed = 0
        self._largest = 0
        self._say(f"microbatch_size='auto': out of memory, going on with {self.size} samples")

    def _most(self, number: int) -> int:
        if self._alone:
            return number
        value = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return int(value)


def elements_of(batch: Any) -> int:
    """Number of elements of all tensors of a batch."""
    leaves, _ = tree_flatten(batch)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def forget_memory(device: torch.device) -> None:
    """Give back what a failed step has held."""
    gc.collect()
    if is_cuda(device):
        device_module(device).empty_cache()


def suggested_size(run: Callable[[int], None], samples: int, memory: Memory) -> int:
    """Size that the memory of a device suggests, from microbatches of one and two samples.

    Args:
        run: forward and backward of so many samples, leaving nothing behind.
        samples: of the whole batch.
        memory: of the device that runs them.
    """
    peaks = []
    for count in (1, 1, 2):  # what is made once (handles, workspaces) is made in the first
        try:
            peaks.append(memory.peak_of(partial(run, min(count, samples))))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return 1
    for_one, for_sample = peaks[1], max(peaks[2] - peaks[1], 1)
    fits = 1 + int(max(memory.total * (1 - _MARGIN) - for_one, 0) // for_sample)
    return int(min(2 ** int(math.log2(fits)), samples))
