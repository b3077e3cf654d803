"""What any implementation of an op must move: lower bounds of the bytes read and written.

One function per op, under the op's name. Counted once is every number that the op's definition (its reference in
``dspark.ops``) needs and every one that it returns in bulk; indices, parameters of a request and results of a few bytes
are left out where they are below a thousandth. What a kernel reads twice, or keeps in memory between two launches, is
its own affair and no part of a bound: the committed table of counts, ``tests/gates/traffic.json``, has both side by
side. An ``itemsize`` is bytes per number, of the logits or rows where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Sequence


def accept(
    rows: int, vocab_size: int, *, drafts: int = 0, again: int = 0, q_width: int = 0, mapped: bool = False,
    itemsize: int = 2, q_itemsize: int = 2,
) -> int:  # fmt: skip
    """``accept``: each target row once; under a rule that divides by q, each row of q, and both of a residual again.

    A residual ``(p - q)+`` needs the normalisers of p and q, and so a second look at rows that no chip holds (Leviathan
    et al., arXiv 2211.17192; under "block" Sun et al., arXiv 2403.10444; under "recursive" SpecInfer, arXiv
    2305.09781). "coupled" and "match" need the rows alone, and truncation, which one look at a row that a chip holds
    could decide, adds nothing. All rows count, as they are judged side by side.

    Args:
        rows: verified rows, anchors included.
        vocab_size: ``V``.
        drafts: drafted rows that have a row of q; 0 under "coupled" and "match".
        again: residuals that are weighed. "ratio": requests that end in one; "block": drafted rows, up to one whose
            draft has no chance; "recursive": each rejection of a child after which more follows from that node.
        q_width: scores in a row of q; 0 where it is sparse or a point mass.
        mapped: whether q is over a vocabulary of its own, whose map a residual reads.
        itemsize, q_itemsize: bytes per logit and per score.

    >>> accept(8, 151_936), accept(8, 151_936, drafts=7, again=1, q_width=151_936)
    (2430976, 5165824)
    """
    target, q = vocab_size * itemsize, q_width * q_itemsize
    return rows * target + drafts * q + again * (target + q) + 4 * vocab_size * (mapped and again > 0)


def sample(rows: int, vocab_size: int, *, itemsize: int = 2) -> int:
    """``sample`` and ``truncate``: each row's logits once (Gumbel-max: one number per logit, none of them stored).

    Truncation, too, could be decided from one reading of a row that a chip can hold.

    >>> sample(8, 151_936)
    2430976
    """
    return rows * vocab_size * itemsize


truncate = sample


def process_logits(
    rows: int, vocab_size: int, *, requests: int = 0, counts: bool = False, prompt: bool = False,
    masked_rows: int = 0, itemsize: int = 2,
) -> int:  # fmt: skip
    """``process_logits``: logits in and float32 out, a request's counts and prompt mask, a bit per token of a mask.

    Args:
        rows, vocab_size: ``T`` and ``V``.
        requests: those that have rows.
        counts: whether a penalty is on, so that int32 counts are read (Keskar et al., arXiv 1909.05858, section 4.1).
        prompt: whether the repetition penalty has a prompt mask, one byte per token.
        masked_rows: rows that have a mask, of 32-bit words.
        itemsize: bytes per logit.

    >>> process_logits(8, 151_936), process_logits(8, 151_936, requests=1, counts=True)
    (7292928, 7900672)
    """
    by_request = requests * vocab_size * (4 * counts + prompt)
    return rows * vocab_size * (itemsize + 4) + by_request + masked_rows * 4 * -(-vocab_size // 32)


def draft_walk(
    requests: int, draft_len: int, vocab_size: int, rank: int, *, itemsize: int = 2, weight_itemsize: int = 2,
    logits_itemsize: int = 0,
) -> int:  # fmt: skip
    """``draft_walk``: W2 once per step, as a step needs the token of the one before (eq. 5), and each base logit.

    Args:
        requests, draft_len, vocab_size, rank: ``R``, ``G``, ``V`` and ``r``, 0 without a head.
        itemsize, weight_itemsize: bytes per base logit and per weight.
        logits_itemsize: bytes per returned score, 0: none are.

    >>> draft_walk(1, 7, 151_936, 256)
    546665728
    """
    return draft_len * vocab_size * (rank * weight_itemsize + requests * (itemsize + logits_itemsize))


def draft_walk_certified(requests: int, draft_len: int, vocab_size: int, *, itemsize: int = 2) -> int:
    """``draft_walk_certified`` where every step is certified: each base logit once; W2 only where candidates are.

    >>> draft_walk_certified(1, 7, 151_936)
    2127104
    """
    return requests * draft_len * vocab_size * itemsize


def draft_tree(
    requests: int, draft_len: int, vocab_size: int, rank: int, *, score_rows: int = 0, itemsize: int = 2,
    weight_itemsize: int = 2,
) -> int:  # fmt: skip
    """``draft_tree``: W2 and each base logit once per level, and the float32 scores of ``score_rows`` rows.

    Nodes of a level share its base logits, so they count once however many there are. "recursive" returns the scores of
    ``R * N`` rows, since they are its q (contract C2); the other rules none.

    >>> draft_tree(1, 2, 151_936, 256)
    156190208
    """
    walked = draft_walk(requests, draft_len, vocab_size, rank, itemsize=itemsize, weight_itemsize=weight_itemsize)
    return walked + 4 * score_rows * vocab_size


def verify_attention(
    keys: int, rows: int, *, num_heads: int, kv_heads: int, head_dim: int, itemsize: int = 2, kv_itemsize: int = 2,
    lse: bool = False,
) -> int:  # fmt: skip
    """``verify_attention``: keys and values of each request once, whatever its rows; the queries; the results.

    A softmax can be merged from parts (Milakov and Gimelshein, arXiv 1805.02867), so no key is needed twice.

    Args:
        keys: tokens that are attended to, over all requests that have rows: their contexts and their own rows.
        rows: query rows.
        num_heads, kv_heads, head_dim: ``Hq``, ``Hkv`` and ``D``.
        itemsize, kv_itemsize: bytes per number of the queries and of the cache.
        lse: whether the float32 log-sum-exps are returned.

    >>> verify_attention(8193, 1, num_heads=32, kv_heads=8, head_dim=128)
    33574912
    """
    return keys * 2 * kv_heads * head_dim * kv_itemsize + rows * num_heads * (2 * head_dim * itemsize + 4 * lse)


def append_kv(

    rows: int, written: int, *, heads: int, head_dim: int, itemsize: int = 2, kv_itemsize: int = 2, scaled: bool = False
) -> int:  # fmt: skip
    """``append_kv``: every slot, and of the rows that have one keys and values in and out; float8 scales.

    >>> append_kv(64, 64, heads=8, head_dim=128)
    524800
    """
    return 8 * rows + 2 * written * heads * head_dim * (itemsize + kv_itemsize) + 8 * heads * scaled


def rope_append_kv(
    rows: int, written: int, *, query_heads: int, heads: int, head_dim: int, norms: int = 2, itemsize: int = 2,
    kv_itemsize: int = 2, scaled: bool = False,
) -> int:  # fmt: skip
    """``rope_append_kv``: ``append_kv``, the queries in and out, two angles per row, the norms' weights once.

    Source: rotary positions (Su et al., arXiv 2104.09864), an angle's sine and cosine for each number of a head;
    ``norms`` is how many of the queries' and the keys' norm there are.

    >>> rope_append_kv(64, 64, query_heads=32, heads=8, head_dim=128)
    1606656
    """
    stored = append_kv(
        rows, written, heads=heads, head_dim=head_dim, itemsize=itemsize, kv_itemsize=kv_itemsize, scaled=scaled
    )
    return stored + 2 * rows * (query_heads + 1) * head_dim * itemsize + norms * head_dim * itemsize


def commit_kv(
    paths: Sequence[Sequence[int]], *, heads: int, head_dim: int, layers: int = 1, kv_itemsize: int = 2
) -> int:  # fmt: skip
    """``commit_kv``: each accepted path; of the rows that it moves the two slots, and keys and values in and out.

    ``paths`` has the accepted nodes of each request, () for a padded one. Node ``i`` at place ``i`` stays where it is,
    so that a chain moves nothing.

    >>> commit_kv([range(8)], heads=8, head_dim=128), commit_kv([[0, 2]], heads=8, head_dim=128)
    (72, 8248)
    """
    moved = [sum(node > i for i, node in enumerate(path)) for path in paths]
    indices = sum(8 + 8 * len(path) + (16 + 16 * rows) * (rows > 0) for path, rows in zip(paths, moved, strict=True))
    return indices + sum(moved) * 4 * heads * head_dim * kv_itemsize * layers


def copy_pages(pages: int, page_size: int, *, heads: int, head_dim: int, layers: int = 1, kv_itemsize: int = 2) -> int:
    """``copy_pages``: of each page its two numbers, and keys and values of every layer in and out.

    >>> copy_pages(1, 16, heads=8, head_dim=128)
    131088
    """
    return pages * (16 + 4 * page_size * heads * head_dim * kv_itemsize * layers)


def schedule_prefix(
    requests: int, draft_len: int, *, entries: int | None = None, by_request: int = 0, itemsize: int = 4,
    speed_itemsize: int = 8,
) -> int:  # fmt: skip
    """``schedule_prefix``: each confidence, weight and limit, what the search may reach of the curve, the lengths.

    The search of the paper's Algorithm 1 may end after any number of drafts, so it may need every entry of the curve
    from the floors on; a budget is one number instead.

    Args:
        requests, draft_len: ``R`` and ``G``.
        entries: of the curve; None: all of ``R * G + 1``; 0 under a budget.
        by_request: bytes of caps, floors and weights of one request.
        itemsize, speed_itemsize: bytes per confidence and per entry of the curve.

    >>> schedule_prefix(64, 7), schedule_prefix(64, 7, entries=0)
    (5896, 2312)
    """
    entries = requests * draft_len + 1 if entries is None else entries
    curve = entries * speed_itemsize if entries else 8
    return requests * (draft_len * itemsize + by_request + 8) + curve
