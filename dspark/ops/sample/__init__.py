"""Plain sampling: temperature, top-k, top-p, min-p (contract C5), then one token per row.

``sample`` is ``argmax(transform(logits) + gumbel)``, a draw from ``softmax(transform(logits))`` whose noise has the
address (seed, position, stream, token) and depends on nothing else.

Truncation is one threshold per row: a token is kept when its scaled score reaches it. So *tokens that tie with the last
kept token are all kept*, and the support never depends on the order of a sort. For top-k and min-p that is the rule of
transformers' warpers too; for top-p they keep whichever of the tied tokens their sort happens to put last.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.backend import resolve
from dspark.ops.checks import FLOAT_DTYPES, check_dtype, check_sampling, check_shape, fits, sampling_fits
from dspark.ops.launch import check_devices, contiguous, contiguous_sampling
from dspark.ops.library import rows as library
from dspark.ops.philox import gumbel
from dspark.ops.types import Backend, Sampling, Stream


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
    _check_rows(logits, sampling, request, position=position, salt=salt)
    _check_out(out, logits, torch.int64, workspace)
    taken = resolve("sample", backend, logits)
    if torch.compiler.is_compiling():
        out = position.new_empty(logits.shape[:1]) if out is None else out
        library.sample_op(logits, sampling, position, request, stream, salt, out, workspace, taken)
        return out
    if taken == "reference":
        return _into(out, sample_reference(logits, sampling, position, request, stream, salt))
    from dspark.ops.launch import check_contiguous, check_unit_stride, scratch
    from dspark.ops.sample.launch import plan_sample, run_sample

    check_unit_stride("logits", logits)
    if out is not None:
        check_contiguous("out", out)
    out = position.new_empty(logits.shape[:1]) if out is None else out
    check_devices(logits.device, position=position, request=request, salt=salt, seed=sampling.seed)
    request, salt = (None if t is None else contiguous(t) for t in (request, salt))
    given = logits, contiguous_sampling(sampling), contiguous(position), request, stream, salt, out
    plan = plan_sample({"T": logits.shape[0]}, *given)
    regions = scratch(plan.sizes, logits.device, workspace)
    if logits.shape[0]:
        run_sample(plan, regions, *given)
    return out


def sample_workspace(num_rows: int, vocab_size: int) -> int:
    """Bytes of ``workspace`` that :func:`sample` and :func:`truncate` take for so many rows."""
    from dspark.ops.sample.launch import workspace_bytes

    return workspace_bytes(num_rows, vocab_size)


def sample_reference(
    logits: Tensor, sampling: Sampling, position: Tensor, request: Tensor | None, stream: Stream, salt: Tensor | None
) -> Tensor:
    """The torch reference of :func:`sample`; arguments, checked before, and result as there."""
    if sampling.all_greedy:
        tokens = perturbed_argmax(_scale(logits, sampling, request)[0])
    else:
        seed = _per_row(sampling.seed, request).squeeze(-1)
        noise = gumbel(seed, position, logits.shape[-1], stream, salt=salt)
        tokens = perturbed_argmax(transform(logits, sampling, request), noise)
    return tokens if request is None else torch.where(request < 0, -1, tokens)


def transform(logits: Tensor, sampling: Sampling, request: Tensor | None = None) -> Tensor:
    """The scores that are sampled from: ``softmax`` of them is p (or q, for a drafter's logits).

    Args:
        logits: ``[T, V]`` of any float dtype.
        sampling: parameters of ``R`` requests.
        request: ``[T]`` int64, each row's request (a padded row's result means nothing); None: row ``t`` is request
            ``t``.

    Returns:
        ``[T, V]`` float32: ``logits * (1 / temperature)`` with cut tokens -inf. A row at temperature 0 is -inf but for
        a 0 at its first largest logit. A bad row stays bad: its largest score is not finite, and its softmax is NaN.

    Graph-safe.
    """
    scaled, sampled = _scale(logits, sampling, request)
    if sampling.any_truncation and not sampling.all_greedy:
        scaled = scaled.masked_fill(scaled < _threshold(scaled, sampled, sampling, request), -torch.inf)
    # The host does not know which rows are greedy, so every row gets both forms.
    best = scaled.argmax(-1, keepdim=True)  # [T, 1]
    top = scaled.gather(-1, best)
    # top - top is 0, or NaN where the row is bad.
    one_hot = torch.full_like(scaled, -torch.inf).scatter_(-1, best, top - top)
    return one_hot if sampling.all_greedy else torch.where(sampled, scaled, one_hot)


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
    _check_rows(logits, sampling, request)
    _check_out(out, logits, torch.float32, workspace)
    taken = resolve("truncate", backend, logits)
    if torch.compiler.is_compiling():
        out = logits.new_empty(logits.shape[:1], dtype=torch.float32) if out is None else out
        library.truncate_op(logits, sampling, request, out, workspace, taken)
        return out
    if taken == "reference":
        return _into(out, truncate_reference(logits, sampling, request))
    from dspark.ops.launch import check_contiguous, check_unit_stride, scratch
    from dspark.ops.sample.launch import plan_truncate, run_truncate

    check_unit_stride("logits", logits)
    if out is not None:
        check_contiguous("out", out)
    out = logits.new_empty(logits.shape[:1], dtype=torch.float32) if out is None else out
    check_devices(logits.device, request=request, seed=sampling.seed)
    request = None if request is None else contiguous(request)
    given = logits, contiguous_sampling(sampling), request, out
    plan = plan_truncate({"T": logits.shape[0]}, *given)
    if logits.shape[0]:
        run_truncate(plan, scratch(plan.sizes, logits.device, workspace), *given)
    return out


def truncate_reference(logits: Tensor, sampling: Sampling, request: Tensor | None) -> Tensor:
    """The torch reference of :func:`truncate`; arguments, checked before, and result as there."""
    scaled, sampled = _scale(logits, sampling, request)
    if sampling.all_greedy or not sampling.any_truncation:
        return scaled.new_full(scaled.shape[:1], -torch.inf)
    return _threshold(scaled, sampled, sampling, request).squeeze(-1)


def perturbed_argmax(scores: Tensor, noise: Tensor | None = None) -> Tensor:
    """First index of the largest ``scores + noise``, or -1 where that is not finite (a bad row).

    Args:
        scores: ``[..., V]`` float32.
        noise: ``[..., V]`` float32, finite; None is no noise.

    Returns:
        ``[...]`` int64.

    Graph-safe.
    """
    perturbed = scores if noise is None else scores + noise
    best = perturbed.argmax(-1, keepdim=True)  # a NaN counts as the largest
    return torch.where(perturbed.gather(-1, best).isfinite(), best, -1).squeeze(-1)


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """Draw by inverse transform: the first token whose cumulative probability exceeds ``u``.

    Args:
        probs: ``[..., V]`` float64, non-negative; the sum need not be 1.
        u: ``[...]`` float64 in (0, 1).

    Returns:
        ``[...]`` int64, a token of positive probability; -1 where ``probs`` holds NaN or nothing positive.

    Graph-safe.
    """
    return _first_beyond(probs, probs.cumsum(-1), u)


def _first_beyond(probs: Tensor, cumulative: Tensor, u: Tensor) -> Tensor:
    """The search of :func:`inverse_cdf` in a given running sum, which a parallel scan may leave slightly unordered."""
    total = cumulative[..., -1:]
    positive = probs > 0
    beyond = (cumulative > u.unsqueeze(-1) * total) & positive
    last = torch.where(positive, torch.arange(probs.shape[-1], device=probs.device), -1).amax(-1)
    token = torch.where(beyond.any(-1), beyond.int().argmax(-1), last)
    return torch.where(total.squeeze(-1) > 0, token, -1)


def _per_row(values: Tensor, request: Tensor | None) -> Tensor:
    """``[R]`` parameters -> ``[T, 1]``, one per row; a padded row takes request 0's."""
    return (values if request is None else values[request.clamp(min=0)]).unsqueeze(-1)


