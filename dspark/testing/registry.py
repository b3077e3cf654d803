"""What a compiler must make of a kernel in a configuration that an op launches.

An entry is data: it names its kernel as ``module:function``, so that another process can compile it.
:mod:`dspark.testing.codegen` does that for every target, with no GPU, and holds the result to the entry.
:mod:`tests.ops.shipped` lists the entries of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspark.ops.launch import Launch

NVIDIA_TARGETS = ("sm_80", "sm_90", "sm_100")
AMD_TARGETS = ("gfx942",)
TARGETS = (*NVIDIA_TARGETS, *AMD_TARGETS)
"""What every kernel is compiled for."""

_OPTIONS = ("enable_fp_fusion", "maxnreg", "waves_per_eu")
_POINTERS = {
    torch.bool: "i1",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True)
class Budget:
    """The most that one program may use.

    Attributes:
        registers: per thread; a target of AMD counts vector registers.
        shared: bytes of shared memory (AMD: LDS).
    """

    registers: int
    shared: int


@dataclass(frozen=True)
class KernelEntry:
    """One kernel in one configuration that an op launches.

    Attributes:
        name: what the datasheet calls it; unique.
        kernel: ``"dspark.kernels.accept:verdict_kernel"``, the jitted function.
        signature: type of each argument that is passed at run time: ``"*bf16"``, ``"*i64"``, ``"i32"``, ``"fp32"``; of
            each field of a NamedTuple as ``"group.field"``, ``"constexpr"`` for one that is a constant.
        constexprs: value of each compile-time argument, and of each run-time one that the launch specialises (a
            stride of 1).
        aligned: run-time arguments that the op has checked to be multiples of 16 (pointers: 16-byte aligned).
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
        budgets: the limits by target; every target needs one.
        claims: by target, regular expressions of which each must match an instruction.
        options: more compile options, such as ``{"enable_fp_fusion": False}``.
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, int | float | bool | str | None]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
    budgets: Mapping[str, Budget]
    claims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: Mapping[str, int | bool | str] = field(default_factory=dict)


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor that holds nothing."""
    return torch.empty(shape, dtype=dtype, device="meta")


def budgets(nvidia: Budget, amd: Budget) -> dict[str, Budget]:
    """One budget for every NVIDIA target and one for every AMD target."""
    return dict.fromkeys(NVIDIA_TARGETS, nvidia) | dict.fromkeys(AMD_TARGETS, amd)


def entry_of_launch(
    name: str, launch: Launch, limits: Mapping[str, Budget], claims: Mapping[str, tuple[str, ...]] | None = None
) -> KernelEntry:
    """The entry of a launch as Triton would specialise it.

    A group's fields are arguments of their own, named ``group.field``. An integer of 1 and None become constants, and
    what is a multiple of 16 is marked so; a tensor counts by where it begins in its storage, so tensors of device
    "meta" serve.

    Args:
        name: of the entry.
        launch: one of :func:`dspark.ops.launch.recorded_launches`.
        limits: the entry's budgets.
        claims: the entry's claims.

    Raises:
        TypeError: an argument is of no type that a kernel takes.
    """
    signature: dict[str, str] = {}
    constexprs: dict[str, int | float | bool | str | None] = {}
    aligned: list[str] = []
    arguments = dict(launch.arguments)
    num_warps, num_stages = arguments.pop("num_warps", 4), arguments.pop("num_stages", 3)
    options = {key: arguments.pop(key) for key in _OPTIONS if key in arguments}

    unspecialised = _unspecialised(launch.kernel)

    def declare(path: str, value: object) -> None:
        """Notes the type of an argument, or of each field of a group, and whether it is a constant or aligned."""
        if isinstance(value, tuple):
            for name, inner in zip(value._fields, value, strict=True):  # type: ignore[attr-defined]
                declare(f"{path}.{name}", inner)
            return
        specialised = path not in unspecialised
        if path.isupper() or value is None or (specialised and isinstance(value, int) and value == 1):
            constexprs[path] = value  # type: ignore[assignment]
            if "." in path:
                signature[path] = "constexpr"
            return
        signature[path] = _type_of(path, value)
        multiple = value.storage_offset() * value.itemsize if isinstance(value, Tensor) else value
        if specialised and isinstance(multiple, int) and multiple % 16 == 0:
            aligned.append(path)

    for key, value in arguments.items():
        declare(key, value)
    function = launch.kernel.fn
    return KernelEntry(
        name=name,
        kernel=f"{function.__module__}:{function.__name__}",
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(aligned),
        num_warps=num_warps,
        num_stages=num_stages,
        budgets=limits,
        claims=claims or {},
        options=options,
    )


def _unspecialised(kernel: Any) -> set[str]:
    """Arguments that the kernel asks Triton not to make a variant for each kind of value of."""
    if hasattr(kernel, "params"):
        return {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    return set(kernel.kwargs["do_not_specialize"] or ())  # as the interpreter keeps it


def _type_of(name: str, value: object) -> str:
    """Triton's word for the type of a run-time argument."""
    if isinstance(value, Tensor):
        return f"*{_POINTERS[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"{name}: expected a tensor, a number or None, got {type(value).__name__}")
