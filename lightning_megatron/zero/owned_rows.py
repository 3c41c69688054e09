"""The rows of a whole parameter that the optimizer of this rank owns.

Below ZeRO 3 every rank holds every parameter of its stage whole, as a plain tensor. What ZeRO 1 and
2 divide is the work and the memory of the optimizer: of a parameter of ``r`` rows (its dimension 0)
rank ``i`` of ``n`` owns ``ceil(r / n)`` rows from row ``i ceil(r / n)``, the same that FSDP2's
``Shard(0)`` would give it. The optimizer is lent these rows in place of the parameter
(`optim.sharded_step`), so its state is that of the rows, and checkpoints store both as chunks.

The rows are a view of the parameter, and so always true, unless they must differ from it:

* *wider*: under ``bf16-mixed`` and its like the parameter is narrow, as the layers compute with it,
  and the rows are float32 (the "master weights"). A parameter of which this rank owns everything,
  because nothing is divided, then has a float32 twin;
* *elsewhere*: with ``zero.offload_optimizer`` the rows lie in host memory;
* *along dimension 1*: a stack of fewer experts than ranks is cut through its matrices, whose parts
  are contiguous in a copy only.

Such rows are a copy. Somebody may write to the parameter itself (an average of another network, a
clamp, ``load_state_dict``), by whatever way, of which only some move torch's version counters.
So before a step `OwnedRows.refresh` compares the parameter with what the rows would make of it, and
takes over the elements in which they differ.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron._torch.devices import on_host
from lightning_megatron.optim.shard_spec import rows_of
from lightning_megatron.whole.memory import memory_of_parts


@memory_of_parts
class OwnedRows:
    """Rows of a parameter that one rank's optimizer owns.

    Args:
        parameter: whole, with its values.
        ranks: that divide it; with 1 this rank owns it all.
        rank: this one among them.
        wide: number format of the rows, where it is not that of the parameter; the parameter's
            values at this moment are taken over before they are narrowed.
        narrow: format to which the parameter is narrowed then.
        summed_in: format in which gradients of a narrowed parameter are added up; ``wide`` if None.
        device: of the rows, where they are to be a copy: the parameter's, or another.
        dim: dimension whose indices are the rows: 0, or 1 where all ranks own equally many and
            ``device`` is given.

    Attributes:
        parameter: see above.
        ranks: see above.
        dim: see above.
        start: first row.
        length: number of rows; may be 0.
        gradient: mean gradient of the rows in the format in which it was summed, once it has been
            reduced to its owners; None where there is none, or ``parameter.grad`` is whole.
        shows_gradient: whether ``parameter.grad`` holds the whole mean after a backward, and not
            only after a look at it (`whole.divided_gradient`).
        bring_gradient: brings the gradients of all parameters that the same ranks divide into
            ``.grad``; collective.
        round_trip: what a copy of the rows looks like that was sent to other ranks, in the format
            of the parameter; None for a cast.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        ranks: int = 1,
        rank: int = 0,
        *,
        wide: torch.dtype | None = None,
        narrow: torch.dtype | None = None,
        summed_in: torch.dtype | None = None,
        device: torch.device | None = None,
        dim: int = 0,
    ) -> None:
        self.parameter = parameter
        self.ranks = ranks
        self.dim = dim
        self._rank = rank
        self.start, self.length = self._extent(rank)
        self.gradient: Tensor | None = None
        self.shows_gradient = True
        self.bring_gradient: Callable[[], None] | None = None
        self.round_trip: Callable[[Tensor], Tensor] | None = None
        self._wide: torch.dtype | None = None
        self._device: torch.device | None = None
        self._values: Tensor | None = None
        self._narrow: Tensor | None = None
        self._address = 0
        self._ahead = False
        self._kept_apart = wide, narrow, summed_in, device
        self._part()

    def _part(self) -> None:
        """Make the rows a copy, if they are to be one."""
        wide, narrow, summed_in, self._device = self._kept_apart
        self._wide = wide
        if wide is None or narrow is None:
            return
        self._values = self._copy()
        parameter = self.parameter
        parameter.grad = None
        parameter.data = parameter.detach().to(narrow)
        parameter.grad_dtype = summed_in or wide

    @property
    def is_whole(self) -> bool:
        """Whether this rank owns all rows."""
        return self.ranks == 1

    @property
    def is_wider(self) -> bool:
        """Whether the rows have another number format than the parameter."""
        return self._wide is not None

    @property
    def is_copy(self) -> bool:
        """Whether the rows are apart from the parameter."""
        return self._wide is not None or self._device is not None

    @property
    def values(self) -> Tensor:
        """The rows as they were refreshed last."""
        return self.refresh() if self._values is None else self._values

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the rows begin in the parameter, along each dimension."""
        return tuple(self.start if dim == self.dim else 0 for dim in range(self.parameter.ndim))

    def _extent(self, rank: int) -> tuple[int, int]:
        shape = self.parameter.shape
        return rows_of(shape[self.dim], self.ranks, rank) if shape else (0, 1)

    @cached_property
    def shape(self) -> torch.Size:
        """Shape of the rows."""
        return self.part_of(self.parameter.detach()).shape

    @cached_property
    def size(self) -> int:
        """Elements of what each rank owns in `parts_of`: those of rank 0, which has the most."""
        return self.numel_of(0)

    @cached_property
    def is_even(self) -> bool:
        """Whether `parts_of` a contiguous tensor is a view of it."""
        return self.dim == 0 and self.ranks * self.size == self.parameter.numel()

    def numel_of(self, rank: int) -> int:
        """Elements of the rows that a rank owns."""
        parameter = self.parameter
        length = self._extent(rank)[1]
        return parameter.numel() // parameter.shape[self.dim] * length

    def part_of(self, tensor: Tensor, rank: int | None = None) -> Tensor:
        """A view of the rows in a tensor of the parameter's shape; those of another rank if given.

        Args:
            tensor: see above.
            rank: this one if None.
        """
        if self.ranks == 1:
            return tensor
        return tensor.narrow(self.dim, *self._extent(self._rank if rank is None else rank))

    def parts_of(self, tensor: Tensor) -> Tensor:
        """Return what each rank owns of a tensor, ``[ranks, elements]``, padded with zeros."""
        if self.is_even:
            return tensor.reshape(self.ranks, self.size)
        flat = self._ranks_first(tensor).reshape(-1)
        missing = self.ranks * self.size - flat.numel()
        return (F.pad(flat, (0, missing)) if missing else flat).view(self.ranks, -1)

    def _ranks_first(self, tensor: Tensor) -> Tensor:
        if self.dim == 0:
            return tensor
        rows = tensor.shape[1] // self.ranks
        return tensor.view(-1, self.ranks, rows, *tensor.shape[2:]).movedim(1, 0)

    def write_parts(self, parts: Tensor, unpack: Callable[[Tensor], Tensor] | None = None) -> None:
        """Write parts as `parts_of` makes them into the parameter, which is what rows hold then.

        Args:
            parts: ``[ranks, elements]``.
            unpack: makes values of them, from any number of whole rows.
        """
        self._ahead = False
        self._write(self.parameter.detach(), parts, unpack)

    def _write(
        self, whole: Tensor, parts: Tensor, unpack: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        if unpack is None and self.is_even and whole.is_contiguous():
            whole.view(parts.shape).copy_(parts)
            return
        target = self._ranks_first(whole)
        values = parts.reshape(-1)[: target.numel()].view(target.shape)
        target.copy_(values if unpack is None else unpack(values))

    def refresh(self) -> Tensor:
        """The rows with all that was written to the parameter since.

        Rows that an optimizer has stepped on are newer than the parameter until it is told
        (`write_back`, `write_parts`); they are returned as they are.
        """
        if self._wide is None and self._device is None:  # it counts beside a fused step
            address = self.parameter.data_ptr()
            if address != self._address or self._values is None:
                self._values = self.part_of(self.parameter.detach())
                self._address = address
            return self._values
        if self._values is None:
            self._values = self._copy()
        elif not self._ahead:
            self._take_over()
        return self._values

    def _copy(self) -> Tensor:
        part = self.part_of(self.parameter.detach())
        return part.to(self._device or part.device, self._wide or part.dtype, copy=True)

    def _take_over(self) -> None:
        assert self._values is not None
        with torch.no_grad():
            seen = self.part_of(self.parameter.detach()).to(self._values.device)
            if seen.dtype == self._values.dtype:
                self._values.copy_(seen)
                return
            expected = self.expected()
            if on_host(seen.device) and torch.equal(seen, expected):
                return  # elsewhere a look at the answer would make the host wait
            torch.where(
                seen == expected, self._values, seen.to(self._values.dtype), out=self._values
            )

    def expected(self) -> Tensor:
        """Values that the parameter's rows have when these are written back."""
        if self.round_trip is not None:
            return self.round_trip(self.values)
        return self.values.to(self.parameter.dtype)

    def mean_gradient(self) -> Tensor | None:
        """The gradient of the rows, in the format in which it is held."""
        if self.gradient is not None:
            return self.gradient
        whole = self.parameter.grad
        return None if whole is None else self.part_of(whole)

    def show_gradient(self) -> None:
        """Make ``parameter.grad`` the whole mean, which ranks hold in rows; collective."""
        if self.bring_gradient is not None:
            self.bring_gradient()

    def take_whole_gradient(self, parts: Tensor) -> None:
        """Make ``parameter.grad`` of the gradient of all ranks' rows, and forget that of these.

        Args:
            parts: ``[ranks, elements]``, as `parts_of` makes them.
        """
        parameter = self.parameter
        whole = torch.empty_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
        self._write(whole.detach(), parts)
        known = parameter.grad
        parameter.grad = whole.detach() if known is None else known.add_(whole)
        self.gradient = None

    def lend_gradient(self) -> None:
        """Give the rows their gradient, in their format and place; a step on them follows."""
        gradient, values = self.gradient, self._values
        if gradient is None or values is None:
            gradient, values = self.mean_gradient(), self.values
        if self._wide is not None or self._device is not None:
            self._ahead = True
            gradient = None if gradient is None else gradient.to(values.device, values.dtype)
        elif gradient is not None and gradient.dtype is not values.dtype:
            gradient = gradient.to(values.dtype)
        values.grad = gradient

    def forget_gradient(self) -> None:
        """Forget the gradient, of the rows and of the parameter."""
        self.gradient = self.parameter.grad = None

    def write_back(self) -> None:
        """Write rows that are a copy into the parameter; other ranks' rows are not touched."""
        if self.is_copy and self._values is not None:
            with torch.no_grad():
                self.part_of(self.parameter.detach()).copy_(self.expected())
        self._ahead = False

    def widen(self) -> None:
        """Let the parameter have the format of the rows, and their values; others' rows are narrow.

        What is written to it until `narrow` reaches the rows.
        """
        if self._wide is None or self._narrow is not None:
            return
        values, parameter = self.refresh(), self.parameter
        self._narrow = parameter.detach()
        with torch.no_grad():
            whole = self._narrow.to(values.dtype)
            self.part_of(whole).copy_(values)
        self._replace(whole, values.dtype)

    def narrow(self) -> None:
        """Undo `widen`."""
        if self._narrow is None:
            return
        self.refresh()
        narrow, self._narrow = self._narrow, None
        with torch.no_grad():
            narrow.copy_(self.parameter.detach())
        self._replace(narrow, self._kept_apart[2] or self._wide)

    def _replace(self, data: Tensor, gradients: torch.dtype | None) -> None:
        """Put other memory in the place of the parameter's, with gradients in a format."""
        parameter = self.parameter
        gradient, parameter.grad = parameter.grad, None
        parameter.data = data
        parameter.grad_dtype = gradients
        parameter.grad = None if gradient is None else gradient.to(gradients)

    def part_again(self) -> None:
        """Undo `become_whole`."""
        if not self.is_copy:
            self._part()

    def become_whole(self) -> None:
        """Widen the parameter and make the rows a view of it; others' rows stay narrow values."""
        if not self.is_copy:
            return
        values, parameter = self.refresh(), self.parameter
        with torch.no_grad():
            whole = parameter.detach().to(values.dtype, copy=True)
            self.part_of(whole).copy_(values)
        self._replace(whole, whole.dtype)
        self._narrow = self._wide = self._device = self.round_trip = None
        self._values = None
        self._ahead = False
