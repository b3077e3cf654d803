"""The kernels of ``draft_walk`` in Triton's interpreter: the reference's tokens, on every kind of input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.draft import build_walk_tables, draft_walk_workspace, walk_plan
from dspark.ops.draft.walk_plan import WalkConfig, walk_config
from dspark.ops.launch import recorded_launches
from dspark.ops.op import OPS
from dspark.ops.types import DraftVocabulary, MarkovHead, Stream
from dspark.testing.guards import forbid_sync, guarded, poisoned_empty
from tests.ops.draft.cases import DRAFTS, SHIPPED
from tests.ops.draft.triton_walks import (
    PARTS,
    TINY,
    TOKENS,
    agreeing_steps,
    assert_agrees,
    assert_same_bits,
    blank,
    inputs_of,
    run,
)
from tests.ops.draft.walks import HEADS, STREAMS, Case, V, make_case, noise_of
from tests.ops.helpers import make_sampling
from tests.tolerances import LOGPROBS

pytestmark = pytest.mark.triton

INF, NAN = float("inf"), float("nan")


def small(head: str = "markov", confidence: str = "hidden and token", **options: Any) -> Case:
    return make_case(head, confidence, **{"temperature": (1.0, 0.0), "draft_len": 3, **options})


@pytest.mark.parametrize("head", HEADS)
@settings(max_examples=3)
@given(data=st.data())
def test_draws_as_the_reference(head: str, data: st.DataObject) -> None:
    case = make_case(
        head,
        data.draw(st.sampled_from(["none", "hidden", "hidden and token"])),
        data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.3]), min_size=1, max_size=2)),
        data.draw(st.integers(1, 2)),
        data.draw(st.integers(0, 10_000)),
    )
    case = replace(case, stream=data.draw(st.sampled_from(STREAMS)))
    tables = data.draw(st.sampled_from([None, build_walk_tables(case.head, case.confidence_head)]))
    returned = data.draw(st.sampled_from([{}, TOKENS, TOKENS | {"return_logits": True}]))
    assert_agrees(inputs_of(case, tables=tables, **returned), data.draw(st.sampled_from([TINY, PARTS])))


@settings(max_examples=2)
@given(data=st.data())
def test_p02_draws_as_the_reference_under_truncation(data: st.DataObject) -> None:
    case = make_case(
        "rnn",
        "none",
        [0.8, 0.0],
        2,
        data.draw(st.integers(0, 10_000)),
        top_k=data.draw(st.sampled_from([0, 1, 5])),
        top_p=data.draw(st.sampled_from([1.0, 0.7])),
        min_p=data.draw(st.sampled_from([0.0, 0.1])),
    )
    sampling = case.sampling._replace(any_truncation=True)
    assert_agrees(inputs_of(replace(case, sampling=sampling, stream=Stream.DRAFT)))


@pytest.mark.parametrize(
    ("dtype", "truncated"),
    [(torch.float32, False), (torch.float16, False), (torch.bfloat16, False), (torch.float16, True)],
)
def test_p03_the_returned_logits_are_the_tensor_sampled_from(dtype: torch.dtype, truncated: bool) -> None:
    """Bit for bit: the same noise on the returned logits gives every token again, greedy rows included."""
    case = small("markov", "none", temperature=(1.0, 0.0, 0.3), draft_len=2, top_k=6 if truncated else 0, seed=3)
    case = replace(case, stream=Stream.TARGET if dtype is torch.float32 else Stream.DRAFT)
    draft = run(inputs_of(case, logits_dtype=dtype, return_margin=False))
    assert draft.logits is not None
    assert draft.logits.dtype is dtype
    assert torch.equal((draft.logits.float() + noise_of(case)).argmax(-1), draft.tokens)
    assert (draft.logits > -INF).sum(-1).max() == (6 if truncated else V)
    torch.testing.assert_close(draft.lse, draft.logits.float().logsumexp(-1), rtol=0, atol=LOGPROBS)


def test_half_precision_scores_are_rounded_before_they_are_sampled_from() -> None:
    """Without that rounding this seed draws another token from scores that all round to one number."""
    case = small("none", "none", temperature=[1.0] * 3, draft_len=4, seed=5)
    case = replace(case, base_logits=4096 + 2 * torch.rand(3, 4, V, generator=torch.Generator().manual_seed(1)))
    rounded = assert_agrees(inputs_of(case, logits_dtype=torch.float16))
    assert not torch.equal(run(inputs_of(case, **TOKENS)).tokens, rounded.tokens)


BAD_ROWS = {"+inf": [INF], "all -inf": [-INF] * V}


@pytest.mark.parametrize(("values", "top_k"), [(v, 0) for v in BAD_ROWS.values()] + [([NAN], 4)], ids=str)
def test_p05_a_bad_row_ends_its_request_only(values: list[float], top_k: int) -> None:
    """The second tile is where the number is; the first one has written scores that nobody may see."""
    case = small("none", "hidden", draft_len=2, temperature=(1.0, 0.7), top_k=top_k)
    spoiled = case.base_logits.clone()
    spoiled[1:, 1, V - len(values) :] = torch.tensor(values)
    bad = assert_agrees(inputs_of(replace(case, base_logits=spoiled)))
    assert (bad.tokens[1:, 1:] == -1).all()
    assert bad.logits is not None
    assert (bad.logits[1:, 1:] == -INF).all()
    assert_same_bits(bad, run(inputs_of(case.take([0], 2))), rows=[0])


@pytest.mark.parametrize("head", ["markov", "rnn"])
def test_p07_padded_requests_are_never_an_index(head: str) -> None:
    case = small(head, temperature=(1.0, 0.0, 1.0), draft_len=2)
    anchor = torch.tensor([-1, int(case.anchor[1]), V + 2**40])
    padded = assert_agrees(inputs_of(replace(case, anchor=anchor)))
    assert (padded.tokens[[0, 2]] == -1).all()
    assert (padded.confidence[[0, 2]] == 0).all()
    assert_same_bits(padded, run(inputs_of(case.take([1], 2))), rows=[1])


def test_bad_hidden_states_spoil_their_own_request() -> None:
    case = small("rnn", draft_len=2)
    assert case.hidden is not None
    hidden = case.hidden.clone()
    hidden[0, 1, 3] = NAN
    spoiled = assert_agrees(inputs_of(replace(case, hidden=hidden)))
    assert spoiled.tokens[0, 1] == -1


def reduced(case: Case, w1_rows: str, kept: Tensor) -> tuple[Case, DraftVocabulary]:
    """The same drafter with some tokens left out."""
    assert isinstance(case.head, MarkovHead)
    vocabulary = DraftVocabulary.from_offsets(kept - torch.arange(len(kept)), V, w1_rows=w1_rows)  # type: ignore[arg-type]
    rows = case.head.w1 if w1_rows == "target" else case.head.w1[kept]
    assert case.confidence_head is not None
    return (
        replace(
            case,
            base_logits=case.base_logits[..., kept].contiguous(),
            head=MarkovHead(rows, case.head.w2[kept]),
            confidence_head=case.confidence_head._replace(w1=rows),
        ),
        vocabulary,
    )


@pytest.mark.parametrize(("w1_rows", "top_k"), [("target", 0), ("draft", 0), ("draft", 3)])
def test_a_reduced_vocabulary(w1_rows: str, top_k: int) -> None:
    """Anchors outside of it, among them."""
    kept = torch.tensor([1, 2, 3, 7, 8, 11, 12, 13, 17])
    case = small(temperature=(1.0, 0.0, 0.7), draft_len=2, seed=9, top_k=top_k)
    case = replace(case, anchor=torch.tensor([0, 7, 18]))
    mine, vocabulary = reduced(case, w1_rows, kept)
    draft = assert_agrees(inputs_of(mine, vocabulary=vocabulary))
    assert torch.isin(draft.tokens, kept).all()


@pytest.mark.parametrize(
    ("head", "weights"),
    [("markov", torch.float16), ("markov", torch.bfloat16), ("gated", torch.bfloat16), ("rnn", torch.bfloat16)],
)
def test_half_precision_weights_and_logits(head: str, weights: torch.dtype) -> None:
    case = small(head, draft_len=2)

    def cast(values: Any) -> Any:
        return type(values)(*(x.to(weights) for x in values))

    assert case.hidden is not None
    case = replace(
        case,
        base_logits=case.base_logits.to(weights),
        head=cast(case.head),
        hidden=case.hidden.to(weights),
        confidence_head=cast(case.confidence_head),
    )
    assert_agrees(inputs_of(case), config=TINY if head == "markov" else PARTS)
    if head == "rnn":  # and weights of another dtype than the hidden states
        assert_agrees(inputs_of(replace(case, hidden=case.hidden.float())), config=PARTS)


def sized(vocab_size: int, rank: int, draft_len: int, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    w1, w2 = (torch.randn(vocab_size, rank, generator=g).half() / rank**0.5 for _ in range(2))
    return Case(
        base_logits=torch.randn(1, draft_len, vocab_size, generator=g).half(),
        anchor=torch.tensor([vocab_size - 1]),
        head=MarkovHead(w1, w2),
        hidden=None,
        confidence_head=None,
        sampling=make_sampling([0.9], seed=[seed]),
        position=torch.tensor([2**33]),
    )


@pytest.mark.parametrize(("vocab_size", "rank"), [(262_144, 16), (3000, 512)])
def test_wide_vocabularies_and_ranks(vocab_size: int, rank: int) -> None:
    width = max(16, 1 << (rank - 1).bit_length())
    config = WalkConfig(block_rows=1, block_vocab=min(2**16, 2**20 // width), block_rank=width, hold=True)
    assert_agrees(inputs_of(sized(vocab_size, rank, 1)), config=config)


def test_long_blocks() -> None:
    assert_agrees(inputs_of(sized(40, 16, 32), **TOKENS), replace(TINY, block_vocab=64))


def test_the_shipped_configuration_through_the_public_op() -> None:
    case = replace(small(draft_len=2), base_logits=small(draft_len=2).base_logits.half())
    expected, draft = case.walk(backend="reference"), case.walk(backend="triton")
    assert torch.equal(draft.tokens, expected.tokens)
    assert draft.margin is None
    assert draft.lse is None


@pytest.mark.parametrize("head", ["markov", "rnn"])
def test_c8_a_request_is_bitwise_the_same_in_any_batch(head: str) -> None:
    """Alone, permuted, and in more requests than one block of rows holds."""
    case = small(head, temperature=(1.0, 0.0, 0.7, 1.0, 0.4), draft_len=2)
    whole = run(inputs_of(case))
    for requests in ([3], [4, 0])[: 1 if head == "rnn" else 2]:
        assert_same_bits(run(inputs_of(case.take(requests, 2))), whole, others=requests)


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_tables_are_the_products_that_they_replace(head: str) -> None:
    case = small(head, draft_len=2, temperature=[0.9])
    with_tables = inputs_of(case, tables=build_walk_tables(case.head, case.confidence_head, chunk=4))
    assert_agrees(with_tables)
    broken = with_tables._replace(tables=build_walk_tables(make_case(head, seed=8).head, None))
    with pytest.raises(AssertionError):
        assert_agrees(broken)


def test_p06_rows_beyond_32_bit_offsets() -> None:
    case = small("markov", "none", draft_len=2, temperature=(1.0, 1.0))
    stride = 2**30 + 16
    far = torch.empty(3 * stride + V, dtype=torch.float16).as_strided((2, 2, V), (2 * stride, stride, 1))
    far.copy_(case.base_logits)
    near = case.base_logits.half()
    assert torch.equal(
        run(inputs_of(replace(case, base_logits=far), **TOKENS)).tokens,
        run(inputs_of(replace(case, base_logits=near), **TOKENS)).tokens,
    )


@pytest.mark.parametrize("head", ["markov", "rnn"])
def test_outputs_are_written_in_full_and_nothing_else_is(head: str) -> None:
    """Scores are rows between canaries, as are the outputs and the workspace."""
    case = small(head, draft_len=2, temperature=(1.0, 0.0, 0.5))
    inputs = inputs_of(replace(case, anchor=torch.tensor([1, -1, 2])))
    op = OPS["draft_walk"]
    with poisoned_empty():
        bands = {f: guarded(x, row_gap=4 if f == "logits" else 0) for f, x in blank(inputs)._asdict().items()}
        out = blank(inputs)._replace(**{name: band.tensor for name, band in bands.items()})
        size = 4 * sum(walk_plan.plan({}, *inputs, out, config=TINY).sizes)
        workspace = guarded(torch.empty(size, dtype=torch.uint8))
        base = guarded(inputs.base_logits, row_gap=4)
        guarded_inputs = inputs._replace(base_logits=base.tensor)
        op("triton", *guarded_inputs, out, workspace=workspace.tensor, config=TINY)
    for band in (base, workspace, *bands.values()):
        band.check()
    assert ((out.tokens >= -1) & (out.tokens < V)).all()
    for name in ("logits", "confidence", "confidence_logits", "margin", "lse"):
        assert not getattr(out, name).isnan().any(), name
    assert_same_bits(out, run(inputs))
    with pytest.raises(ValueError, match="workspace: expected shape"):
        op("triton", *inputs, out, workspace=workspace.tensor[:-1], config=TINY)


def test_out_and_workspace_of_the_public_op() -> None:
    case = small(draft_len=2)
    size = draft_walk_workspace(case.base_logits, head=case.head, sampling=case.sampling)
    inputs = inputs_of(case, **TOKENS, tables=None)
    assert size == OPS["draft_walk"].workspace(*inputs, None)
    workspace = torch.empty(size, dtype=torch.uint8)
    for backend in ("reference", "triton"):
        expected = case.walk(backend=backend)
        out = blank(inputs._replace(return_logits=True))
        assert case.walk(out=out, workspace=workspace, backend=backend) is out
        assert_same_bits(out, expected)


@pytest.mark.parametrize(("head", "top_k"), [("gated", 0), ("rnn", 3)])
def test_the_host_never_reads_the_device(head: str, top_k: int) -> None:
    case = small(head, draft_len=1, top_k=top_k)
    with forbid_sync():
        run(inputs_of(case))


def test_an_empty_batch_launches_nothing() -> None:
    case = small().take([], 2)
    with recorded_launches() as launches:
        assert case.walk(backend="triton").tokens.shape == (0, 2)
    assert not launches


G = DRAFTS
LAUNCHES = {
    "walk, markov": G + 2,
    "walk, markov greedy": G + 2,
    "walk, markov with q": G + 2,
    "walk, markov of 64 requests": G + 2,
    "walk, markov truncated": 4 * G + 2,
    "walk, markov with a draft vocabulary": G + 2,
    "walk, gated": 2 * G + 2,
    "walk, gated with tables": G + 2,
    "walk, rnn": 2 * G + 2,
    "walk, rnn with tables": 2 * G + 2,
    "walk, no head": G + 2,
}


@pytest.mark.parametrize(("call", "launches"), LAUNCHES.items(), ids=LAUNCHES.keys())
def test_launches_of_a_block(call: str, launches: int) -> None:
    (case,) = (case for case in SHIPPED if str(case) == call)
    with recorded_launches() as found:
        case.op("triton", *case.values("meta"))
    assert len(found) == launches


def test_configurations() -> None:
    assert walk_config(151_936, 256, "half").hold
    assert not walk_config(151_936, 512, "half").hold
    assert walk_config(5, 3, "float32").block_vocab == 16
    assert walk_config(151_936, 0, "float32").num_warps == 4
    for rank in (1, 16, 40, 256, 512):
        for dot in ("half", "split", "float32"):
            config = walk_config(32_000, rank, dot)
            assert config.block_rank >= 16
            assert not config.hold or config.block_rank >= rank


def test_a_wrong_token_is_not_taken_for_a_tie() -> None:
    case = small(draft_len=2)
    tokens = case.walk().tokens
    assert agreeing_steps(inputs_of(case), tokens, tokens).all()
    with pytest.raises(AssertionError, match="request 1, step 1"):
        agreeing_steps(inputs_of(case), tokens + torch.tensor([[0, 0], [0, 1]]), tokens)
