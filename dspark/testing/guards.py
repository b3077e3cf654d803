"""Guards that make silent faults of an op visible: memory never written, memory not its own, reads by the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_CANARY = 0xA5
_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within the block, uninitialised tensors hold NaN, or the smallest integer (True, the largest unsigned one).

    An element that an op forgets to write then shows, whatever the allocator would have given it. All ways to ask for
    uninitialised memory are covered: ``torch.empty``, ``Tensor.new_empty`` and their like.

    >>> with poisoned_empty():
    ...     torch.empty(2).tolist(), torch.zeros(1, dtype=torch.int32).new_empty(1).tolist()
    ([nan, nan], [-2147483648])
    """
    with _PoisonedEmpty():  # type: ignore[no-untyped-call]
        yield


def poison_of(dtype: torch.dtype) -> float | int | bool:
    """What :func:`poisoned_empty` fills a tensor of this dtype with."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


class _PoisonedEmpty(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in _EMPTY:
            result.fill_(poison_of(result.dtype))
        return result


@dataclass(frozen=True)
class Guarded:
    """A tensor inside a buffer whose other bytes are known, from :func:`guarded`."""

    tensor: Tensor
    _buffer: Tensor

    def check(self) -> None:
        """Hold the buffer's other bytes to what they were.

        Raises:
            AssertionError: some were written; the message says how many, and where the first lies.

        Reads the device.
        """
        itemsize = self.tensor.itemsize
        elements = self._buffer.view(-1, itemsize)  # [elements, bytes]
        inside = torch.zeros(elements.shape[0], dtype=torch.bool, device=self._buffer.device)
        inside.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).fill_(True)
        written = ((elements != _CANARY).any(-1) & ~inside).nonzero().flatten()
        if written.numel():
            offset = int(written[0]) - self.tensor.storage_offset()
            raise AssertionError(
                f"{written.numel()} elements outside of the tensor were written, the first at offset {offset} "
                f"(shape {list(self.tensor.shape)}, strides {list(self.tensor.stride())})"
            )


def guarded(values: Tensor, *, margin: int = 256, row_gap: int = 0) -> Guarded:
    """Copy a tensor into the middle of a buffer of canaries.

    Args:
        values: of any shape, at least one dimension, and any dtype.
        margin: elements before and after it.
        row_gap: elements between its rows (slices along the last axis), so that its rows are strided.

    Raises:
        ValueError: ``values`` is a scalar.

    >>> band = guarded(torch.zeros(2, 3), row_gap=1)
    >>> band.tensor.fill_(1.0).stride()
    (4, 1)
    >>> band.check()
    >>> band.tensor.as_strided((4,), (1,), 256).fill_(2.0).shape  # the gap after the first row, too
    torch.Size([4])
    >>> band.check()
    Traceback (most recent call last):
    AssertionError: 1 elements outside of the tensor were written, the first at offset 3 (shape [2, 3], strides [4, 1])
    """
    if values.ndim == 0:
        raise ValueError("values: expected at least one dimension, got a scalar")
    strides = values.new_empty(*values.shape[:-1], values.shape[-1] + row_gap, device="meta").stride()
    span = values.shape[0] * strides[0] + row_gap
    buffer = torch.full(((2 * margin + span) * values.itemsize,), _CANARY, dtype=torch.uint8, device=values.device)
    tensor = buffer.view(values.dtype).as_strided(values.shape, strides, margin)
    return Guarded(tensor.copy_(values), buffer)


class SyncError(RuntimeError):
    """An op read the device from the host, or asked for a shape that depends on data."""


_SYNCS = {
    "_local_scalar_dense", "_unique", "_unique2", "allclose", "argwhere", "bincount", "equal", "is_nonzero", "item",
    "lift_fresh", "masked_select", "nonzero", "nonzero_numpy", "unique_consecutive", "unique_dim",
    "unique_dim_consecutive",
}  # fmt: skip
_HOST_READS: set[Callable[..., Any]] = {Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.__array__}


@contextmanager
def forbid_sync() -> Iterator[None]:
    """Within the block, whatever would keep a CUDA graph from capturing it raises, on any device (contract C7).

    That is: reading the device from the host (``item``, ``tolist``, ``bool(tensor)``, ``equal``, copies between
    devices), making a tensor of host data (``torch.tensor``), and shapes that depend on data (``nonzero``, boolean
    indices, ``unique``, ``bincount``, ``repeat_interleave`` by a tensor without ``output_size``).

    Raises:
        SyncError: within the block, naming the operation.

    >>> with forbid_sync():
    ...     torch.arange(3)[torch.arange(3) > 1]
    Traceback (most recent call last):
    dspark.testing.guards.SyncError: index: a boolean index gives a shape that depends on data
    """
    with _ForbidHostReads(), _ForbidSync():  # type: ignore[no-untyped-call]
        yield


class _ForbidHostReads(TorchFunctionMode):
    """Methods that on a CPU read memory without any dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            raise SyncError(f"{func.__name__}: reads the device from the host")
        return func(*args, **(kwargs or {}))


class _ForbidSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in _SYNCS:
            raise SyncError(f"{name}: reads the device from the host, makes a tensor of host data, or has a shape that "
                            "depends on data")  # fmt: skip
        if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
                raise SyncError(f"{name}: a boolean index gives a shape that depends on data")
        elif name == "repeat_interleave":
            sized = kwargs.get("output_size") is not None
            if not sized and any(isinstance(repeats, Tensor) for repeats in args[1:] or args):
                raise SyncError("repeat_interleave: without output_size its shape depends on data")
        elif name in ("_to_copy", "copy_", "copy"):
            given = args[0] if name == "_to_copy" else args[1]
            target = kwargs.get("device") or args[0].device
            if given.device.type != torch.device(target).type:
                raise SyncError(f"{name}: copies from {given.device} to {target}")
        return func(*args, **kwargs)
