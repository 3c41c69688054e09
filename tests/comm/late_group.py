"""A process group over gloo with NCCL's rules, whose work is late: what a CPU can hold of NCCL.

`late_groups` makes the backend ``late`` known; a job that runs within it, with
``ConnectionConfig(backend="late")``, communicates over it as over NCCL:

* **Late.** What a collective or a receive writes is there once its `Work` has been waited for.
  Until then the destination is NaN (or the largest whole number): who reads too early computes with
  that.
* **Inputs stay.** Until the wait, nobody may write what is being sent or what is to be received.
* **One order.** Members of a group do the same collectives in the same order, with the same shapes,
  types and operators. With gloo, two that differ are other numbers; with NCCL, a hang.
* **One direction at a time.** Messages between two ranks outside of `batch_isend_irecv` match by
  their order, not by tags: two ranks that both send first wait for each other.
* **Types and shapes.** Tensors are contiguous and of a type that NCCL has, parts of equal sizes.
* **Waits.** Work that is dropped before it has been waited for is an error, but for what was sent.

What breaks a rule raises `RuleError`, on each rank that sees it; a rank's `problems` has them too,
as an error within another's code may be swallowed.
"""

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

TYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    }
)
"""Types that ``ncclDataType_t`` has, in torch 2.11-2.13."""

problems: list[str] = []
"""What broke a rule in this process, within the latest `late_groups`."""

_leaving: list[tuple[list[Any], list[Tensor]]] = []
"""Messages that gloo may still be sending, and what they send."""

_batch: list[bool] = [False]
"""Whether `batch_isend_irecv` is called."""


class RuleError(RuntimeError):
    """NCCL would refuse this, hang, or give other numbers."""


def _broken(text: str) -> RuleError:
    problems.append(text)
    return RuleError(text)


