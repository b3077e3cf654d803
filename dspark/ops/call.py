"""What an op is called with, declared once: symbolic shapes, dtypes, layouts and scalars of every argument.

A :class:`Signature` checks a call against its declaration, with errors that name the argument, the symbolic shape that
it should have and what came (contract C10), and flattens its groups for ``torch.library``. It reads shapes, dtypes,
strides and devices, never what a tensor holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

INTS = (torch.int64, torch.int32)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = torch.float8_e4m3fn

Layout = Literal["any", "rows", "dense", "contiguous"]
"""What a kernel asks of a tensor's strides: nothing; a contiguous last axis; all of it contiguous, or else it gets a
copy (small inputs); all of it contiguous (what is written)."""


@dataclass(frozen=True)
class TensorArg:
    """A tensor.

    Attributes:
        shape: space-separated dimensions, each a sum of letters and numbers (``"R+1"``, ``"3r"``); the empty string is
            a scalar tensor. ``"T | T W"`` allows either.
        dtypes: those allowed, or the name of the tensor or dtype argument whose dtype this one has.
        optional: may be None.
        written: the op writes into it.
        layout: what the kernels need.
        when: name of an argument: of a result, the flag that asks for it or the input that it follows from; the tensor
            is there if and only if that is. ``"name=word"``: if and only if that is the word.
    """

    shape: str
    dtypes: tuple[torch.dtype, ...] | str
    optional: bool = False
    written: bool = False
    layout: Layout = "any"
    when: str | None = None


@dataclass(frozen=True)
class ScalarArg:
    """A number, a word, a flag or a dtype.

    Attributes:
        kind: ``torch.library``'s word for its type.
        choices: the values allowed; None: any.
        least, most: of a number.
        symbol: letter of the shapes that it is.
        optional: may be None.
    """

    kind: Literal["SymInt", "float", "bool", "str", "ScalarType"]
    choices: tuple[Any, ...] | None = None
    least: float | None = None
    most: float | None = None
    symbol: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class GroupArg:
    """A NamedTuple of tensors and scalars, or one of several.

    Attributes:
        kinds: the types allowed, each with its fields' declarations.
        optional: may be None.
    """

    kinds: Mapping[type, Mapping[str, TensorArg | ScalarArg]]
    optional: bool = False

    @property
    def fields(self) -> dict[str, TensorArg | ScalarArg]:
        """Those of every kind, in order; fields of one name are declared alike."""
        return {name: spec for fields in self.kinds.values() for name, spec in fields.items()}


Arg = TensorArg | ScalarArg | GroupArg
_TERM = re.compile(r"(\d*)([A-Za-z]\w*)?")


@dataclass(frozen=True)
class Signature:
    """The declared arguments of an op, in the order in which it is called.

    Attributes:
        args: by name.
        also: checks what the table does not say, given the sizes of the letters and the arguments by name.
    """

    args: Mapping[str, Arg]
    also: Callable[..., None] | None = None
    groups: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(isinstance(arg, GroupArg) for arg in self.args.values()))

    def leaves(self, values: Sequence[Any]) -> list[Any]:
        """The arguments with their groups spread out, each after its type."""
        found: list[Any] = []
        for value, is_group in zip(values, self.groups, strict=True):
            if is_group and value is not None:
                found.append(type(value))
                found.extend(value)
            else:
                found.append(value)
        return found

    def tensors(self, values: Sequence[Any]) -> Iterator[tuple[str, TensorArg, Any]]:
        """``(name, declaration, tensor or None)`` of every tensor of a call; a group that is None is left out."""
        for name, spec, value in self._flat(values):
            if isinstance(spec, TensorArg):
                yield name, spec, value

    def _flat(self, values: Sequence[Any]) -> Iterator[tuple[str, TensorArg | ScalarArg, Any]]:
        for (name, spec), value in zip(self.args.items(), values, strict=True):
            if not isinstance(spec, GroupArg):
                yield name, spec, value
            elif value is not None:
                for key, inner in spec.kinds[type(value)].items():
                    yield f"{name}.{key}", inner, getattr(value, key)

    def check(self, values: Sequence[Any]) -> dict[str, int]:
        """Check a call; what the letters of the shapes stand for.

        Raises:
            TypeError: an argument is of another type or dtype.
            ValueError: a shape or a value differs, or an argument is missing or useless.
        """
        for (name, spec), value in zip(self.args.items(), values, strict=True):
            if isinstance(spec, GroupArg) and type(value) not in spec.kinds and not (value is None and spec.optional):
                words = [kind.__name__ for kind in spec.kinds] + ["None"] * spec.optional
                raise TypeError(f"{name}: expected {_listed(words)}, got {_came(value)}")
        flat = list(self._flat(values))
        by_name = dict(zip(self.args, values, strict=True)) | {name: value for name, _, value in flat}
        sizes: dict[str, int] = {}
        for name, spec, value in flat:
            if isinstance(spec, ScalarArg):
                _check_scalar(name, spec, value)
                if spec.symbol is not None and value is not None:
                    sizes[spec.symbol] = value
        present = [
            (name, spec, value)
            for name, spec, value in flat
            if isinstance(spec, TensorArg) and _is_there(name, spec, value, by_name)
        ]
        present.sort(key=lambda one: "." not in one[0])  # groups first: they are what the other arguments are for
        ranks: dict[str, int] = {}
        for name, spec, value in present:  # first what gives the letters their sizes; then sums of letters
            _check_rank(name, spec, value, ranks.setdefault(spec.shape, value.ndim))
            for dim, size in zip(_dims(spec.shape, value.ndim), value.shape, strict=True):
                if dim not in sizes and dim.isidentifier():
                    sizes[dim] = size
        for name, spec, value in present:
            _check_dims(name, _dims(spec.shape, value.ndim), value, sizes)
        for name, spec, value in sorted(present, key=lambda one: isinstance(one[1].dtypes, str)):  # "as k" after k
            _check_dtype(name, spec, value, by_name)
        if self.also is not None:
            self.also(sizes, **dict(zip(self.args, values, strict=True)))
        if present:
            first, _, tensor = present[0]
            for name, _, value in present:
                if value.device != tensor.device:
                    raise ValueError(f"{name}: expected device {tensor.device}, as {first} has, got {value.device}")
        return sizes

    def check_layout(self, values: Sequence[Any]) -> bool:
        """Check the strides that kernels rely on; whether some tensor has to be copied first.

        Raises:
            ValueError: a stride does not serve.
        """
        copies = False
        for name, spec, value in self.tensors(values):
            if value is None or spec.layout == "any" or value.is_contiguous():
                continue
            if spec.layout == "dense":
                copies = True
            elif spec.layout == "contiguous":
                raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(value.stride())}")
            elif value.stride(-1) != 1 and value.shape[-1] > 1:
                raise ValueError(f"{name}: the kernels need a contiguous last axis, got strides {list(value.stride())}")
        return copies

    def dense(self, values: Sequence[Any]) -> list[Any]:
        """The arguments, those of layout ``"dense"`` copied where they are not contiguous."""
        return [
            _dense(spec, value)
            if not isinstance(spec, GroupArg) or value is None
            else type(value)(
                *(_dense(inner, x) for inner, x in zip(spec.kinds[type(value)].values(), value, strict=True))
            )
            for spec, value in zip(self.args.values(), values, strict=True)
        ]

    def schema(self) -> str:
        """The arguments as ``torch.library`` writes them; a field of a group is ``group_field``."""
        words, marks = [], iter("abcdefghijklmnopqrstuvwxyz")
        for name, spec in self.args.items():
            if isinstance(spec, GroupArg):
                if len(spec.kinds) > 1:
                    words.append(f"str {name}_kind")
                loose = spec.optional or len(spec.kinds) > 1
                words += [_schema_of(f"{name}_{key}", inner, loose, marks) for key, inner in spec.fields.items()]
            else:
                words.append(_schema_of(name, spec, False, marks))
        return ", ".join(words)

    def flatten(self, values: Sequence[Any]) -> list[Any]:
        """The arguments of the library's op, but for the backend."""
        flat: list[Any] = []
        for (_, spec), value in zip(self.args.items(), values, strict=True):
            if isinstance(spec, GroupArg):
                if len(spec.kinds) > 1:
                    flat.append(type(value).__name__)
                flat += [getattr(value, key, None) for key in spec.fields]
            else:
                flat.append(value)
        return flat

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        """What :meth:`flatten` was given."""
        values: list[Any] = []
        rest = iter(flat)
        for spec in self.args.values():
            if not isinstance(spec, GroupArg):
                values.append(next(rest))
                continue
            by_name = {kind.__name__: kind for kind in spec.kinds}
            kind = by_name.get(next(rest)) if len(by_name) > 1 else next(iter(spec.kinds))
            given = {key: next(rest) for key in spec.fields}
            if kind is None or (len(by_name) == 1 and spec.optional and all(value is None for value in given.values())):
                values.append(None)
            else:
                values.append(kind(**{key: given[key] for key in spec.kinds[kind]}))
        return values


