"""A call of an op as data: what every gate runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.ops.call import GroupArg, ScalarArg, TensorArg
from dspark.ops.op import OPS, Op


class Case(NamedTuple):
    """A call: the op's name, what is special about it in words, and the declared arguments, results None.

    ``values`` makes them anew, as an op may write into them; it takes a device ("meta" where only shapes matter).
    """

    name: str
    words: str
    values: Callable[[str], tuple[Any, ...]]

    @property
    def op(self) -> Op:
        return OPS[self.name]

    def __str__(self) -> str:
        return f"{self.name}, {self.words}" if self.words else self.name


class Fault(NamedTuple):
    """A call with one thing wrong: which argument, what, the call's arguments, and the error that should come."""

    argument: str
    what: str
    values: tuple[Any, ...]
    error: type[Exception]
    needs_kernels: bool = False


def faults(op: Op, values: Sequence[Any]) -> Iterator[Fault]:
    """Every tensor of a call with another rank, size, dtype, device or layout, missing, or no tensor at all.

    A size is left alone where its letter stands nowhere else in the call.
    """
    tensors = [(name, spec, x) for name, spec, x in op.signature.tensors(values) if x is not None]
    letters = [dim for _, spec, x in tensors for dim in spec.shape.split()]

    def with_(name: str, value: object) -> tuple[Any, ...]:
        return tuple(_changed(key, given, name, value) for key, given in zip(op.signature.args, values, strict=True))

    for name, spec, x in tensors:
        ranks = {len(pattern.split()) for pattern in spec.shape.split("|")}
        if x.ndim + 1 not in ranks:
            yield Fault(name, "rank", with_(name, x[None]), ValueError)
        dims = next(dims for pattern in spec.shape.split("|") if len(dims := pattern.split()) == x.ndim)
        for axis, dim in enumerate(dims):
            if letters.count(dim) > 1 or not dim.isidentifier():
                shape = [size + (i == axis) for i, size in enumerate(x.shape)]
                yield Fault(name, f"size {dim}", with_(name, x.new_zeros(shape)), ValueError)
        yield Fault(name, "dtype", with_(name, torch.zeros(x.shape, dtype=torch.complex64)), TypeError)
        if len(tensors) > 1:
            yield Fault(name, "device", with_(name, x.to("meta")), ValueError)
        if not spec.optional:
            yield Fault(name, "missing", with_(name, None), TypeError)
        yield Fault(name, "no tensor", with_(name, [1, 2]), TypeError)
        if spec.layout in ("rows", "contiguous") and x.ndim and x.shape[-1] > 1:
            strided = torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 0]
            yield Fault(name, "layout", with_(name, strided), ValueError, needs_kernels=True)
    for name, arg in op.signature.args.items():
        if isinstance(arg, GroupArg):
            yield Fault(name, "no group", with_(name, (1, 2)), TypeError)
        elif isinstance(arg, ScalarArg) and arg.choices is not None:
            yield Fault(name, "word", with_(name, "mistyped"), ValueError)
        elif isinstance(arg, ScalarArg) and arg.kind == "SymInt":
            yield Fault(name, "number", with_(name, "three"), TypeError)
            if arg.least is not None:
                yield Fault(name, "too small", with_(name, int(arg.least) - 1), ValueError)


def _changed(key: str, given: Any, name: str, value: object) -> Any:
    first, _, field = name.partition(".")
    if key != first:
        return given
    return given._replace(**{field: value}) if field else value


def spec_of(op: Op, name: str) -> TensorArg:
    """The declaration of a tensor, by ``"group.field"``."""
    first, _, field = name.partition(".")
    arg = op.signature.args[first]
    found = arg.fields[field] if isinstance(arg, GroupArg) else arg
    assert isinstance(found, TensorArg)
    return found


def tensors_of(values: object) -> Iterator[Tensor]:
    """Every tensor of arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_of(value)
