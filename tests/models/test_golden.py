"""DeepSpec's own results on its own checkpoints, through the paged path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.models import DSparkDrafter, Target, load_drafter, load_target, query_batch
from dspark.models.draft_network import DSparkNetwork
from dspark.ops.draft import draft_walk, sequential_step
from dspark.ops.draft.certified import draft_walk_certified
from dspark.ops.draft.certified_table import build_bias_table
from dspark.ops.draft.walk_tables import build_walk_tables
from dspark.ops.types import QueryBatch, Sampling, Stream
from tests.models.helpers import close, poison, scattered_table

GOLDEN = Path(__file__).parents[1] / "golden"
HEADS = ["vanilla", "gated", "rnn", "dflash"]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(GOLDEN / "target")


@pytest.fixture(scope="module", params=HEADS)
def head(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def greedy(requests: int) -> Sampling:
    zeros = torch.zeros(requests)
    return Sampling(zeros, zeros.long(), zeros + 1, zeros, zeros.long(), all_greedy=True, any_truncation=False)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [72, 25])
def test_target_hidden_states_and_logits(target: Target, page_size: int, chunk: int) -> None:
    trace = load_file(GOLDEN / "trace_target.safetensors")
    ids = trace["input_ids"]
    requests, length = ids.shape
    table = scattered_table(requests, length, page_size)
    cache = poison(target.new_cache(int(table.max()) + 1, page_size))
    for start in range(0, length, chunk):
        part = ids[:, start : start + chunk]
        count = part.shape[1]
        batch = query_batch(table, torch.full((requests,), start), [count] * requests, page_size)
        hidden, features = target.forward(part.flatten(), batch, cache, (-1, 0, 1, 2, 3))
        expected = torch.cat([trace[f"hidden_{i}"] for i in range(5)], dim=-1)[:, start : start + count]
        close(features, expected.flatten(0, 1))
        close(hidden, trace["hidden_5"][:, start : start + count].flatten(0, 1))
        close(target.logits(hidden), trace["logits"][:, start : start + count].flatten(0, 1))


class Request:
    """One prompt's trace, and what it has committed so far."""

    def __init__(self, trace: dict[str, Tensor], index: int) -> None:
        prefix = f"{index}."
        self.trace = {name[len(prefix) :]: t for name, t in trace.items() if name.startswith(prefix)}
        self.prompt = self.trace["prompt"]
        self.output = self.prompt.tolist()
        self.context = 0
        self.round = 0

    @property
    def finished(self) -> bool:
        return self.round == len(self.trace["start"])

    def of_round(self, name: str) -> Tensor:
        return self.trace[name][self.round]


class Replay:
    """All prompts of a trace as one batch, round by round, over pages that held NaN before."""

    def __init__(self, target: Target, drafter: DSparkDrafter, trace: dict[str, Tensor], page_size: int) -> None:
        self.target, self.drafter, self.page_size = target, drafter, page_size
        self.requests = [Request(trace, i) for i in range(3)]
        self.table = scattered_table(3, 80, page_size)
        num_pages = int(self.table.max()) + 1
        self.cache = poison(target.new_cache(num_pages, page_size))
        self.context = poison(drafter.new_cache(num_pages, page_size))
        self.prefill()

    def verify(self, rows: list[Tensor], running: list[Request], committed_only: bool) -> list[Tensor]:
        """Greedy target tokens of each row. Features of all rows, or of accepted rows only, go to the drafter."""
        table = self.table[[self.requests.index(r) for r in running]]
        context = torch.tensor([r.context for r in running])
        lengths = [len(row) for row in rows]
        batch = query_batch(table, context, lengths, self.page_size)
        hidden, features = self.target.forward(torch.cat(rows), batch, self.cache, self.drafter.feature_layers)
        tokens = list(self.target.logits(hidden).argmax(-1).split(lengths))
        kept = lengths
        if committed_only:
            kept = [1 + accepted(row, token) for row, token in zip(rows, tokens, strict=True)]
            features = torch.cat([f[:n] for f, n in zip(features.split(lengths), kept, strict=True)])
            batch = query_batch(table, context, kept, self.page_size)
        self.drafter.extend(features, batch, self.context)
        return tokens

    def prefill(self) -> None:
        tokens = self.verify([r.prompt for r in self.requests], self.requests, committed_only=False)
        for request, token in zip(self.requests, tokens, strict=True):
            request.output.append(int(token[-1]))
            request.context = len(request.prompt)

    def block(self, running: list[Request]) -> tuple[Tensor, QueryBatch]:
        """Anchors ``[R]`` and the rows of their blocks."""
        table = self.table[[self.requests.index(r) for r in running]]
        context = torch.tensor([r.context for r in running])
        lengths = [self.drafter.block_size] * len(running)
        batch = query_batch(table, context, lengths, self.page_size, bidirectional=True)
        return torch.tensor([r.output[-1] for r in running]), batch


def accepted(row: Tensor, token: Tensor) -> int:
    """Drafts of ``row`` (anchor first) that equal the target's ``token`` before them."""
    return int((row[1:] == token[:-1]).long().cumprod(0).sum())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("committed_only", [True, False])
