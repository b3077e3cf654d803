"""How the kernels over rows of logits are launched: tile sizes as plain functions of shapes, and the scratch memory.

A request's result does not depend on its batch, nor on how many drafts the others have (contract C8). Tile sizes depend
on the vocabulary alone, and a tile is summed by one compiled kernel whatever the number of requests and of their nodes.
How a program takes requests depends on the most nodes of one, and with it the order in which the compiler adds what the
tiles gave: these sums have no rounding, see ``summable`` in ``dspark.kernels.sample.rows``. The compiler orders the sum
within a tile by how it loads it, so all this holds between rows of one dtype whose base and stride are all multiples
of 16 (such rows load 16 bytes at a time), and between rows where they are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STATS_PLANES = 7
"""Planes of a statistics buffer before those of the sub-tiles; their order is in ``dspark.kernels.sample.rows``."""
DRAFT_PLANES = 2
"""Of a draft's scores."""
_ALIGN = 64  # elements: every region and plane begins at a multiple of 256 bytes
_WANTED_PROGRAMS = 2048
_MAX_TILES_PER_PROGRAM = 8


@dataclass(frozen=True)
class RowConfig:
    """How a program over rows of logits is cut.

    Attributes:
        block_rows: rows per program.
        block_vocab: tokens per tile.
        block_sub: tokens per sub-tile, the grain at which a token is drawn by inverse CDF.
        num_warps: of the passes over whole tiles.
    """

    block_rows: int
    block_vocab: int
    block_sub: int
    num_warps: int

    @property
    def subs(self) -> int:
        """Sub-tiles per tile."""
        return self.block_vocab // self.block_sub

    def tiles(self, vocab_size: int) -> int:
        """Tiles per row."""
        return -(-vocab_size // self.block_vocab)


def row_config(vocab_size: int) -> RowConfig:
    """The configuration that is launched for a vocabulary.

    >>> row_config(151_936)
    RowConfig(block_rows=1, block_vocab=4096, block_sub=1024, num_warps=8)
    >>> row_config(2048)
    RowConfig(block_rows=2, block_vocab=2048, block_sub=1024, num_warps=8)
    """
    block_vocab = min(4096, max(16, power_of_two(vocab_size)))
    return RowConfig(4096 // block_vocab, block_vocab, min(1024, block_vocab), 8)


def tiles_per_program(programs: int) -> int:
    """Tiles that a program of the statistics pass takes in turn, given how many there would be with one each.

    More tiles make the running best better, which saves noise in tiles that cannot win; the result is the same.
    """
    tiles = 1
    while tiles < _MAX_TILES_PER_PROGRAM and programs >= 2 * tiles * _WANTED_PROGRAMS:
        tiles *= 2
    return tiles


def requests_per_program(nodes_p2: int, columns: int) -> int:
    """Requests that a program of a verdict takes: as many as make 512 entries of ``columns`` per node."""
    return max(1, 512 // (nodes_p2 * columns))


def draws_per_program(columns: int) -> int:
    """Rows that a program draws a token from: as many as make 1,024 entries of ``columns`` per row."""
    return max(1, 1024 // columns)


def verdict_warps(entries: int) -> int:
    """Warps for a verdict program that holds so many entries."""
    return 8 if entries > 4096 else 4


def power_of_two(n: int) -> int:
    """The least power of two that is not below ``n`` (1 for 0)."""
    return 1 << max(n - 1, 0).bit_length()


def padded(elements: int) -> int:
    """``elements`` rounded up to the alignment of a region."""
    return -(-elements // _ALIGN) * _ALIGN


def scratch(sizes: Sequence[int], device: torch.device, workspace: Tensor | None) -> tuple[Tensor, ...]:
    """Regions of float32, each of a size that :func:`padded` gave, cut from one buffer.

    Raises:
        ValueError: the workspace is too small, misaligned, strided, or on another device.
    """
    if not sizes:
        return ()
    total = sum(sizes)
    if workspace is None:
        return tuple(torch.empty(total, dtype=torch.float32, device=device).split_with_sizes(sizes))
    _check_room(workspace, 4 * total, device)
    return tuple(workspace[: 4 * total].view(torch.float32).split_with_sizes(sizes))


def check_workspace(workspace: Tensor) -> None:
    """Check that scratch memory is ``[bytes]`` uint8.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if not isinstance(workspace, Tensor):
        raise TypeError(f'workspace: expected a tensor "bytes", got {type(workspace).__name__}')
    if workspace.ndim != 1:
        raise ValueError(f'workspace: expected shape "bytes" (1 dimensions), got {list(workspace.shape)}')
    if workspace.dtype is not torch.uint8:
        raise TypeError(f"workspace: expected dtype uint8, got {str(workspace.dtype).removeprefix('torch.')}")


def _check_room(workspace: Tensor, needed: int, device: torch.device) -> None:
    if workspace.numel() < needed:
        raise ValueError(f'workspace: expected shape "bytes" with bytes >= {needed}, got {list(workspace.shape)}')
    if workspace.data_ptr() % 16 or not workspace.is_contiguous():
        raise ValueError("workspace: expected a contiguous tensor that begins at a multiple of 16 bytes")
    if workspace.device != device:
        raise ValueError(f"workspace: expected device {device}, got {workspace.device}")


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the op asked for it; groups of arguments are NamedTuples."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


_recorded: list[Launch] | None = None


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within the block, kernels are not run; the list that this yields says what would have been."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


class Kernel:
    """A kernel as a plan launches it: all but the tensors, and the numbers that change from launch to launch.

    It is the plan of an op that takes one launch and no scratch memory.

    Args:
        jitted: the kernel, whose first arguments are those that each launch brings.
        grid: programs.
        device: of the tensors.
        constants: its other arguments, and options of the compiler, by name.

    Raises:
        TypeError: an argument that is no constant comes after one that is.
    """

    sizes: Sequence[int] = ()

    def __init__(self, jitted: Any, grid: tuple[int, ...], device: torch.device, **constants: Any) -> None:
        self.jitted, self.grid, self.device = jitted, grid, device
        names = jitted.arg_names
        first = len(names) - sum(name in constants for name in names)
        # Triton binds what comes by position in less time than what comes by name.
        missing = [name for name in names[first:] if name not in constants]
        if missing:
            raise TypeError(f"{jitted.__name__}: {', '.join(missing)} come after arguments that are constants")
        self.constants = tuple(constants.pop(name) for name in names[first:])
        # Products and sums are not fused, so that a perturbed score is the sum that the reference rounds.
        self.options = {**constants, "enable_fp_fusion": False}

    def __call__(self, *arguments: Any) -> None:
        """Launch it on its device."""
        if _recorded is not None:
            named = dict(zip(self.jitted.arg_names, (*arguments, *self.constants), strict=True))
            _recorded.append(Launch(self.jitted, self.grid, named | self.options))
        elif self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self.jitted.run(*arguments, *self.constants, grid=self.grid, warmup=False, **self.options)
        else:
            self.jitted.run(*arguments, *self.constants, grid=self.grid, warmup=False, **self.options)
