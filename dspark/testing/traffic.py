"""Count what kernels ask of memory, while they run in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


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
    wrapped = {
        (InterpreterBuilder, "create_masked_load"): counter.load,
        (InterpreterBuilder, "create_masked_store"): counter.store,
        (InterpreterBuilder, "create_atomic_cas"): counter.compare_and_swap,
        (InterpreterBuilder, "create_atomic_rmw"): counter.read_modify_write,
        (GridExecutor, "__call__"): counter.launch,
    }
    originals = {key: getattr(*key) for key in wrapped}
    try:
        for (owner, name), wrapper in wrapped.items():
            setattr(owner, name, wrapper(originals[owner, name]))
        with counter:
            yield counter.traffic
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Wraps the interpreter's methods, and sees torch's operations outside of launches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = Traffic()
        self._kernel = ""
        self._ranges: list[tuple[int, int, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
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

    def load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(builder: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
            self._count(pointers, mask, read=True)
            return original(builder, pointers, mask, *rest, **options)

        return call

    def store(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
            self._count(pointers, mask, written=True)
            return original(builder, pointers, value, mask, *rest, **options)

        return call

    def compare_and_swap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(builder: Any, pointers: Any, *rest: Any, **options: Any) -> Any:
            self._count(pointers, None, read=True, written=True)
            return original(builder, pointers, *rest, **options)

        return call

    def read_modify_write(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
            self._count(pointers, mask, read=True, written=True)
            return original(builder, operation, pointers, value, mask, *rest, **options)

        return call

    def _count(self, pointers: Any, mask: Any, read: bool = False, written: bool = False) -> None:
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