def test_p10_rounds_of_a_trace(target: Target, head: str, page_size: int, committed_only: bool) -> None:
    """Every number of every round, with the drafter's context growing by what was committed only.

    ``committed_only=False`` also writes the context of rejected rows, which the next rounds must overwrite unseen.
    """
    drafter = load_drafter(GOLDEN / f"draft_{head}", target)
    replay = Replay(target, drafter, load_file(GOLDEN / f"trace_{head}.safetensors"), page_size)
    while running := [r for r in replay.requests if not r.finished]:
        anchor, batch = replay.block(running)
        expected = {
            name: torch.stack([r.of_round(name) for r in running])
            for name in running[0].trace
            if name not in ("prompt", "output_ids")
        }
        assert anchor.tolist() == expected["anchor"].tolist()
        assert batch.context_len.tolist() == expected["start"].tolist()

        hidden, base_logits = drafter.block_logits(anchor, batch, replay.context)
        close(hidden, expected["hidden"])
        close(base_logits, expected["base_logits"])
        draft = drafter.propose(
            anchor,
            batch,
            replay.context,
            draft_len=drafter.block_size,
            sampling=greedy(len(running)),
            position=batch.context_len,
            stream=Stream.TARGET,
            return_logits=True,
        )
        assert draft.tokens.tolist() == expected["tokens"].tolist()
        close(with_head(drafter, anchor, draft.tokens, hidden, base_logits), expected["logits"])
        if head == "dflash":
            assert draft.confidence is None
        else:
            close(draft.confidence_logits, expected["confidence_logits"])
            close(draft.confidence, expected["confidence_logits"].sigmoid())

        rows = [torch.cat([a[None], t]) for a, t in zip(anchor, draft.tokens, strict=True)]
        tokens = replay.verify(rows, running, committed_only)
        for request, row, token in zip(running, rows, tokens, strict=True):
            count = accepted(row, token)
            assert count == int(request.of_round("accepted"))
            request.output += token[: count + 1].tolist()
            request.context += count + 1
            request.round += 1
    for request in replay.requests:
        expected_output = request.trace["output_ids"].tolist()
        assert request.output[: len(expected_output)] == expected_output


def with_head(drafter: DSparkDrafter, anchor: Tensor, tokens: Tensor, hidden: Tensor, base_logits: Tensor) -> Tensor:
    """Logits after the sequential head, ``[R, G, V]``, for drafted ``tokens``."""
    sequential = drafter.network.sequential_head()
    if sequential is None:
        return base_logits
    previous, state, out = anchor, None, []
    for k in range(tokens.shape[1]):
        bias, state = sequential_step(sequential, previous, hidden[:, k], state)
        out.append(base_logits[:, k] + bias)
        previous = tokens[:, k]
    return torch.stack(out, dim=1)


def first_rounds(head: str) -> dict[str, Tensor]:
    """What the first rounds of the three prompts of a trace say, ``[3, ...]``."""
    trace = load_file(GOLDEN / f"trace_{head}.safetensors")
    names = [name.removeprefix("0.") for name in trace if name.startswith("0.")]
    return {
        name: torch.stack([trace[f"{i}.{name}"][0] for i in range(3)])
        for name in names
        if name not in ("prompt", "output_ids")
    }


def walk_arguments(head: str, network: DSparkNetwork) -> dict[str, Any]:
    """What the walks take to draft the first rounds."""
    said = first_rounds(head)
    return {
        **{name: said[name] for name in ("base_logits", "anchor", "hidden")},
        "head": network.sequential_head(),
        "confidence_head": network.confidence(),
        "sampling": greedy(3),
        "position": said["start"],
        "stream": Stream.TARGET,
    }


@pytest.mark.triton
def test_rounds_of_a_trace_by_the_kernels(target: Target, head: str) -> None:
    """The walk alone, from the trace's hidden states and base logits; with tables where they save a product."""
    network = load_drafter(GOLDEN / f"draft_{head}", target).network
    expected, arguments = first_rounds(head), walk_arguments(head, network)
    tables = build_walk_tables(arguments["head"], arguments["confidence_head"]) if head == "gated" else None
    draft = draft_walk(**arguments, return_logits=True, tables=tables, backend="triton")
    assert draft.tokens.tolist() == expected["tokens"].tolist()
    assert torch.equal(draft.logits.argmax(-1), expected["tokens"])
    if head != "dflash":
        close(draft.confidence_logits, expected["confidence_logits"])


@pytest.mark.parametrize("top_k", [4, 16])
def test_rounds_of_a_trace_by_the_certified_walk(target: Target, top_k: int) -> None:
    expected = first_rounds("vanilla")
    arguments = walk_arguments("vanilla", load_drafter(GOLDEN / "draft_vanilla", target).network)
    table = build_bias_table(arguments["head"], top_m=4)
    result = draft_walk_certified(**arguments, table=table, top_k=top_k)
    assert result.draft.tokens.tolist() == expected["tokens"].tolist()
    assert result.certified.min() >= 1
    close(result.draft.confidence_logits, expected["confidence_logits"])


def test_traces_reject_somewhere_and_accept_somewhere(head: str) -> None:
    """The traces exercise roll-back: without rejections the replay would prove little."""
    trace = load_file(GOLDEN / f"trace_{head}.safetensors")
    counts = torch.cat([trace[f"{i}.accepted"] for i in range(3)])
    assert 0 <= counts.min() < 7
    assert counts.max() > 0
