"""Calls of ``process_logits`` whose traffic is counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.ops.cost import Cost, ProcessCall, process_cost
from dspark.ops.sample import process_logits
from dspark.ops.types import Processors, Rows
from tests.gates.traffic.case import Case

EOS, BANNED = 2, 3
PROCESSORS = ("repetition", "prompt", "presence", "frequency", "min_new_tokens", "banned", "allowed")


def process_case(
    on: Sequence[str],
    lengths: Sequence[int],
    vocab_size: int,
    *,
    max_query_len: int | None = None,
    unowned: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    name: str | None = None,
) -> Case:
    """A call on random logits with the processors of ``on``."""
    requests, num_rows = len(lengths), sum(lengths) + unowned
    nodes = max(lengths) if max_query_len is None else max_query_len
    emitted, minimum = torch.arange(requests), 2  # so the first rows of the first requests are too short
    number, generator = torch.full((requests,), 1.25), torch.Generator().manual_seed(0)

    def ids(*shape: int, below: int = vocab_size, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(below, shape, dtype=dtype, generator=generator)

    counted = any(penalty in on for penalty in ("repetition", "presence", "frequency"))
    short = "min_new_tokens" in on
    processors = Processors(
        output_counts=ids(requests, vocab_size, below=3, dtype=torch.int32) if counted else None,
        prompt_mask=ids(requests, vocab_size, below=2).bool() if "prompt" in on else None,
        repetition_penalty=number if "repetition" in on else None,
        presence_penalty=number if "presence" in on else None,
        frequency_penalty=number if "frequency" in on else None,
        min_new_tokens=torch.full((requests,), minimum) if short else None,
        num_emitted=emitted if short else None,
        eos_tokens=ids(requests, EOS) if short else None,
        banned_tokens=ids(requests, BANNED) if "banned" in on else None,
        allowed_mask=torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32) if "allowed" in on else None,
    )
    logits = torch.randn(num_rows, vocab_size, generator=generator).to(dtype)
    tokens = ids(num_rows)
    rows = Rows(tokens, torch.tensor([0, *lengths]).cumsum(0), torch.zeros(requests, dtype=torch.int64), nodes)

    def run() -> Cost:
        process_logits(logits, rows, processors=processors, backend="triton")
        return process_cost(
            ProcessCall(
                lengths,
                vocab_size,
                itemsize=dtype.itemsize,
                max_query_len=max_query_len,
                unowned=unowned,
                repetition="repetition" in on,
                prompt="prompt" in on,
                presence="presence" in on,
                frequency="frequency" in on,
                allowed="allowed" in on,
                eos=EOS if short else 0,
                too_short=sum(r + i < minimum for r, n in enumerate(lengths) for i in range(min(n, nodes))) * short,
                banned=BANNED if "banned" in on else 0,
            )
        )

    shape = f"rows {'+'.join(map(str, lengths))}, V {vocab_size}, {str(dtype).removeprefix('torch.')}"
    return Case("process", shape, name or "+".join(on) or "copy", run)


def stated_cases() -> list[Case]:
    """The shapes that bounds are stated for: one request, 7 drafts, a vocabulary of 151,936 in bfloat16."""
    lengths, vocab_size = [8], 151_936
    return [
        process_case(("min_new_tokens", "banned"), lengths, vocab_size, name="bans"),
        process_case(("allowed",), lengths, vocab_size, name="mask"),
        process_case(("frequency", "presence"), lengths, vocab_size, name="penalties"),
        process_case(PROCESSORS, lengths, vocab_size, name="all"),
    ]


def cases() -> list[Case]:
    """Small calls: no processor, each alone, all; padded requests, rows past the last one's and past ``N``."""
    lengths, vocab_size = [2, 0, 3, 1], 2100  # two tiles, the second one ragged
    alone = [("repetition",), ("repetition", "prompt"), ("presence",), ("frequency",), *((p,) for p in PROCESSORS[4:])]
    return [
        *(process_case(on, lengths, vocab_size) for on in ((), *alone)),
        process_case(PROCESSORS, lengths, vocab_size, max_query_len=2, unowned=2, name="all"),
        process_case(PROCESSORS, [3], 300, dtype=torch.float32, name="all"),
    ]
