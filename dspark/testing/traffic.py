"""Count what kernels ask of memory, while they run in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_ACCESSES = {
    "create_masked_load": (0, 1, True, False),
    "create_masked_store": (0, 2, False, True),
    "create_atomic_cas": (0, None, True, True),
    "create_atomic_rmw": (1, 3, True, True),
}
"""The interpreter's method -> which arguments are pointers and mask, whether it reads, whether it writes."""


@dataclass
class Traffic:
    """What was asked of memory.

    Attributes:
        read, written: bytes of the lanes that were not masked off, of loads and stores; an atomic operation is both.
            What a cache would serve counts too.
        kernels: the kernels launched, in order.
        arguments: bytes read and written by ``"kernel.argument"``, or ``"kernel.group.field"``.
        torch_ops: torch's own operations that were called meanwhile and would launch kernels too.
    """

    read: int = 0
    written: int = 0
    kernels: list[str] = field(default_factory=list)
    arguments: dict[str, list[int]] = field(default_factory=dict)
    torch_ops: list[str] = field(default_factory=list)

    @property
    def launches(self) -> int:
        """Kernels launched, torch's own included."""
        return len(self.kernels) + len(self.torch_ops)


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Count the loads, stores and launches of every kernel that is interpreted within the block.

    Raises:
        RuntimeError: kernels are not interpreted: TRITON_INTERPRET=1 is not set.

    Not reentrant, and not for several threads: Triton's interpreter is one object.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("traffic is counted in Triton's interpreter: set TRITON_INTERPRET=1 before kernels are read")
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    counter = _Counter()
    with ExitStack() as patches:
        for name, access in _ACCESSES.items():
            method = counter.access(getattr(InterpreterBuilder, name), *access)
            patches.enter_context(patch.object(InterpreterBuilder, name, method))
        patches.enter_context(patch.object(GridExecutor, "__call__", counter.launch(GridExecutor.__call__)))
        with counter:
            yield counter.traffic


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Wraps the interpreter's methods, and sees torch's operations outside of launches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = Traffic()
        self._kernel = ""
        self._ranges: list[tuple[int, int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not self._kernel and not func.is_view and name not in _ALLOCATIONS:
            self.traffic.torch_ops.append(name)
        return func(*args, **(kwargs or {}))

    def launch(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._kernel = executor.fn.__name__
            self.traffic.kernels.append(self._kernel)
            named = dict(zip(executor.arg_names, args, strict=False)) | kwargs
            self._ranges = [_range(*one) for name, value in named.items() for one in _tensors(name, value)]
            try:
                original(executor, *args, **kwargs)
            finally:
                self._kernel = ""

        return call

    def access(
        self, original: Callable[..., Any], pointers: int, mask: int | None, read: bool, written: bool
    ) -> Callable[..., Any]:
        def call(builder: Any, *args: Any, **options: Any) -> Any:
            self._count(args[pointers], None if mask is None else args[mask], read, written)
            return original(builder, *args, **options)

        return call

    def _count(self, pointers: Any, mask: Any, read: bool, written: bool) -> None:
        addresses = pointers.data
        if mask is not None:
            addresses = addresses[mask.data.astype(bool)]
        count = addresses.size * max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        if not count:
            return
        self.traffic.read += count * read
        self.traffic.written += count * written
        first = int(addresses.flat[0])
        owner = next((name for start, end, name in self._ranges if start <= first < end), "?")
        bytes_of = self.traffic.arguments.setdefault(f"{self._kernel}.{owner}", [0, 0])
        bytes_of[0] += count * read
        bytes_of[1] += count * written


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or those of a group, each with its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for key, inner in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from _tensors(f"{name}.{key}", inner)


def _range(name: str, tensor: Tensor) -> tuple[int, int, str]:
    """Addresses ``[start, end)`` of a tensor on the host."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = (last + 1) * tensor.itemsize if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + span, name