def _unfinished(tensor: Tensor) -> None:
    """Fill a destination with what nobody takes for a result."""
    detached = tensor.detach()
    if tensor.is_floating_point():
        kind = detached if tensor.element_size() > 1 else detached.view(torch.uint8)
        kind.fill_(float("nan") if tensor.element_size() > 1 else 0x7F)
    elif tensor.dtype is torch.bool:
        detached.view(torch.uint8).fill_(1)
    else:
        detached.fill_(torch.iinfo(tensor.dtype).max)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class LateWork(dist.Work):
    """A collective, or message, that is under way."""

    def __init__(
        self,
        name: str,
        inner: Callable[[], None],
        inputs: list[Tensor],
        outputs: list[tuple[Tensor, Tensor]],
        must_wait: bool = True,
    ) -> None:
        """Begin.

        Args:
            name: of the operation and its group.
            inner: waits until gloo is done.
            inputs: what is read.
            outputs: destinations, and where gloo writes instead.
            must_wait: whether somebody has to wait for it.
        """
        super().__init__()
        # A part of the destination may be what is sent.
        destinations = {tensor.untyped_storage().data_ptr() for tensor, _ in outputs}
        self._name, self._inner, self._outputs = name, inner, outputs
        kept = [x for x in inputs if x.untyped_storage().data_ptr() not in destinations]
        self._inputs = [(tensor, _bits(tensor).clone()) for tensor in kept]
        for tensor, _ in outputs:
            _unfinished(tensor)
        self._filled = [(tensor, _bits(tensor).clone()) for tensor, _ in outputs]
        self._done = False
        if must_wait:
            self._watch = weakref.finalize(self, _dropped, name)
            self._watch.atexit = False

    def wait(self, timeout: Any = None) -> bool:
        """Put results where they belong."""
        if self._done:
            return True
        self._done = True
        if hasattr(self, "_watch"):
            self._watch.detach()
        self._inner()
        for tensor, before in self._inputs:
            if not torch.equal(_bits(tensor), before):
                raise _broken(f"{self._name}: an input was written before it was waited for")
        for tensor, before in self._filled:
            if not torch.equal(_bits(tensor), before):
                raise _broken(f"{self._name}: a destination was written before it was waited for")
        for tensor, found in self._outputs:
            tensor.detach().copy_(found)
        return True

    def is_completed(self) -> bool:
        """Whether it has been waited for: a device tells when it has done so, not before."""
        return self._done

    def get_future(self) -> Any:
        """A future that is there once it has been waited for."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result([tensor for tensor, _ in self._outputs])
        return future


def _dropped(name: str) -> None:
    problems.append(f"{name}: nobody waited for it")


class LateGroup(dist.ProcessGroup):
    """The group; see the module's docstring."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[attr-defined]
        self._rounds: Counter[tuple[int, bool, bool]] = Counter()
        self._arriving: dict[int, deque[Callable[[], None]]] = defaultdict(deque)
        self._name = ""

    # What torch asks of a group -------------------------------------------------------------------

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def getBackendName(self) -> str:
        """Name of the backend."""
        return "late"

    @property
    def pg_name(self) -> str:
        """Name under which torch knows the group."""
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)  # type: ignore[call-overload]
        return self._name

    @property
    def group_name(self) -> str:
        """Name under which torch knows the group."""
        return self.pg_name

    # Rules ----------------------------------------------------------------------------------------

    def _check(self, name: str, tensors: list[Tensor], *same: Any) -> str:
        """Hold an operation's tensors against the rules, and against those of the other members."""
        label = f"{name} of {self.pg_name}"
        for tensor in tensors:
            if tensor.dtype not in TYPES:
                raise _broken(f"{label}: NCCL has no {tensor.dtype}")
            if not tensor.is_contiguous():
                raise _broken(f"{label}: a tensor of {tuple(tensor.shape)} is not contiguous")
        text = repr((name, *same))
        mine = torch.tensor([crc32(text.encode())], dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(self._size)]
        self._gloo.allgather([everyone], [mine]).wait()
        if any(int(other) != int(mine) for other in everyone):
            raise _broken(f"{label}: members do different operations at a time; here {text}")
        return label

    def _equal(self, name: str, tensors: list[Tensor]) -> None:
        if len({tensor.numel() for tensor in tensors}) > 1:
            sizes = [tensor.numel() for tensor in tensors]
            raise _broken(f"{name} of {self.pg_name}: parts of {sizes} numbers, not of equal sizes")

    # Collectives ----------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Sum over the ranks, in place."""
        opts = opts or dist.AllreduceOptions()  # type: ignore[attr-defined]
        [tensor] = tensors
        label = self._check("allreduce", tensors, *_kind(tensor), str(opts.reduceOp.op))
        found = tensor.detach().clone()
        work = self._gloo.allreduce([found], opts)
        return LateWork(label, work.wait, [], [(tensor, found)])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Sum several tensors over the ranks."""
        return _together([self.allreduce([tensor], opts) for tensor in tensors])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Send from one rank."""
        [tensor] = tensors
        label = self._check("broadcast", tensors, *_kind(tensor), opts.rootRank)
        found = tensor.detach().clone()
        work = self._gloo.broadcast([found], opts)
        if opts.rootRank == self._rank:
            return LateWork(label, work.wait, [tensor], [])
        return LateWork(label, work.wait, [], [(tensor, found)])

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Sum on one rank; what the others have afterwards is undefined."""
        [tensor] = tensors
        label = self._check("reduce", tensors, *_kind(tensor), opts.rootRank, str(opts.reduceOp.op))
        found = tensor.detach().clone()
        work = self._gloo.reduce([found], opts)
        if opts.rootRank != self._rank:
            return LateWork(label, work.wait, [tensor], [])
        return LateWork(label, work.wait, [], [(tensor, found)])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather a tensor of each rank."""
        [tensor], [parts] = inputs, outputs
        self._equal("allgather", [tensor, *parts])
        label = self._check("allgather", [tensor, *parts], *_kind(tensor))
        found = [torch.empty_like(part) for part in parts]
        work = self._gloo.allgather([found], [tensor.detach().clone()])
        return LateWork(label, work.wait, [tensor], list(zip(parts, found, strict=True)))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Gather into one tensor."""
        if output.numel() != tensor.numel() * self._size:
            raise _broken(f"all_gather of {self.pg_name}: {output.numel()} and {tensor.numel()}")
        label = self._check("all_gather_single", [tensor, output], *_kind(tensor))
        found = torch.empty_like(output)
        parts = list(found.view(-1).chunk(self._size)) if found.numel() else []
        work = self._gloo.allgather([parts], [tensor.detach().clone().view(-1)]) if parts else None
        return LateWork(label, work.wait if work else _nothing, [tensor], [(output, found)])

    _allgather_base = all_gather_single  # 2.11, 2.12

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> Any:
        """Gather several."""
        pairs = zip(outputs, tensors, strict=True)
        return _together([self.all_gather_single(output, tensor) for output, tensor in pairs])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Any:
        """Sum, and keep a part."""
        [output], [parts] = outputs, inputs
        self._equal("reduce_scatter", [output, *parts])
        return self._reduced("reduce_scatter", output, list(parts), opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Sum one tensor, and keep a part."""
        if tensor.numel() != output.numel() * self._size:
            raise _broken(f"reduce_scatter of {self.pg_name}: {output.numel()}, {tensor.numel()}")
        return self._reduced("reduce_scatter_single", output, [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single  # 2.11, 2.12

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> Any:
        """Sum several."""
        pairs = zip(outputs, tensors, strict=True)
        return _together([self.reduce_scatter_single(o, tensor, opts) for o, tensor in pairs])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduced(self, name: str, output: Tensor, inputs: list[Tensor], opts: Any) -> Any:
        opts = opts or dist.ReduceScatterOptions()  # type: ignore[attr-defined]
        label = self._check(name, [output, *inputs], *_kind(output), str(opts.reduceOp.op))
        whole = torch.cat([part.detach().reshape(-1) for part in inputs])
        total = dist.AllreduceOptions()  # type: ignore[attr-defined]
        total.reduceOp = opts.reduceOp
        work = self._gloo.allreduce([whole], total)
        mine = whole.view(self._size, -1)[self._rank] if whole.numel() else whole
        return LateWork(label, work.wait, inputs, [(output, mine.view(output.shape))])

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: list[int] | None,
        input_sizes: list[int] | None,
        opts: Any = None,
    ) -> Any:
        """Send a part to each rank; parts may differ in size."""
        label = self._check("all_to_all_single", [output, tensor], str(tensor.dtype))
        found = torch.empty_like(output)
        sizes = (list(output_sizes or []), list(input_sizes or []))
        call = getattr(self._gloo, "all_to_all_single", None) or self._gloo.alltoall_base
        work = call(found, tensor.detach().clone(), *sizes)
        return LateWork(label, work.wait, [tensor], [(output, found)])

    alltoall_base = all_to_all_single  # 2.11, 2.12

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Send a tensor to each rank."""
        label = self._check("alltoall", [*outputs, *inputs], str(inputs[0].dtype))
        sizes = [[x.numel() for x in tensors] for tensors in (outputs, inputs)]
        whole = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        found = whole.new_empty(sum(sizes[0]))
        call = getattr(self._gloo, "all_to_all_single", None) or self._gloo.alltoall_base
        work = call(found, whole, *sizes)
        parts = [p.view(o.shape) for p, o in zip(found.split(sizes[0]), outputs, strict=True)]
        return LateWork(label, work.wait, inputs, list(zip(outputs, parts, strict=True)))

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return LateWork(self._check("barrier", []), _nothing, [], [])

    # Messages -------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        """Send to a rank."""
        [tensor] = tensors
        label = self._message(f"send to {to}", tensor)
        header = self._header(tensor, to, sends=True)
        held = [header, tensor.detach().clone().reshape(-1).view(torch.uint8)]
        # The host does not wait for what leaves a device, whose memory the stream keeps.
        _leaving[:] = [(works, kept) for works, kept in _leaving if not _over(works)]
        _leaving.append(([self._gloo.send([x], to, 0) for x in held if x.numel()], held))
        return LateWork(label, _nothing, [tensor], [], must_wait=False)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        """Receive from a rank."""
        [tensor] = tensors
        label = self._message(f"receive from {source}", tensor)
        expected = self._header(tensor, source, sends=False)
        header, found = torch.empty_like(expected), torch.empty_like(tensor).reshape(-1)

        def arrive() -> None:
            self._gloo.recv([header], source, 0).wait()
            if not torch.equal(header, expected):
                raise _broken(
                    f"{label}: {_said(expected)} was expected and {_said(header)} sent: NCCL "
                    "matches messages by their order, and by nothing else"
                )
            if found.numel():  # gloo ends a process that gets more than it has room for
                self._gloo.recv([found.view(torch.uint8)], source, 0).wait()

        def finish() -> None:
            while arrive in before:  # what nobody waits for arrives, too
                before.popleft()()

        before = self._arriving[source]
        before.append(arrive)
        return LateWork(label, finish, [], [(tensor, found.view(tensor.shape))])

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Refuse: NCCL receives from somebody."""
        raise _broken(f"receive of {self.pg_name}: NCCL does not receive from any rank")

    def _message(self, name: str, tensor: Tensor) -> str:
        label = f"{name} of {self.pg_name}"
        if tensor.dtype not in TYPES:
            raise _broken(f"{label}: NCCL has no {tensor.dtype}")
        if not tensor.is_contiguous():
            raise _broken(f"{label}: a tensor of {tuple(tensor.shape)} is not contiguous")
        return label

    def _header(self, tensor: Tensor, other: int, *, sends: bool) -> Tensor:
        """Round of the message between the two ranks, its numbers and bytes.

        A batch is one operation for both directions; outside of it each message is one.
        """
        key = (other, True, sends) if _batch[0] else (other, False, False)
        self._rounds[key] += 1
        kind = crc32(str(tensor.dtype).encode())
        return torch.tensor([int(_batch[0]), self._rounds[key], tensor.numel(), kind])


def _kind(tensor: Tensor) -> tuple[int, str]:
    return tensor.numel(), str(tensor.dtype)


def _said(header: Tensor) -> str:
    batched, number, size, _ = header.tolist()
    return f"message {number} of {size} numbers {'in a batch' if batched else 'by itself'}"


def _nothing() -> None:
    pass


def _over(works: list[Any]) -> bool:
    return all(work.is_completed() for work in works)


class _Together(dist.Work):
    def __init__(self, works: list[LateWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        return [work.wait() for work in self._works][-1]


def _together(works: list[LateWork]) -> Any:
    return _Together(works)


def _make(store: Any, rank: int, size: int, timeout: Any) -> LateGroup:
    return LateGroup(store, rank, size, timeout)


@contextmanager
def late_groups() -> Iterator[list[str]]:
    """Context in which there is a backend ``late``; what broke a rule, at the end an error."""
    problems.clear()
    _leaving.clear()
    if "late" not in dist.Backend.backend_list:
        dist.Backend.register_backend("late", _make, devices=["cpu"])
    together = dist.batch_isend_irecv

    def batched(operations: list[Any]) -> Any:
        _batch[0] = True
        try:
            return together(operations)
        finally:
            _batch[0] = False

    with mock.patch.object(dist, "batch_isend_irecv", batched):
        yield problems
    if not problems:  # who waits for nothing may not have received either
        for works, _ in _leaving:
            for work in works:
                work.wait()
    _leaving.clear()
    if problems:
        raise RuleError("\n".join(problems))
