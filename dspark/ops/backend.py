"""Which implementation an op runs: the Triton kernel or the torch reference."""

from __future__ import annotations

import logging
import os
from typing import Literal, get_args

import torch
from torch import Tensor

from dspark.ops.types import Backend

logger = logging.getLogger(__name__)

TRITON_OPS: frozenset[str] = frozenset(
    {
        "accept",
        "append_kv",
        "commit_kv",
        "copy_pages",
        "draft_tree",
        "draft_walk",
        "draft_walk_certified",
        "process_logits",
        "rope_append_kv",
        "sample",
        "schedule_prefix",
        "truncate",
        "verify_attention",
    }
)
"""Ops that have a Triton kernel."""

_BACKENDS = get_args(Backend)
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once, as Triton does when it decorates a kernel


def resolve(op: str, backend: Backend, tensor: Tensor) -> Literal["reference", "triton"]:
    """The implementation that ``op`` takes for ``tensor``; one debug line of this module's logger names it.

    Args:
        op: name of the public op.
        backend: ``"auto"`` takes the kernel where there is one and ``tensor`` is on a GPU, else the reference.
        tensor: any of the op's tensors; only its device is looked at.

    Raises:
        ValueError: ``backend`` is not one of the three words, or is ``"triton"`` for an op that has no kernel or for a
            tensor that no kernel can take.
    """
    if backend not in _BACKENDS:
        words = ", ".join(repr(word) for word in _BACKENDS)
        raise ValueError(f"backend: expected one of {words}, got {backend!r}")
    if backend == "triton" and op not in TRITON_OPS:
        raise ValueError(f"backend: {op} has no Triton kernel; use 'auto' or 'reference'")
    if backend == "triton" and not tensor.is_cuda and not _INTERPRETED:
        raise ValueError(
            f"backend: the Triton kernels run on a GPU, got tensors on {tensor.device}; to run them in Triton's "
            "interpreter, set TRITON_INTERPRET=1 before dspark is imported"
        )
    use_kernel = backend == "triton" or (backend == "auto" and op in TRITON_OPS and tensor.is_cuda)
    taken: Literal["reference", "triton"] = "triton" if use_kernel else "reference"
    if not torch.compiler.is_compiling():  # a traced graph calls no logger
        logger.debug("%s: %s backend (asked for %s, device %s)", op, taken, backend, tensor.device)
    return taken
