"""Triton's host side with no GPU: all that ``JITFunction.run`` does up to the launch, and nothing after it.

What is replaced is the driver, the compiler and the compiled kernel. Triton's own code makes the binder, the key and
the grid, and looks the compiled kernel up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Driver:
    """Stands for the driver of an H100 that nothing is launched on."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Launches:
    """Stands for all compiled kernels; made by :func:`launches_stopped`."""

    function = packed_metadata = None

    def __init__(self) -> None:
        self.launched = 0
        self.functions: set[Any] = set()

    def compile(self, function: Any, key: str, device: int) -> Launches:
        """Take the place of the compiler."""
        function.cache_key  # noqa: B018  finds the globals that every later launch compares
        self.functions.add(function)
        function.device_caches[device][0][key] = self
        return self

    def launch_metadata(self, *arguments: Any) -> None:
        """As that of a compiled kernel where no profiler listens."""

    def run(self, *arguments: Any) -> None:
        """The launch, which does nothing."""
        self.launched += 1

    def count(self, name: str, call: Callable[[], Any]) -> int:
        """Launches of one call, each of which went through Triton's binder.

        Raises:
            RuntimeError: one did not, or there was none.
        """
        call()  # what is compiled at the first call is known after it
        bound, caches = 0, [function.device_caches for function in self.functions]
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
    """Within the block, what Triton compiles and launches is a :class:`Launches`; the host does all else."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches = Launches()
    active, compiler = driver._active, JITFunction._do_compile
    driver.set_active(_Driver())
    JITFunction._do_compile = lambda self, key, signature, device, *_: launches.compile(self, key, device)
    try:
        yield launches
    finally:
        JITFunction._do_compile = compiler
        driver._active = active
