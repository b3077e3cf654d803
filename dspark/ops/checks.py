"""Argument checks whose errors restate the call: the argument, the symbolic shape it should have, and what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.ops.types import Sampling

INT_DTYPES = (torch.int64, torch.int32)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SAMPLING_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
}


def check_shape(name: str, tensor: Tensor, pattern: str, sizes: dict[str, int]) -> None:
    """Check ``tensor`` against a symbolic shape and bind the letters that are new.

    Args:
        name: the argument's name, for the message.
        tensor: the argument.
        pattern: space-separated dimensions, each a name (``"R"``), a number (``"3"``), or either plus a number
            (``"R+1"``); the empty string is a scalar tensor.
        sizes: what the names stand for so far. A bare name that is not in it is bound to the size found; share one
            dictionary between the checks of a call so that the arguments are checked against each other.

    Raises:
        TypeError: ``tensor`` is not a tensor.
        ValueError: the number of dimensions or a size differs.

    Reads shapes only, never the device.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f'{name}: expected a tensor "{pattern}", got {type(tensor).__name__}')
    dims = pattern.split()
    if tensor.ndim != len(dims):
        raise ValueError(f'{name}: expected shape "{pattern}" ({len(dims)} dimensions), got {list(tensor.shape)}')
    for dim, size in zip(dims, tensor.shape, strict=True):
        letter, _, extra = dim.partition("+")
        if not letter.isdecimal() and letter not in sizes:
            if extra:
                raise ValueError(f'{name}: "{letter}" in shape "{pattern}" is not known yet')
            sizes[letter] = size
        expected = (int(letter) if letter.isdecimal() else sizes[letter]) + int(extra or 0)
        if size != expected:
            known = "" if dim.isdecimal() else f" with {dim} = {expected}"
            raise ValueError(f'{name}: expected shape "{pattern}"{known}, got {list(tensor.shape)}')


def check_dtype(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Check that ``tensor.dtype`` is one of ``dtypes``.

    Raises:
        TypeError: it is not.
    """
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected dtype {allowed}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_sampling(sampling: Sampling, sizes: dict[str, int]) -> None:
    """Check the tensors of ``sampling`` against ``"R"`` (bound here when it is new) and their dtypes.

    Raises:
        TypeError: a field has another dtype, or is not a tensor.
        ValueError: a field has another shape.
    """
    for field, dtype in _SAMPLING_DTYPES.items():
        tensor = getattr(sampling, field)
        check_shape(f"sampling.{field}", tensor, "R", sizes)
        check_dtype(f"sampling.{field}", tensor, (dtype,))


def check_workspace(workspace: Tensor | None) -> None:
    """Check that scratch memory, where some is given, is ``[bytes]`` uint8.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if workspace is not None:
        check_shape("workspace", workspace, "bytes", {})
        check_dtype("workspace", workspace, (torch.uint8,))


def fits(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether ``tensor`` has that shape and dtype: the cheap question, for calls in which nothing is wrong."""
    return isinstance(tensor, Tensor) and tensor.dtype is dtype and tensor.shape == shape


def has_dimensions(tensor: object, count: int) -> bool:
    """Whether ``tensor`` is a tensor of so many dimensions."""
    return isinstance(tensor, Tensor) and tensor.ndim == count


def sampling_fits(sampling: Sampling, per_request: tuple[int, ...]) -> bool:
    """Whether :func:`check_sampling` would pass, for shape ``[R]``."""
    return (
        fits(sampling.temperature, per_request, torch.float32)
        and fits(sampling.top_k, per_request, torch.int64)
        and fits(sampling.top_p, per_request, torch.float32)
        and fits(sampling.min_p, per_request, torch.float32)
        and fits(sampling.seed, per_request, torch.int64)
    )
