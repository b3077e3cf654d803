"""What the ops ask of memory: counted in Triton's interpreter, beside the model of ``dspark.ops.cost``.

``make traffic`` prints the table and writes ``runs/traffic.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, so before dspark.kernels is

import torch

from dspark.ops.accept import RULES_OF_Q, accept
from dspark.ops.cost import AcceptCall, Cost, QKind, accept_cost
from dspark.ops.types import DenseQ, DraftDistribution, PointMass, Rule, Sampling, SparseQ
from dspark.testing.traffic import Traffic, counted_traffic

JSON = Path(__file__).parent.parent.parent / "runs" / "traffic.json"
NUM_SPARSE = 32
LIKELY = 14.0
"""What is added to one logit of each row, so that some drafts are accepted in a wide vocabulary too."""


@dataclass(frozen=True)
class Case:
    """A call to count: its op, shape and rule in words, and what runs it and returns what the model says of it."""

    op: str
    shape: str
    rule: str
    run: Callable[[], Cost]


@dataclass(frozen=True)
class Row:
    """A line of the table; bytes."""

    op: str
    shape: str
    rule: str
    read: int
    written: int
    modelled_read: int
    modelled_written: int
    lower_bound: int
    launches: int
    modelled_launches: int

    @property
    def over_bound(self) -> float:
        """Bytes modelled over the lower bound."""
        return (self.modelled_read + self.modelled_written) / self.lower_bound

    @property
    def agrees(self) -> bool:
        """Whether what was counted is exactly what the model says."""
        return (self.read, self.written, self.launches) == (
            self.modelled_read,
            self.modelled_written,
            self.modelled_launches,
        )


def measure(case: Case) -> tuple[Row, Traffic]:
    """Run a case in the interpreter."""
    with counted_traffic() as traffic:
        cost = case.run()
    row = Row(
        case.op, case.shape, case.rule, traffic.read, traffic.written, cost.read, cost.written, cost.lower_bound,
        traffic.launches, cost.launches,
    )  # fmt: skip
    return row, traffic


def accept_case(
    rule: Rule,
    lengths: Sequence[int],
    vocab_size: int,
    *,
    q: QKind = "dense",
    temperature: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    raw: bool = True,
) -> Case:
    """A call of ``accept`` on random logits; most drafts are what the target finds most likely."""
    kind = f" {q}" if rule in RULES_OF_Q else ""
    greedy = " greedy" if not temperature else ""
    shape = f"rows {'+'.join(map(str, lengths))}, V {vocab_size}, {str(dtype).removeprefix('torch.')}"

    generator = torch.Generator().manual_seed(0)
    num_rows, num_requests, nodes = sum(lengths), len(lengths), max(lengths)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    likely = torch.randint(vocab_size, (num_rows,), generator=generator)
    logits[torch.arange(num_rows), likely] += LIKELY
    tokens = likely.roll(1)
    query_start = torch.tensor([0, *lengths]).cumsum(0)
    place = (query_start[:-1, None] + 1 + torch.arange(nodes - 1)).clamp(max=num_rows - 1)
    distribution = _make_q(q, tokens[place], vocab_size, dtype, generator) if rule in RULES_OF_Q else None
    number = torch.ones(num_requests)
    integer = torch.zeros(num_requests, dtype=torch.int64)
    sampling = Sampling(
        temperature=number * temperature,
        top_k=integer,
        top_p=number,
        min_p=number * 0,
        seed=torch.arange(num_requests),
        all_greedy=not temperature,
        any_truncation=False,
    )
    logits = logits.to(dtype)

    def run() -> Cost:
        verdict = accept(
            logits,
            tokens,
            query_start,
            rule=rule,
            sampling=sampling,
            position=integer,
            max_query_len=nodes,
            q=distribution,
            logprobs="raw" if raw else "processed",
            backend="triton",
        )
        call = AcceptCall(
            lengths=lengths,
            emitted=verdict.num_emitted.numpy().tolist(),
            rule=rule,
            vocab_size=vocab_size,
            itemsize=dtype.itemsize,
            greedy=not temperature,
            raw=raw,
            q=q,
            q_itemsize=dtype.itemsize,
            num_sparse=NUM_SPARSE if q == "sparse" else 0,
        )
        return accept_cost(call)

    return Case("accept", shape, f"{rule}{kind}{greedy}", run)


def _make_q(
    q: QKind, drafts: torch.Tensor, vocab_size: int, dtype: torch.dtype, generator: torch.Generator
) -> DraftDistribution:
    """Random q in which every draft has some probability."""
    if q == "point":
        return PointMass()
    if q == "dense":
        return DenseQ(torch.randn(*drafts.shape, vocab_size, generator=generator).to(dtype))
    tokens = (drafts.unsqueeze(2) + torch.arange(NUM_SPARSE)) % vocab_size
    return SparseQ(tokens, torch.randn(tokens.shape, generator=generator).log_softmax(-1))


def stated_cases() -> list[Case]:
    """The shapes that bounds are stated for: one request, 7 drafts, a vocabulary of 151,936 in bfloat16."""
    lengths, vocab_size = [8], 151_936
    cases = [accept_case(rule, lengths, vocab_size) for rule in ("coupled", "match")]
    for rule in RULES_OF_Q:
        cases += [accept_case(rule, lengths, vocab_size, q=q) for q in ("dense", "sparse", "point")]
    return cases


def table(rows: Sequence[Row]) -> str:
    """The rows as text; bytes in MB."""
    lines = [
        f"{'op':<8} {'rule':<14} {'shape':<34} {'counted':>10} {'modelled':>10} {'bound':>10} {'over':>7} "
        f"{'launches':>8}"
    ]
    for row in rows:
        counted, modelled = row.read + row.written, row.modelled_read + row.modelled_written
        lines.append(
            f"{row.op:<8} {row.rule:<14} {row.shape:<34} {counted / 1e6:>10.4f} {modelled / 1e6:>10.4f} "
            f"{row.lower_bound / 1e6:>10.4f} {row.over_bound - 1:>7.2%} {row.launches:>8}"
            + ("" if row.agrees else "  DIFFERS")
        )
    return "\n".join(lines)


def main() -> None:
    rows = [measure(case)[0] for case in stated_cases()]
    print(table(rows))
    JSON.parent.mkdir(exist_ok=True)
    found = [
        {**asdict(row), "counted": row.read + row.written, "modelled": row.modelled_read + row.modelled_written}
        for row in rows
    ]
    JSON.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {JSON.name}")


if __name__ == "__main__":
    main()
