"""Rows of logits: plain sampling (contract C5), thresholds of truncation, and logits processors.

``sample`` is ``argmax(transform(logits) + gumbel)``, a draw from ``softmax(transform(logits))`` whose noise has the
address (seed, position, stream, token) and depends on nothing else; ``transform`` is temperature, top-k, top-p and
min-p, see :mod:`dspark.ops.sample.reference`.

Logits processors are functions of the emitted prefix, row by row. Row ``i`` of a request gives the token after its
anchor and ``i`` drafts, and is only used when all of these were accepted. So it is processed as plain decoding would
after having emitted exactly them: what was committed before, plus ``i`` drafts. Later drafts, the other requests and
the number of rounds so far have no part in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.call import FLOATS, GroupArg, ScalarArg, Signature, TensorArg
from dspark.ops.groups import ROWS, SAMPLING
from dspark.ops.op import Op
from dspark.ops.sample import launch, process_launch, process_reference, reference
from dspark.ops.types import Backend, Processors, Rows, Sampling, Stream


def _check_requests(sizes: dict[str, int], logits: Tensor, request: Tensor | None, **_: object) -> None:
    if request is None and sizes["T"] != sizes["R"]:
        raise ValueError(f'logits: expected shape "R V" with R = {sizes["R"]}, got {list(logits.shape)}')


_NEEDS = {
    "repetition_penalty": ("output_counts",),
    "presence_penalty": ("output_counts",),
    "frequency_penalty": ("output_counts",),
    "min_new_tokens": ("num_emitted", "eos_tokens"),
}


def _check_processors(sizes: dict[str, int], processors: Processors, **_: object) -> None:
    for field, others in _NEEDS.items():
        for other in others:
            if getattr(processors, field) is not None and getattr(processors, other) is None:
                raise ValueError(f"processors.{other}: {field} needs it, got None")
    mask, words = processors.allowed_mask, -(-sizes["V"] // 32)
    if mask is not None and mask.shape[1] != words:
        raise ValueError(f'processors.allowed_mask: expected shape "T W" with W = {words}, got {list(mask.shape)}')


def _vector(shape: str, dtype: torch.dtype = torch.int64) -> TensorArg:
    return TensorArg(shape, (dtype,), optional=True, layout="dense")


def _table(shape: str, dtype: torch.dtype) -> TensorArg:
    return TensorArg(shape, (dtype,), optional=True, layout="rows")


_LOGITS = TensorArg("T V", FLOATS, layout="rows")

_SAMPLE = Op(
    "sample",
    {
        "logits": _LOGITS,
        "sampling": SAMPLING,
        "position": TensorArg("T", (torch.int64,), layout="dense"),
        "request": _vector("T"),
        "stream": ScalarArg("SymInt", least=min(Stream), most=max(Stream)),
        "salt": _vector("T"),
        "out": TensorArg("T", (torch.int64,), optional=True, written=True, layout="contiguous"),
    },
    reference=reference.sample,
    plan=launch.plan_sample,
    run=launch.run_sample,
    results=["out"],
    also=_check_requests,
    empty="T",
    workspace=True,
)
_TRUNCATE = Op(
    "truncate",
    {
        "logits": _LOGITS,
        "sampling": SAMPLING,
        "request": _vector("T"),
        "out": TensorArg("T", (torch.float32,), optional=True, written=True, layout="contiguous"),
    },
    reference=reference.truncate,
    plan=launch.plan_truncate,
    run=launch.run_truncate,
    results=["out"],
    also=_check_requests,
    empty="T",
    workspace=True,
)
_PROCESS_LOGITS = Op(
    "process_logits",
    {
        "logits": _LOGITS,
        "rows": ROWS,
        "processors": GroupArg(
            {
                Processors: {
                    "output_counts": _table("R V", torch.int32),
                    "prompt_mask": _table("R V", torch.bool),
                    "repetition_penalty": _vector("R", torch.float32),
                    "presence_penalty": _vector("R", torch.float32),
                    "frequency_penalty": _vector("R", torch.float32),
                    "min_new_tokens": _vector("R"),
                    "num_emitted": _vector("R"),
                    "eos_tokens": _table("R E", torch.int64),
                    "banned_tokens": _table("R K", torch.int64),
                    "allowed_mask": _table("T W", torch.int32),
                }
            }
        ),
        "out": TensorArg("T V", (torch.float32,), optional=True, written=True, layout="rows"),
    },
    reference=process_reference.process_logits,
    plan=process_launch.plan_process,
    run=process_launch.run_process,
    results=["out"],
    also=_check_processors,
    empty="T V",
)
_COUNTED = Signature(
    {
        "output_counts": TensorArg("R V", (torch.int32,), written=True),
        "tokens": TensorArg("R N", (torch.int64,)),
        "num": TensorArg("R", (torch.int64,)),
    }
)


def sample(
    logits: Tensor,
    sampling: Sampling,
    position: Tensor,
    *,
    request: Tensor | None = None,
    stream: Stream = Stream.TARGET,
    salt: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Draw one token per row.

    Args:
        logits: ``[T, V]`` float32, float16 or bfloat16.
        sampling: parameters of ``R`` requests. With ``all_greedy`` no noise is computed.
        position: ``[T]`` int64, absolute position of the token being drawn.
        request: ``[T]`` int64, each row's request; negative (-1) is a padded row. None: row ``t`` is request ``t``.
        stream: what the noise is for.
        salt: ``[T]`` int64 or None, see :mod:`dspark.ops.philox`.
        out: ``[T]`` int64 that the tokens are written to.
        workspace: ``[bytes]`` uint8, scratch memory of the kernels, :func:`sample_workspace` bytes or more; None takes
            some from the allocator. The reference needs none.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``[T]`` int64 tokens. -1 for a padded row and for a bad one: NaN, +inf or nothing but -inf after the product
        with ``1 / temperature``. At temperature 0 it is the first largest logit.

    Raises:
        TypeError, ValueError: an argument has another dtype or shape, or a layout that the kernels cannot read.

    Graph-safe; row ``t`` depends on row ``t``'s inputs only.
    """
    result: Tensor = _SAMPLE(
        backend, logits, sampling, position, request, int(stream), salt, out, workspace=workspace
    )  # fmt: skip
    return result