def check_shape(name: str, tensor: Tensor, shape: str, sizes: dict[str, int]) -> None:
    """Check one tensor outside of an op, and add the letters that are new to ``sizes``.

    Raises:
        TypeError: it is no tensor.
        ValueError: the number of dimensions or a size differs.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f'{name}: expected a tensor "{shape}", got {_came(tensor)}')
    _check_rank(name, TensorArg(shape, ()), tensor, tensor.ndim)
    for dim, size in zip(shape.split(), tensor.shape, strict=True):
        sizes.setdefault(dim, size)
    _check_dims(name, shape.split(), tensor, sizes)


def size_of(dim: str, sizes: Mapping[str, int]) -> int:
    """What a dimension comes to.

    >>> size_of("2r+h", {"r": 4, "h": 16})
    24
    """
    total = 0
    for term in dim.split("+"):
        found = _TERM.fullmatch(term)
        assert found is not None
        factor, letter = found.groups()
        total += int(factor or 1) * (1 if letter is None else sizes[letter])
    return total


def shape_of(spec: TensorArg, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor that is to be allocated: the one of its alternatives whose letters are all known."""
    for pattern in reversed(spec.shape.split(" | ")):
        dims = pattern.split()
        if all(letter in sizes for dim in dims for _, letter in _TERM.findall(dim) if letter):
            return tuple(size_of(dim, sizes) for dim in dims)
    raise KeyError(spec.shape)


