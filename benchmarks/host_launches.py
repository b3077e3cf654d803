"""Triton's host side with no GPU: all that it does up to the launch, and nothing after it.

What is replaced is the driver, the compiler and what a compiled kernel calls to be launched. Triton's own code makes
the binder, the key and the grid, looks the compiled kernel up, and compares the globals that the kernel reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class _Driver:
    """Stands for the driver of an H100 that nothing is launched on."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Compiled(CompiledKernel):
    """A compiled kernel that is loaded, but for what would be compiled and loaded."""

    def __init__(self, name: str, run: Callable[..., None]) -> None:
        self.name, self._run = name, run
        self.src = self.metadata = self.packed_metadata = self.function = None
        self.module = self

    def __del__(self) -> None:
        """Unloads nothing."""


class Launches:
    """The launches that did nothing; made by :func:`launches_stopped`."""

    def __init__(self) -> None:
        self.launched = 0
        self._functions: list[Any] = []

    def compile(self, function: Any, key: str, device: int) -> CompiledKernel:
        """Take the place of the compiler."""
        function.cache_key  # noqa: B018  finds the globals that every later launch compares
        if function not in self._functions:
            self._functions.append(function)
        kernel = function.device_caches[device][0][key] = _Compiled(function.__name__, self._launch)
        return kernel

    def _launch(self, *arguments: Any) -> None:
        self.launched += 1

    def count(self, name: str, call: Callable[[], Any]) -> int:
        """Launches of one call, each of which went through Triton's binder.

        Raises:
            RuntimeError: one did not, or there was none.
        """
        call()  # what is compiled at the first call is known after it
        bound, caches = 0, [function.device_caches for function in self._functions]
        kept = [cache[0] for cache in caches]

        def counting(binder: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal bound
                bound += 1
                return binder(*args, **kwargs)

            return run

        before = self.launched
        for cache, entry in zip(caches, kept, strict=True):
            cache[0] = (*entry[:-1], counting(entry[-1]))
        try:
            call()
        finally:
            for cache, entry in zip(caches, kept, strict=True):
                cache[0] = entry
        launched = self.launched - before
        if not 0 < bound == launched:
            raise RuntimeError(
                f"{name}: expected all launches to go through Triton's binder, got {bound} of {launched}"
            )
        return launched


@contextmanager
def launches_stopped() -> Iterator[Launches]:
    """Within the block, nothing is compiled or launched; the host does all else. What it yields counts the launches."""
    launches = Launches()
    active, compiler = driver._active, JITFunction._do_compile
    driver.set_active(_Driver())
    JITFunction._do_compile = lambda self, key, signature, device, *_: launches.compile(self, key, device)
    try:
        yield launches
    finally:
        JITFunction._do_compile = compiler
        driver._active = active