def _scale(logits: Tensor, sampling: Sampling, request: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores ``[T, V]`` times 1 / temperature (times 1 in greedy rows), and which rows are sampled ``[T, 1]``.

    One division per row; each score is rounded once more.
    """
    temperature = _per_row(sampling.temperature, request)
    sampled = temperature > 0
    return logits.float() * torch.where(sampled, temperature, 1.0).reciprocal(), sampled


def _threshold(scaled: Tensor, sampled: Tensor, sampling: Sampling, request: Tensor | None) -> Tensor:
    """Thresholds ``[T, 1]`` of sampled rows, -inf in the others."""
    vocab_size = scaled.shape[-1]
    top_k, top_p, min_p = (_per_row(v, request) for v in (sampling.top_k, sampling.top_p, sampling.min_p))
    descending = scaled.sort(-1, descending=True).values  # [T, V]

    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size) - 1
    kept = descending >= descending.gather(-1, last)
    # top-p over what top-k left: a token is kept while the mass of the tokens before it is below top_p.
    mass = descending.masked_fill(~kept, -torch.inf).softmax(-1).cumsum(-1)
    kept &= (F.pad(mass[..., :-1], (1, 0)) < top_p) | (top_p >= 1)
    count = kept.sum(-1, keepdim=True).clamp(min=1)
    threshold = torch.where(count < vocab_size, descending.gather(-1, count - 1), -torch.inf)

    # min-p compares with the largest probability, and that ratio does not depend on what was cut before.
    top = descending[..., :1]
    threshold = torch.maximum(threshold, top + min_p.log()).minimum(top)
    return torch.where(sampled, threshold, -torch.inf)


def _check_rows(logits: Tensor, sampling: Sampling, request: Tensor | None, **per_row: Tensor | None) -> None:
    """Check what ``sample`` and ``truncate`` share, and more tensors ``[T]`` int64 by name."""
    per_row["request"] = request
    given = {name: tensor for name, tensor in per_row.items() if tensor is not None}
    if (
        isinstance(logits, Tensor)
        and logits.ndim == 2
        and logits.dtype in FLOAT_DTYPES
        and (request is not None or sampling.seed.shape == logits.shape[:1])
        and sampling_fits(sampling, sampling.seed.shape[:1])
        and all(fits(tensor, logits.shape[:1], torch.int64) for tensor in given.values())
    ):
        return
    sizes: dict[str, int] = {}
    check_shape("logits", logits, "T V", sizes)
    check_dtype("logits", logits, FLOAT_DTYPES)
    check_sampling(sampling, sizes)
    for name, tensor in given.items():
        check_shape(name, tensor, "T", sizes)
        check_dtype(name, tensor, (torch.int64,))
    if request is None:
        check_shape("logits", logits, "R V", sizes)


def _check_out(out: Tensor | None, logits: Tensor, dtype: torch.dtype, workspace: Tensor | None) -> None:
    sizes = {"T": logits.shape[0]}
    for name, tensor, shape, wanted in (("out", out, "T", dtype), ("workspace", workspace, "bytes", torch.uint8)):
        if tensor is not None:
            check_shape(name, tensor, shape, sizes)
            check_dtype(name, tensor, (wanted,))


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)
