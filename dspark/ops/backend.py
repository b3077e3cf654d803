"""Which implementation an op runs: the Triton kernel or the torch reference."""

from __future__ import annotations

import logging
from typing import Literal, get_args

from torch import Tensor

from dspark.ops.types import Backend

logger = logging.getLogger(__name__)

TRITON_OPS: frozenset[str] = frozenset()
"""Ops that have a Triton kernel."""


def resolve(op: str, backend: Backend, tensor: Tensor) -> Literal["reference", "triton"]:
    """The implementation that ``op`` takes for ``tensor``; one debug line of this module's logger names it.

    Args:
        op: name of the public op.
        backend: ``"auto"`` takes the kernel where there is one and ``tensor`` is on a GPU, else the reference.
        tensor: any of the op's tensors; only its device is looked at.

    Raises:
        ValueError: ``backend`` is not one of the three words, or is ``"triton"`` for an op that has no kernel.
    """
    if backend not in get_args(Backend):
        words = ", ".join(repr(word) for word in get_args(Backend))
        raise ValueError(f"backend: expected one of {words}, got {backend!r}")
    if backend == "triton" and op not in TRITON_OPS:
        raise ValueError(f"backend: {op} has no Triton kernel; use 'auto' or 'reference'")
    use_kernel = backend == "triton" or (backend == "auto" and op in TRITON_OPS and tensor.is_cuda)
    taken: Literal["reference", "triton"] = "triton" if use_kernel else "reference"
    logger.debug("%s: %s backend (asked for %s, device %s)", op, taken, backend, tensor.device)
    return taken
