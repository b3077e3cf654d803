"""Calls over rows of logits whose traffic is counted: ``accept``, ``sample``, ``truncate``, ``process_logits``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dspark import ops
from dspark.ops.types import DenseQ, DraftDistribution, PointMass, Rows, Rule, Sampling, SparseQ
from dspark.testing import bounds
from tests.gates.counts import Counted, Made
from tests.ops.helpers import make_sampling

LARGE = 151_936
"""The vocabulary of the stated shapes."""
LIKELY = 14.0
"""What is added to one logit of each row, so that some drafts are accepted in a wide vocabulary too."""

Cut = tuple[int, float, float]
"""Truncation of a request: top-k, top-p, min-p."""
WHOLE: Cut = (0, 1.0, 0.0)
QForm = Literal["dense", "sparse", "point", "mapped"]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows(what: Sequence[int], vocab_size: int, dtype: torch.dtype) -> str:
    return f"rows {'+'.join(map(str, what))}, V {vocab_size}, {_word(dtype)}"


def sampling_of(temperature: Sequence[float], cuts: Sequence[Cut] | None = None) -> Sampling:
    k, p, m = zip(*(cuts or [WHOLE] * len(temperature)), strict=True)
    made = make_sampling(temperature, k, p, m, seed=list(range(len(temperature))))
    return made._replace(any_truncation=cuts is not None)


def _accept(logits: Tensor, rows: Rows, **options: Any) -> partial[Any]:
    return partial(ops.accept, logits, rows, backend="triton", **options)


def _process(logits: Tensor, rows: Rows, processors: ops.Processors) -> partial[Any]:
    return partial(ops.process_logits, logits, rows, processors=processors, backend="triton")


def batch_of(lengths: Sequence[int], tokens: Tensor, max_query_len: int | None = None) -> Rows:
    start, most = torch.tensor([0, *lengths]).cumsum(0), max(lengths) if max_query_len is None else max_query_len
    return Rows(tokens, start, torch.zeros(len(lengths), dtype=torch.int64), most)


def accept(
    rule: Rule, lengths: Sequence[int], vocab_size: int, q: QForm = "dense", *, temperature: float = 1.0,
    dtype: torch.dtype = torch.bfloat16, raw: bool = True, cuts: Sequence[Cut] | None = None,
    accepted: bool | None = None,
) -> Counted:  # fmt: skip
    """``accept`` of chains of random logits; most drafts are what the target finds most likely.

    ``mapped`` is a drafter that knows every second token; ``accepted`` makes sure that all drafts are, or that none is.
    """
    divides = rule in ("ratio", "block")
    words = [rule, q if divides else "", "" if temperature else "greedy", "truncated" if cuts else ""]
    words.append({None: "", True: "accepted", False: "rejected"}[accepted])
    mapped = q == "mapped"

    def make() -> Made:
        generator = torch.Generator().manual_seed(0)
        num_rows, nodes = sum(lengths), max(lengths)
        logits = torch.randn(num_rows, vocab_size, generator=generator)
        likely = torch.randint(vocab_size, (num_rows,), generator=generator) // (1 + mapped) * (1 + mapped)
        sure = {None: 1.0, True: 4.0, False: 1.5 if q == "dense" else 0.5}[accepted]  # and yet no product of p / q is 0
        logits[torch.arange(num_rows), likely] += LIKELY * sure
        rows = batch_of(lengths, (likely.roll(1) + (accepted is False)) % vocab_size)
        place = (rows.query_start[:-1, None] + 1 + torch.arange(nodes - 1)).clamp(max=num_rows - 1)
        given = _draft_scores(q, rows.tokens[place], vocab_size, dtype, generator) if divides else None
        sampling = sampling_of([temperature] * len(lengths), cuts)
        options = {"rule": rule, "logprobs": "raw" if raw else "processed"}
        drafts = sum(max(n - 1, 0) for n in lengths) * divides

        def bound(verdict: ops.Verdict) -> int:
            emitted = verdict.num_emitted.tolist()
            assert accepted is None or emitted == [1 + accepted * (n - 1) for n in lengths]
            residuals = sum(0 < n < length for n, length in zip(emitted, lengths, strict=True))
            again = (drafts if rule == "block" else residuals) * divides * (temperature > 0)
            return bounds.accept(
                num_rows, vocab_size, drafts=drafts, again=again, itemsize=dtype.itemsize,
                q_width={"dense": vocab_size, "mapped": vocab_size // 2}.get(q, 0), q_itemsize=dtype.itemsize,
                mapped=mapped,
            )  # fmt: skip

        return _accept(logits.to(dtype), rows, sampling=sampling, q=given, **options), bound

    note = "" if raw else ", processed"
    return Counted(f"accept {' '.join(filter(None, words))}, {_rows(lengths, vocab_size, dtype)}{note}", make)


def _draft_scores(
    q: QForm, drafts: Tensor, vocab_size: int, dtype: torch.dtype, generator: torch.Generator
) -> DraftDistribution:
    """Random q in which every draft has some probability."""
    if q == "point":
        return PointMass()
    if q == "sparse":
        tokens = (drafts.unsqueeze(2) + torch.arange(32)) % vocab_size
        return SparseQ(tokens, torch.randn(tokens.shape, generator=generator).log_softmax(-1))
    width, ids = vocab_size, None
    if q == "mapped":
        even = torch.arange(vocab_size, dtype=torch.int32)
        width, ids = vocab_size // 2, torch.where(even % 2 == 0, even // 2, -1)
    return DenseQ(torch.randn(*drafts.shape, width, generator=generator).to(dtype), ids)


def accept_tree(
    rule: Rule, parents: Sequence[Sequence[int]], vocab_size: int, *, temperature: float = 1.0, lead: int = 1,
    dtype: torch.dtype = torch.bfloat16, raw: bool = True, weighed: int = 0,
) -> Counted:  # fmt: skip
    """``accept`` of trees, in which the ``lead``-th child of a node is what the target finds most likely.

    Under ``recursive`` what is left of p and q is ``weighed`` so often.
    """
    recursive = rule == "recursive"
    kind = f"{rule} tree{'' if temperature else ' greedy'}{f' {lead}' if recursive else ''}"
    lengths = [len(own) for own in parents]

    def make() -> Made:
        from tests.ops.trees import tree_of  # needs the tests' other helpers, which a list of the calls does not

        requests, nodes, num_rows = len(parents), max(lengths), sum(lengths)
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(num_rows, vocab_size, generator=generator)
        scores = torch.randn(requests, nodes, vocab_size, generator=generator)
        likely = torch.randint(vocab_size, (num_rows,), generator=generator)
        logits[torch.arange(num_rows), likely] += LIKELY
        rows = batch_of(lengths, torch.randint(vocab_size, (num_rows,), generator=generator))
        for first, own in zip(rows.query_start.tolist(), map(list, parents), strict=False):
            for node, parent in enumerate(own):
                if node and own[:node].count(parent) == min(lead, own.count(parent)) - 1:
                    rows.tokens[first + node] = likely[first + parent]
        wide = tree_of([[*own, *([0] * (nodes - len(own)))] if own else [-1] + [0] * (nodes - 1) for own in parents])
        branching = max(list(own).count(node) for own in parents for node in range(len(own)))
        options: dict[str, Any] = {"q": DenseQ(scores), "max_branching": branching} if recursive else {}
        options |= {"rule": rule, "logprobs": "raw" if raw else "processed"}
        run = _accept(logits.to(dtype), rows, sampling=sampling_of([temperature] * requests), tree=wide, **options)
        children = sum(max(n - 1, 0) for n in lengths) * recursive
        return run, lambda _: bounds.accept(
            num_rows, vocab_size, drafts=children, again=weighed, q_width=vocab_size, itemsize=dtype.itemsize,
            q_itemsize=4,
        )  # fmt: skip

    note = "" if raw else ", processed"
    return Counted(f"accept {kind}, {_rows(lengths, vocab_size, dtype)}{note}", make)


def sample(
    op: Literal["sample", "truncate"], words: str, temperature: Sequence[float], vocab_size: int,
    cuts: Sequence[Cut] | None = None, *, request: Sequence[int] | None = None, salt: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Counted:  # fmt: skip
    """``sample`` or ``truncate``; some logits of each row are likely, so that truncation cuts what it would cut."""
    of = list(range(len(temperature))) if request is None else list(request)

    def make() -> Made:
        generator, place = torch.Generator().manual_seed(0), torch.arange(len(of))
        logits = torch.randn(len(of), vocab_size, generator=generator)
        likely = torch.randint(vocab_size, (len(of), 40), generator=generator)
        logits = logits.scatter(1, likely, 12 + torch.randn(len(of), 40, generator=generator)).to(dtype)
        sampling, given = sampling_of(temperature, cuts), None if request is None else torch.tensor(of)
        least = bounds.sample(sum(r >= 0 for r in of), vocab_size, itemsize=dtype.itemsize)
        if op == "truncate":
            return partial(ops.truncate, logits, sampling, given, backend="triton"), lambda _: least
        salts = place if salt else None
        run = partial(ops.sample, logits, sampling, place, request=given, salt=salts, backend="triton")
        return run, lambda _: least

    return Counted(f"{op} {words}, {_rows([len(of)], vocab_size, dtype)}", make)


PROCESSORS = ("repetition", "prompt", "presence", "frequency", "min_new_tokens", "banned", "allowed")


def process(
    words: str, on: Sequence[str], lengths: Sequence[int], vocab_size: int, *, max_query_len: int | None = None,
    unowned: int = 0, dtype: torch.dtype = torch.bfloat16,
) -> Counted:  # fmt: skip
    """``process_logits`` with the processors of ``on``; ``unowned`` rows follow those of the last request."""

    def make() -> Made:
        requests, num_rows = len(lengths), sum(lengths) + unowned
        nodes = max(lengths) if max_query_len is None else max_query_len
        number, generator = torch.full((requests,), 1.25), torch.Generator().manual_seed(0)

        def ids(*shape: int, below: int = vocab_size, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.randint(below, shape, dtype=dtype, generator=generator)

        def if_on(name: str, make_field: Callable[[], Tensor]) -> Tensor | None:
            return make_field() if name in on else None

        counted = any(penalty in on for penalty in ("repetition", "presence", "frequency"))
        processors = ops.Processors(
            output_counts=ids(requests, vocab_size, below=3, dtype=torch.int32) if counted else None,
            prompt_mask=if_on("prompt", lambda: ids(requests, vocab_size, below=2).bool()),
            repetition_penalty=if_on("repetition", lambda: number),
            presence_penalty=if_on("presence", lambda: number),
            frequency_penalty=if_on("frequency", lambda: number),
            min_new_tokens=if_on("min_new_tokens", lambda: torch.full((requests,), 2)),
            num_emitted=if_on("min_new_tokens", lambda: torch.arange(requests)),  # too few of the first requests' rows
            eos_tokens=if_on("min_new_tokens", lambda: ids(requests, 2)),
            banned_tokens=if_on("banned", lambda: ids(requests, 3)),
            allowed_mask=if_on("allowed", lambda: torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32)),
        )
        logits = torch.randn(num_rows, vocab_size, generator=generator).to(dtype)
        return _process(logits, batch_of(lengths, ids(num_rows), nodes), processors), lambda _: bounds.process_logits(
            num_rows, vocab_size, requests=sum(n > 0 for n in lengths), counts=counted,
            prompt="prompt" in on and "repetition" in on, itemsize=dtype.itemsize,
            masked_rows=sum(min(n, nodes) for n in lengths) * ("allowed" in on),
        )  # fmt: skip

    return Counted(f"process_logits {words}, {_rows(lengths, vocab_size, dtype)}", make)


_CUTS = [WHOLE, WHOLE, (20, 0.9, 0.0), (0, 1.0, 0.3)]
_MIXED = [(20, 0.9, 0.0), WHOLE, (5, 1.0, 0.0), (0, 1.0, 0.3)]
_RAGGED = ([3, 0, 1, 2], 5120)  # two tiles, the second one ragged; a padded request and one without drafts
_TREES = [(-1, 0, 0, 1), (), (-1,), (-1, 0, 0, 2, 2)]
_WARM, _OF = [0.8, 1.0, 0.0, 1.5], [3, -1, 0, 2, 1]
_SHARED = ([2, 0, 3, 1], 2100)  # two tiles, the second one ragged
_DIVIDING: tuple[Rule, ...] = ("ratio", "block")  # on a chain, "recursive" is "ratio"
_FORMS: tuple[QForm, ...] = ("dense", "sparse", "point", "mapped")

SMALL = [
    *(accept(rule, *_RAGGED, temperature=t) for rule in ("coupled", "match") for t in (0.0, 1.0)),
    *(accept(rule, *_RAGGED, q) for rule in _DIVIDING for q in _FORMS),
    *(accept(rule, *_RAGGED, temperature=0.0) for rule in _DIVIDING),
    *(accept(rule, [2, 2, 2], 300, dtype=torch.float32, raw=False) for rule in ("coupled", "ratio")),
    accept("coupled", *_RAGGED, dtype=torch.float16, raw=False, cuts=_CUTS),
    *(accept("match", *_RAGGED, temperature=t, cuts=_CUTS) for t in (0.0, 1.0)),
    *(accept("ratio", *_RAGGED, q, cuts=_CUTS) for q in ("dense", "mapped")),
    *(accept("block", *_RAGGED, q, cuts=_CUTS) for q in ("sparse", "point")),
    accept("block", [3, 3], 300, dtype=torch.float32, raw=False, cuts=_CUTS[:1] * 2),
    *(accept_tree("coupled", _TREES, 5120, temperature=t) for t in (0.0, 1.0)),
    accept_tree("match", _TREES, 5120),
    accept_tree("recursive", _TREES, 5120, lead=2, weighed=3),
    accept_tree("recursive", _TREES, 5120, temperature=0.0),
    accept_tree("recursive", [(-1, 0, 0, 0, 1)], 300, dtype=torch.float32, raw=False, lead=3, weighed=2),
    accept_tree("coupled", [(-1, 0, 0)], 300, dtype=torch.float32, raw=False),
    sample("sample", "greedy", [0.0] * 3, 5000),
    sample("sample", "gumbel", [1.0, 0.7, 0.0], 5000),
    sample("sample", "gumbel, request, salt", _WARM, 5000, request=_OF, salt=True),
    sample("sample", "truncated", _WARM, 5000, _MIXED),
    sample("sample", "truncated, request, salt", _WARM, 5000, _MIXED, request=_OF, salt=True),
    sample("truncate", "mixed", _WARM, 5000, _MIXED, dtype=torch.float32),
    sample("truncate", "request", _WARM, 300, _MIXED, request=_OF, dtype=torch.float16),
    process("copy", (), *_SHARED),
    process("repetition and prompt", PROCESSORS[:2], *_SHARED),
    *(process(one, [one], *_SHARED) for one in PROCESSORS if one != "prompt"),
    process("all", PROCESSORS, *_SHARED, max_query_len=2, unowned=2),
    process("all", PROCESSORS, [3], 300, dtype=torch.float32),
]
"""Calls of every kind. Rows end with whole sub-tiles, so that it is the same in which of them a draw ends."""

_NODES = [(-1, 0, 1, 0, 2, 0, 1, 3, 4, 0, 1, 2, 3, 4, 5, 8)]
_LIKELIEST: list[Cut] = [(50, 0.95, 0.0)]
STATED = [
    *(accept(rule, [8], LARGE) for rule in ("coupled", "match")),
    *(accept(rule, [8], LARGE, q) for rule in _DIVIDING for q in _FORMS),
    *(accept(rule, [8], LARGE, cuts=_LIKELIEST) for rule in ("coupled", "ratio")),
    *(accept("match", [8], LARGE, accepted=end) for end in (False, True)),
    *(accept("coupled", [8], 32_768, accepted=end) for end in (False, True)),
    *(
        accept(rule, [8], 32_768, q, accepted=end)
        for rule in _DIVIDING
        for q in ("dense", "point")
        for end in (False, True)
    ),
    *(accept_tree(rule, _NODES, LARGE) for rule in ("coupled", "match", "recursive")),
    sample("sample", "gumbel", [1.0] * 8, LARGE),
    sample("sample", "greedy", [0.0] * 8, LARGE),
    sample("sample", "gumbel, request, salt", [1.0], LARGE, request=[0], salt=True),
    sample("sample", "greedy, request, salt", [0.0], LARGE, request=[0], salt=True),
    sample("sample", "truncated", [1.0] * 2, LARGE, _LIKELIEST * 2),
    sample("truncate", "top-k", [1.0] * 2, LARGE, [(50, 1.0, 0.0)] * 2),
    sample("truncate", "top-p", [1.0] * 2, LARGE, [(0, 0.95, 0.0)] * 2),
    sample("truncate", "min-p", [1.0] * 2, LARGE, [(0, 1.0, 0.05)] * 2),
    process("bans", ("min_new_tokens", "banned"), [8], LARGE),
    process("mask", ("allowed",), [8], LARGE),
    process("penalties", ("frequency", "presence"), [8], LARGE),
    process("all", PROCESSORS, [8], LARGE),
]
"""The shapes that bounds are stated for: one request of 8 rows, or a tree of 16, and a vocabulary of a large model."""
