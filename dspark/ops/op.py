"""The one layer under all ops: from a declared call to the reference or the kernels.

An :class:`Op` owns what ops have in common: the check of a call, kept by the shapes, strides, dtypes and scalars of its
arguments; which implementation runs; results and scratch memory; and the entry in ``torch.library``, through which
``torch.compile`` sees the op. An op adds a reference, and a *plan* and a *run* of its kernels: the plan is all that
follows from those shapes and scalars, made once for each of them, and a run adds the tensors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from dspark.ops.call import Arg, GroupArg, Signature, is_asked, shape_of
from dspark.ops.launch import check_workspace, scratch
from dspark.ops.types import Backend

logger = logging.getLogger(__name__)

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once, as Triton does when it decorates a kernel
_BACKENDS = get_args(Backend)
_MOST_CALLS = 4096
"""Calls of different shapes that an op remembers before it forgets them all."""

_library: Any = torch.library.Library("dspark", "DEF")  # type: ignore[no-untyped-call]
OPS: dict[str, Op] = {}
"""Every op, by name."""


class Plan(Protocol):
    """What follows from the shapes and scalars of a call alone."""

    @property
    def sizes(self) -> Sequence[int]:
        """Elements of each region of scratch memory, of float32, as :func:`dspark.ops.launch.padded` gives them."""


class Call:
    """What is kept of calls with the same shapes, strides, dtypes, devices and scalars.

    Attributes:
        sizes: what the letters of the declared shapes stand for.
        device: of the tensors.
        empty: there is nothing to do.
        results: shape and dtype of each tensor to be allocated, by result; None for one that nobody asks for.
        plan: of the kernels, once they have run.
        copies: some tensor has to be made contiguous for them.
    """

    __slots__ = ("copies", "device", "empty", "plan", "results", "sizes")

    def __init__(self, sizes: dict[str, int], device: torch.device, empty: bool, results: list[Any]) -> None:
        self.sizes, self.device, self.empty, self.results = sizes, device, empty, results
        self.plan: Any = None
        self.copies = False


class Op:
    """A declared call with its implementations; ``torch.ops.dspark.NAME`` is the same call for a compiler.

    Args:
        name: of the op.
        args: the declared arguments, in order. Those that are results come last (after them only ``workspace``).
        reference: ``reference(*inputs)`` returns the results, or writes into its arguments where there are none.
        plan: ``plan(sizes, *arguments)`` makes the plan of the kernels from shapes, strides, dtypes and scalars.
        run: ``run(plan, regions, *arguments)`` launches them; results are allocated, and ``regions`` is scratch memory.
        results: names of the arguments that are returned.
        also: see :class:`~dspark.ops.call.Signature`.
        empty: letters of which none may be 0 for there to be anything to do.
        workspace: whether the kernels take scratch memory.
    """

    def __init__(
        self,
        name: str,
        args: Mapping[str, Arg],
        *,
        reference: Callable[..., Any],
        plan: Callable[..., Plan],
        run: Callable[..., None],
        results: Sequence[str] = (),
        also: Callable[..., None] | None = None,
        empty: str = "",
        workspace: bool = False,
    ) -> None:
        self.name, self.signature = name, Signature(args, also)
        self.reference, self.plan, self.run = reference, plan, run
        self.results, self.empty = tuple(results), empty.split()
        self._inputs = len(args) - len(self.results)
        self._calls: dict[Any, Call] = {}
        names = list(args)
        if names[self._inputs :] != list(self.results):
            raise ValueError(f"{name}: results are declared last, got {names}")
        self._has_workspace = workspace
        schema = f"({self.signature.schema()}{', Tensor(z!)? workspace' * workspace}, str backend) -> ()"
        _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, self._from_library, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dspark::{name}", _nothing, lib=_library)
        OPS[name] = self

    def __call__(self, backend: Backend, *values: Any, workspace: Tensor | None = None, config: Any = None) -> Any:
        """Check the call, and run it.

        Args:
            backend: ``"auto"``, ``"triton"`` or ``"reference"``.
            values: the declared arguments; a result that is None is allocated.
            workspace: ``[bytes]`` uint8, scratch memory of the kernels; None takes some from the allocator.
            config: how the kernels cut their work; None is what the plan chooses.

        Returns:
            The results: one, a tuple of several, or None.
        """
        if torch.compiler.is_compiling():
            return self._traced(backend, values, workspace)
        call = self.call_of(values)
        if workspace is not None:
            check_workspace(workspace)
        if self.choose(backend, call.device) == "reference":
            return self._refer(call, values)
        given = (*values[: self._inputs], *self._allocated(call, values)) if self.results else values
        if not call.empty:
            plan = call.plan
            if plan is None:
                call.copies = self.signature.check_layout(given)
                plan = call.plan = self.plan(call.sizes, *given)
            if config is not None:
                plan = self.plan(call.sizes, *given, config=config)
            arguments = self.signature.dense(given) if call.copies else given
            self.run(plan, scratch(plan.sizes, call.device, workspace), *arguments)
        return self._returned(given)

    def call_of(self, values: Sequence[Any]) -> Call:
        """What is known of a call, checked if it is the first of its shapes.

        Raises:
            TypeError, ValueError: it is not as declared.
        """
        if torch.compiler.is_compiling():  # shapes may be symbols, which are no key
            return self._first(values)
        try:
            key = tuple([
                (x.shape, x.dtype, x.stride(), x.device) if isinstance(x, Tensor) else x
                for x in self.signature.leaves(values)
            ])  # fmt: skip
            found = self._calls.get(key)
        except TypeError:  # a symbolic size, of which nothing is kept, or what is no tensor, as the check says
            return self._first(values)
        if found is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            found = self._calls[key] = self._first(values)
        return found

    def workspace(self, *values: Any) -> int:
        """Bytes of scratch memory that the kernels take for such arguments (of device "meta" will do)."""
        call = self.call_of(values)
        return 4 * sum(self.plan(call.sizes, *values[: self._inputs], *self._allocated(call, values)).sizes)

    def _first(self, values: Sequence[Any]) -> Call:
        sizes = self.signature.check(values)
        device = next(value.device for _, _, value in self.signature.tensors(values) if value is not None)
        empty = any(sizes[letter] == 0 for letter in self.empty)
        return Call(sizes, device, empty, self._wanted(sizes, values))

    def _wanted(self, sizes: dict[str, int], values: Sequence[Any]) -> list[Any]:
        """Of each result, its shape and dtype, or None if nobody asks for it; of a group a list, by field."""
        by_name = dict(zip(self.signature.args, values, strict=True))

        def one(spec: Any) -> Any:
            if not is_asked(spec, by_name):
                return None
            same = by_name[spec.dtypes] if isinstance(spec.dtypes, str) else spec.dtypes[0]
            return shape_of(spec, sizes), same.dtype if isinstance(same, Tensor) else same

        specs = (self.signature.args[name] for name in self.results)
        return [
            [one(inner) for inner in spec.fields.values()] if isinstance(spec, GroupArg) else one(spec)
            for spec in specs
        ]

    def _allocated(self, call: Call, values: Sequence[Any]) -> list[Any]:
        """The results to be written: those given, and new tensors for the others."""
        found: list[Any] = []
        for name, given, wanted in zip(self.results, values[self._inputs :], call.results, strict=True):
            if given is not None or wanted is None:
                found.append(given)
            elif isinstance(wanted, list):
                spec = self.signature.args[name]
                assert isinstance(spec, GroupArg)
                (kind,) = spec.kinds
                found.append(kind(*[None if each is None else _empty(each, call.device) for each in wanted]))
            else:
                found.append(_empty(wanted, call.device))
        return found

    def _refer(self, call: Call, values: Sequence[Any]) -> Any:
        """Run the reference, and move what it returns to where the caller wants it."""
        given = values[self._inputs :]
        if call.empty:
            return self._returned((*values[: self._inputs], *self._allocated(call, values)))
        found = self.reference(*values[: self._inputs])
        if not self.results:
            return None
        several = len(self.results) > 1
        for result, out in zip(found if several else (found,), given, strict=True):
            if isinstance(out, Tensor):
                out.copy_(result)
            elif out is not None:
                for field, value in zip(out, result, strict=True):
                    if field is not None:
                        field.copy_(value)
        if not several:
            return found if given[0] is None else given[0]
        return tuple(result if out is None else out for result, out in zip(found, given, strict=True))

    def _returned(self, values: Sequence[Any]) -> Any:
        results = values[self._inputs :]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def choose(self, backend: Backend, device: torch.device) -> Literal["reference", "triton"]:
        """The implementation that runs; one debug line of this module's logger names it.

        Raises:
            ValueError: ``backend`` is not one of the words, or no kernel can take tensors of this device.
        """
        if backend not in _BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(map(repr, _BACKENDS))}, got {backend!r}")
        if backend == "triton" and device.type != "cuda" and not _INTERPRETED:
            raise ValueError(
                f"backend: the Triton kernels run on a GPU, got tensors on {device}; to run them in Triton's "
                "interpreter, set TRITON_INTERPRET=1 before dspark is imported"
            )
        use_kernel = backend == "triton" or (backend == "auto" and device.type == "cuda")
        taken: Literal["reference", "triton"] = "triton" if use_kernel else "reference"
        if not torch.compiler.is_compiling() and logger.isEnabledFor(logging.DEBUG):  # a traced graph calls no logger
            logger.debug("%s: %s backend (asked for %s, device %s)", self.name, taken, backend, device)
        return taken

    def _traced(self, backend: Backend, values: Sequence[Any], workspace: Tensor | None) -> Any:
        """The call as a compiler sees it: the library's op, between allocations."""
        call = self.call_of(values)
        taken = self.choose(backend, call.device)
        given = (*values[: self._inputs], *self._allocated(call, values))
        getattr(torch.ops.dspark, self.name)(*self.flatten(taken, given, workspace))
        return self._returned(given)

    def flatten(self, backend: Backend, values: Sequence[Any], workspace: Tensor | None = None) -> list[Any]:
        """The call as ``torch.ops.dspark.NAME`` takes it; results are allocated."""
        return [*self.signature.flatten(values), *[workspace] * self._has_workspace, backend]

    def _from_library(self, *flat: Any) -> None:
        *arguments, backend = flat
        workspace = arguments.pop() if self._has_workspace else None
        self(backend, *self.signature.unflatten(arguments), workspace=workspace)


def _nothing(*_: object) -> None:
    """What an op does to fake tensors: its results have the shapes that the caller gave them."""


def _empty(wanted: tuple[tuple[int, ...], torch.dtype], device: torch.device) -> Tensor:
    return torch.empty(wanted[0], dtype=wanted[1], device=device)
