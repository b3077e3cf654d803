"""Calls of ``sample`` and ``truncate`` whose traffic is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dspark.ops.cost import Cost, SampleCall, sample_cost, truncate_cost
from dspark.ops.sample import sample, truncate
from dspark.ops.types import Sampling
from tests.gates.traffic.case import Case
from tests.gates.traffic.search import simulate

LIKELY = 12.0
"""What is added to some logits of each row, so that truncation cuts where it does in a language model."""


@dataclass(frozen=True)
class Cut:
    """Truncation of a request: top-k, top-p, min-p."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def on(self) -> bool:
        """Whether anything is cut."""
        return self != Cut()


def sample_case(
    op: Literal["sample", "truncate"],
    temperature: Sequence[float],
    vocab_size: int,
    *,
    cuts: Sequence[Cut] | None = None,
    request: Sequence[int] | None = None,
    salt: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "",
) -> Case:
    """A call on random logits, of requests with these temperatures and ``cuts`` (None: ``any_truncation`` is False)."""
    of = list(range(len(temperature))) if request is None else list(request)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(of), vocab_size, generator=generator)
    likely = torch.randint(vocab_size, (len(of), 40), generator=generator)
    logits = logits.scatter(1, likely, LIKELY + torch.randn(len(of), 40, generator=generator)).to(dtype)
    rows = logits.float().numpy()
    chosen = [Cut()] * len(temperature) if cuts is None else cuts
    sampling = Sampling(
        torch.tensor(temperature),
        torch.tensor([cut.top_k for cut in chosen]),
        torch.tensor([cut.top_p for cut in chosen]),
        torch.tensor([cut.min_p for cut in chosen]),
        torch.arange(len(temperature)),
        all_greedy=not any(temperature),
        any_truncation=cuts is not None,
    )
    given, position = None if request is None else torch.tensor(of), torch.arange(len(of))
    salts = position if salt else None
    truncated = [t for t, r in enumerate(of) if r >= 0 and temperature[r] and chosen[r].on]
    call = SampleCall(
        num_rows=len(of),
        vocab_size=vocab_size,
        itemsize=dtype.itemsize,
        padded=sum(r < 0 for r in of),
        greedy=sum(r >= 0 and not temperature[r] for r in of),
        request=request is not None,
        salt=salt,
    )

    def run() -> Cost:
        if op == "sample":
            out = sample(logits, sampling, position, request=given, salt=salts, backend="triton").numpy()
            assert [token >= 0 for token in out] == [r >= 0 for r in of]
        else:
            out = truncate(logits, sampling, given, backend="triton").numpy()
        search = []
        for t in truncated:
            cut = chosen[of[t]]
            found, threshold = simulate(rows[t], dtype, temperature[of[t]], cut.top_k, cut.top_p, cut.min_p)
            assert op == "sample" or out[t] == threshold
            search.append(found)
        described = replace(call, search=None if cuts is None else search)
        return sample_cost(described) if op == "sample" else truncate_cost(described)

    shape = f"rows {len(of)}, V {vocab_size}, {str(dtype).removeprefix('torch.')}"
    return Case(op, shape, name or ("truncated" if cuts else "gumbel" if any(temperature) else "greedy"), run)


def stated_cases() -> list[Case]:
    """The shapes that bounds are stated for: rows of 151,936 logits in bfloat16; 8, or 2 where a search is counted."""
    vocab_size, ones = 151_936, [1.0] * 2
    return [
        sample_case("sample", [1.0] * 8, vocab_size),
        sample_case("sample", [0.0] * 8, vocab_size),
        sample_case("sample", ones, vocab_size, cuts=[Cut(top_k=50, top_p=0.95)] * 2),
        sample_case("truncate", ones, vocab_size, cuts=[Cut(top_k=50)] * 2, name="top-k"),
        sample_case("truncate", ones, vocab_size, cuts=[Cut(top_p=0.95)] * 2, name="top-p"),
        sample_case("truncate", ones, vocab_size, cuts=[Cut(min_p=0.05)] * 2, name="min-p"),
    ]


def cases() -> list[Case]:
    """Small calls of every kind: two tiles, the second one ragged."""
    vocab_size = 5000
    mixed = [Cut(top_k=20, top_p=0.9), Cut(), Cut(top_k=5), Cut(min_p=0.3)]
    temperature, request = [0.8, 1.0, 0.0, 1.5], [3, -1, 0, 2, 1]
    return [
        sample_case("sample", [0.0] * 3, vocab_size),
        sample_case("sample", [1.0, 0.7, 0.0], vocab_size),
        sample_case("sample", temperature, vocab_size, request=request, salt=True, name="gumbel, request, salt"),
        sample_case("sample", temperature, vocab_size, cuts=mixed),
        sample_case(
            "sample", temperature, vocab_size, cuts=mixed, request=request, salt=True, name="truncated, request, salt"
        ),
        sample_case("truncate", temperature, vocab_size, cuts=mixed, dtype=torch.float32, name="mixed"),
        sample_case("truncate", temperature, 300, cuts=mixed, request=request, dtype=torch.float16, name="request"),
    ]