def sample_workspace(num_rows: int, vocab_size: int) -> int:
    """Bytes of ``workspace`` that :func:`sample` and :func:`truncate` take for so many rows."""
    return launch.workspace_bytes(num_rows, vocab_size)


def truncate(
    logits: Tensor,
    sampling: Sampling,
    request: Tensor | None = None,
    *,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Per-row thresholds of top-k, top-p and min-p together.

    Args:
        logits, sampling, request, workspace, backend: as for :func:`sample`.
        out: ``[T]`` float32 that the thresholds are written to.

    Returns:
        ``[T]`` float32: a token is kept when ``logits * (1 / temperature) >= threshold``; -inf keeps all. The largest
        score is always kept. Rows at temperature 0 are not truncated (-inf). What a padded or a bad row gets means
        nothing.

    Raises:
        TypeError, ValueError: as for :func:`sample`.

    Graph-safe; row ``t`` depends on row ``t``'s inputs only.
    """
    result: Tensor = _TRUNCATE(backend, logits, sampling, request, out, workspace=workspace)
    return result


def process_logits(
    logits: Tensor,
    rows: Rows,
    *,
    processors: Processors,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Apply penalties, bans and masks to the target's logits of a verify batch, before ``accept``.

    Of token ``v`` in row ``i`` of a request, with ``c`` = how often ``v`` was emitted, the ``i`` drafts before the row
    included, in this order:

    1. repetition: ``x < 0 ? x * penalty : x / penalty`` where ``c > 0`` or ``v`` is in the prompt
       (``RepetitionPenaltyLogitsProcessor`` of transformers);
    2. frequency: ``x - frequency * c``; presence: ``x - presence`` where ``c > 0`` (OpenAI's API reference; vLLM);
    3. -inf where ``v`` is an end token and fewer than ``min_new_tokens`` tokens are emitted, where it is banned, and
       where the row's mask does not allow it.

    Args:
        logits: ``[T, V]`` float32, float16 or bfloat16, the target's logits at each row.
        rows: of the batch. An anchor is part of its request's state and is not counted again, nor is an id outside
            ``[0, V)``, such as -1. Rows of a request past its first ``max_query_len`` are no request's.
        processors: what to apply, see :class:`Processors`.
        out: ``[T, V]`` float32 for the result. It may be ``logits`` itself when that is float32, and must not
            overlap another tensor.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``[T, V]`` float32, whatever the dtype of the logits: penalised scores rounded to 16 bits would tie where they
        did not, and the draw would depend on it. A row that belongs to no request (past ``query_start[R]``, or past its
        request's first ``N``) is its logits, unchanged. NaN and infinities pass through the penalties, so that
        ``accept`` sees them; -inf is written over whatever stood there, NaN and +inf included. A row of which nothing
        is allowed is all -inf, and ``accept`` answers ``Status.BAD_LOGITS``.

    Raises:
        TypeError: an argument has another dtype, or is not a tensor.
        ValueError: an argument has another shape, the kernel is to read a last axis that is not contiguous,
            ``max_query_len`` is below 1, a field of ``processors`` lacks another that it needs, or the backend is not
            at hand.

    Computed in float32. Graph-safe; a row depends on the inputs of its own request and its own mask only.
    """
    result: Tensor = _PROCESS_LOGITS(backend, logits, rows, processors, out)
    return result


def count_tokens(output_counts: Tensor, tokens: Tensor, num: Tensor) -> None:
    """Count emitted tokens, in place.

    Args:
        output_counts: ``[R, V]`` int32, added to.
        tokens: ``[R, N]`` int64, as in :class:`Verdict`. An id outside ``[0, V)``, such as -1, is not counted.
        num: ``[R]`` int64, how many leading tokens of each request were emitted.

    Raises:
        TypeError, ValueError: an argument has another dtype or shape.

    Graph-safe.

    >>> counts = torch.zeros(1, 4, dtype=torch.int32)
    >>> count_tokens(counts, torch.tensor([[2, 2, 3]]), torch.tensor([2]))
    >>> counts.tolist()
    [[0, 0, 2, 0]]
    """
    _COUNTED.check((output_counts, tokens, num))
    process_reference.count_tokens(output_counts, tokens, num)