def is_asked(spec: TensorArg, by_name: Mapping[str, Any]) -> bool:
    """Whether what a tensor depends on is there."""
    if spec.when is None:
        return True
    name, _, word = spec.when.partition("=")
    value = by_name[name]
    return bool(value == word) if word else value is not None and value is not False


def _dims(shape: str, ndim: int) -> list[str]:
    """Of the alternatives the one of this rank."""
    return next(dims for pattern in shape.split("|") if len(dims := pattern.split()) == ndim)


def _is_there(name: str, spec: TensorArg, value: Any, by_name: Mapping[str, Any]) -> bool:
    """Whether a tensor that may be absent is there.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is useless.
    """
    asked = is_asked(spec, by_name)
    if not asked and value is not None:
        raise ValueError(f"{name}: expected None without {spec.when}, got {_came(value)}")
    if value is None and (spec.optional or not asked):
        return False
    if not isinstance(value, Tensor):
        raise TypeError(f'{name}: expected a tensor "{spec.shape}", got {_came(value)}')
    return True


def _check_rank(name: str, spec: TensorArg, value: Tensor, rank: int) -> None:
    """``rank`` is that of the first argument declared with the same alternatives."""
    ranks = [len(pattern.split()) for pattern in spec.shape.split("|")]
    if value.ndim not in ranks:
        words = " or ".join(map(str, ranks))
        raise ValueError(f'{name}: expected shape "{spec.shape}" ({words} dimensions), got {list(value.shape)}')
    if value.ndim != rank:
        raise ValueError(f'{name}: expected shape "{" ".join(_dims(spec.shape, rank))}", got {list(value.shape)}')


def _check_dims(name: str, dims: Sequence[str], tensor: Tensor, sizes: Mapping[str, int]) -> None:
    for dim, size in zip(dims, tensor.shape, strict=True):
        if any(letter and letter not in sizes for _, letter in _TERM.findall(dim)):
            continue  # of an optional tensor that is not there; whether it may be missing is for ``also`` to say
        expected = size_of(dim, sizes)
        if size != expected:
            known = "" if dim.isdecimal() else f" with {dim} = {expected}"
            raise ValueError(f'{name}: expected shape "{" ".join(dims)}"{known}, got {list(tensor.shape)}')


def _check_dtype(name: str, spec: TensorArg, value: Tensor, by_name: Mapping[str, Any]) -> None:
    allowed: tuple[torch.dtype, ...]
    if isinstance(spec.dtypes, str):
        same = by_name[spec.dtypes]
        allowed = (same.dtype if isinstance(same, Tensor) else same,)
    else:
        allowed = spec.dtypes
    if value.dtype not in allowed:
        raise TypeError(f"{name}: expected dtype {_listed(map(_word, allowed))}, got {_word(value.dtype)}")


_PYTHON = {"SymInt": (int, torch.SymInt), "float": (float, int, torch.SymFloat), "bool": (bool, torch.SymBool)}


def _check_scalar(name: str, spec: ScalarArg, value: Any) -> None:
    if value is None and spec.optional:
        return
    if spec.choices is not None:
        if value not in spec.choices:
            raise ValueError(f"{name}: expected one of {', '.join(map(_word, spec.choices))}, got {_word(value)}")
    elif not isinstance(value, _PYTHON.get(spec.kind, object)):
        raise TypeError(f"{name}: expected {spec.kind.removeprefix('Sym').lower()}, got {_came(value)}")
    if (spec.least is not None and not value >= spec.least) or (spec.most is not None and not value <= spec.most):
        bounds = f"at least {spec.least}" if spec.most is None else f"{spec.least} to {spec.most}"
        raise ValueError(f"{name}: expected {bounds}, got {value}")


def _schema_of(name: str, spec: TensorArg | ScalarArg, loose: bool, marks: Iterator[str]) -> str:
    if name == "mode":  # torch passes a "mode" of its own by keyword beside the arguments
        name = "mode_"
    optional = "?" if spec.optional or loose or (isinstance(spec, TensorArg) and spec.when is not None) else ""
    if isinstance(spec, ScalarArg):
        return f"{spec.kind}{optional} {name}"
    return f"Tensor({next(marks)}!){optional} {name}" if spec.written else f"Tensor{optional} {name}"


def _dense(spec: Arg, value: Any) -> Any:
    if isinstance(spec, TensorArg) and spec.layout == "dense" and value is not None:
        return value.contiguous()
    return value


def _word(value: object) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def _came(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _listed(words: Any) -> str:
    return " or ".join(words)
