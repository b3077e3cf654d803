"""Training of the tiny pair, at a size that takes seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.headroom import coupled_chance
from dspark.models import DrafterConfig, DSparkDrafter, Target, load_drafter, load_target, query_batch
from dspark.models.draft_network import DSparkNetwork
from dspark.models.training.corpus import (
    END_OF_TEXT,
    Document,
    crops,
    documents,
    openings,
    special_id,
    token_stream,
    train_tokenizer,
    write_prompts,
)
from dspark.models.training.drafter import (
    DrafterTraining,
    Rollouts,
    block_losses,
    coupled_acceptance,
    new_drafter,
    train_drafter,
    trainable,
)
from dspark.models.training.export import save_drafter, save_target
from dspark.models.training.loop import StepLog, initialise, learning_rate
from dspark.models.training.target import TargetTraining, causal_attend, language_model_loss, roll_out, train_target
from dspark.models.transformer import CausalLM
from dspark.ops.sample.reference import transform
from dspark.requests import SamplingParams, batch_sampling
from tests.models.helpers import poison
from tests.ops.helpers import chi_square_pvalue
from tests.small import small_drafter, small_model
from tests.tolerances import CHI_SQUARE

VOCAB = 40
MODEL = small_model(VOCAB, hidden_size=32, intermediate_size=48, head_dim=16, tie_word_embeddings=True)
TARGET_RUN = TargetTraining(steps=40, batch=4, length=32, peak_rate=1e-2, warmup=5, save_every=10)
DRAFTER_RUN = DrafterTraining(steps=40, batch=2, peak_rate=1e-2, warmup=5, save_every=10, anchors=6)


def drafter_config(head: str) -> DrafterConfig:
    if head == "none":
        return small_drafter(MODEL, markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    return small_drafter(MODEL, markov_rank=8, markov_head_type=head)


@pytest.fixture(scope="module")
def stream() -> np.ndarray:
    """A language with structure: each token names the next two."""
    start = np.random.default_rng(0).integers(0, VOCAB - 1, size=600)
    return np.stack([start, (start * 7 + 1) % 39, (start * 5 + 2) % 39], axis=1).flatten().astype(np.uint16)


def new_target() -> CausalLM:
    network = CausalLM(MODEL)
    initialise(network, seed=0)
    return network


@pytest.fixture(scope="module")
def trained(stream: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    network = new_target()
    for _ in train_target(network, stream, tmp_path_factory.mktemp("run") / "target.pt", TARGET_RUN):
        pass
    return network.requires_grad_(False)


def test_target_learns(stream: np.ndarray, trained: CausalLM) -> None:
    tokens = torch.from_numpy(crops(stream, 8, 32, (9, 9)))
    assert language_model_loss(trained, tokens) < 0.75 * language_model_loss(new_target(), tokens)


def learn(
    network: DSparkNetwork, target: CausalLM, rollouts: Rollouts, folder: Path, run: DrafterTraining = DRAFTER_RUN
) -> list[StepLog]:
    return list(train_drafter(network, target, rollouts, folder / "drafter.pt", run))


def ends(logs: list[StepLog]) -> tuple[float, float]:
    """The mean losses of the first and the last steps."""
    first, last = (float(np.mean([log.loss for log in part])) for part in (logs[:5], logs[-5:]))
    return first, last


@pytest.fixture(scope="module")
def rollouts(stream: np.ndarray) -> Rollouts:
    return Rollouts(torch.from_numpy(crops(stream, 64, 32, (5,))), prompt_len=4, temperature=torch.ones(64))


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_drafter_learns_what_its_target_says(head: str, rollouts: Rollouts, trained: CausalLM, tmp_path: Path) -> None:
    network = new_drafter(drafter_config(head), trained, seed=1)
    logs = learn(network, trained, replace(rollouts, temperature=torch.arange(64) % 2.0), tmp_path)
    assert ends(logs)[1] < 0.9 * ends(logs)[0]
    assert np.mean(logs[-1].acceptance) > np.mean(logs[0].acceptance)
    torch.testing.assert_close(network.lm_head.weight, trained.lm_head.weight, rtol=0, atol=0)


def test_the_estimate_of_coupled_acceptance_is_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(2, 3, 6, generator=generator) ** 2).unbind()
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    by_token = torch.stack([coupled_acceptance(q.log(), p, torch.full((3,), x)) for x in range(6)], dim=-1)
    torch.testing.assert_close((by_token * p).sum(-1), coupled_chance(p.double(), q.double()).float())
    one = torch.tensor([[1.0, 0.0]])  # at temperature 0 it is the chance that q gives that token
    assert coupled_acceptance(torch.tensor([[0.3, 0.7]]).log(), one, torch.tensor([0])).tolist() == pytest.approx([0.3])


def test_training_for_the_coupled_rule_raises_its_acceptance(
    rollouts: Rollouts, trained: CausalLM, tmp_path: Path
) -> None:
    run = replace(DRAFTER_RUN, ce_weight=0.0, tv_weight=0.0, confidence_weight=0.0, coupled_weight=1.0)
    network = new_drafter(drafter_config("vanilla"), trained, seed=1)
    first, last = ends(learn(network, trained, rollouts, tmp_path, run))
    assert last < 0.9 * first


def test_a_stopped_run_goes_on_as_if_it_had_not(stream: np.ndarray, tmp_path: Path) -> None:
    whole, resumed = new_target(), new_target()
    logs = list(train_target(whole, stream, tmp_path / "whole.pt", TARGET_RUN))
    run = train_target(resumed, stream, tmp_path / "part.pt", TARGET_RUN)
    for log in run:
        if log.step == 13:
            break
    run.close()  # type: ignore[attr-defined]
    resumed = new_target()
    rest = list(train_target(resumed, stream, tmp_path / "part.pt", TARGET_RUN))
    assert [log.step for log in rest] == list(range(10, 40))
    assert [log.loss for log in rest] == [log.loss for log in logs[10:]]
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_divergence_is_an_error(stream: np.ndarray, tmp_path: Path) -> None:
    network = new_target()
    network.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="diverged at step 0"):
        next(train_target(network, stream, tmp_path / "target.pt", TARGET_RUN))


def test_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(step, TARGET_RUN) for step in range(40)]
    assert rates.index(max(rates)) in (4, 5)
    assert rates[4] == TARGET_RUN.peak_rate
    assert rates[-1] == pytest.approx(0.05 * TARGET_RUN.peak_rate, rel=0.1)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_training_sees_what_decoding_sees(head: str, temperature: float, trained: CausalLM) -> None:
    """The acceptance that training reports is that of the paged drafter at the same anchors, position by position."""
    config = drafter_config(head)
    network = new_drafter(config, trained, seed=1).requires_grad_(False)
    target, drafter = Target(trained), DSparkDrafter(network, slots="anchor-first")
    tokens = torch.randint(0, VOCAB - 1, (1, 24), generator=torch.Generator().manual_seed(3))
    anchors = torch.tensor([[0, 5, 20]])
    block = config.block_size
    reported = block_losses(network, trained, tokens, anchors, torch.tensor([temperature]), DRAFTER_RUN).acceptance

    table, zero = torch.arange(2)[None], torch.zeros(1, dtype=torch.int64)
    rows = query_batch(table, zero, [24], 16)
    hidden, features = target.forward(tokens[0], rows, target.new_cache(2, 16), drafter.feature_layers)
    sampling = batch_sampling([SamplingParams(temperature=temperature)], [0])
    same = torch.zeros(24, dtype=torch.int64)
    p = transform(target.logits(hidden), sampling, same).softmax(-1)  # [24, V]
    acceptance = []
    for anchor in anchors[0].tolist():
        cache = poison(drafter.new_cache(2, 16))
        drafter.extend(features[:anchor], query_batch(table, zero, [anchor], 16), cache)
        context = torch.tensor([anchor])
        block_rows = query_batch(table, context, [block], 16, bidirectional=True)
        drafted, base = drafter.block_logits(tokens[0, anchor : anchor + 1], block_rows, cache)
        forced = teacher_forced(network, tokens[0, anchor : anchor + block], drafted[0], base[0])
        own = p[anchor : anchor + block]
        q = transform(forced, sampling, same[:block]).softmax(-1)
        acceptance.append(1 - 0.5 * (q - own).abs().sum(-1))
    torch.testing.assert_close(reported, torch.stack(acceptance).mean(0), atol=1e-5, rtol=1e-5)


def teacher_forced(
    network: DSparkNetwork, previous: torch.Tensor, hidden: torch.Tensor, base: torch.Tensor
) -> torch.Tensor:
    """Logits ``[G, V]`` of a block whose previous tokens are given, written out head by head."""
    markov = network.markov_head
    assert markov is not None
    rows, state = [], torch.zeros(network.config.markov_rank)
    for k in range(len(previous)):
        w = markov.markov_w1.weight[previous[k]]
        if markov.gate_proj is not None:
            w = torch.sigmoid(markov.gate_proj(torch.cat([hidden[k], w]))) * w
        elif markov.joint_proj is not None:
            gate, candidate, output = markov.joint_proj(torch.cat([state, w, hidden[k]])).chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            w = torch.tanh(output)
        rows.append(base[k] + markov.markov_w2.weight @ w)
    return torch.stack(rows)


def test_training_goes_on_from_an_exported_drafter(rollouts: Rollouts, trained: CausalLM, tmp_path: Path) -> None:
    first = new_drafter(drafter_config("vanilla"), trained, seed=1)
    before = learn(first, trained, rollouts, tmp_path)
    save_target(trained, tmp_path / "target")
    save_drafter(first, tmp_path / "drafter")
    again = trainable(load_drafter(tmp_path / "drafter", load_target(tmp_path / "target")).network)
    kept = [weight.clone() for weight in (again.lm_head.weight, again.embed_tokens.weight)]
    after = learn(again, trained, rollouts, tmp_path / "target")
    assert after[0].loss < 0.9 * before[0].loss  # it begins with what it has learnt
    assert ends(after)[1] < ends(before)[1]
    assert torch.equal(again.lm_head.weight, kept[0])
    assert torch.equal(again.embed_tokens.weight, kept[1])


def test_exported_models_load(trained: CausalLM, tmp_path: Path) -> None:
    network = new_drafter(drafter_config("gated"), trained, seed=1)
    save_target(trained, tmp_path / "target")
    save_drafter(network, tmp_path / "drafter")
    target = load_target(tmp_path / "target")
    drafter = load_drafter(tmp_path / "drafter", target)
    assert target.config == MODEL
    assert drafter.config == network.config
    for loaded, saved in ((target.network, trained), (drafter.network, network)):
        for name, weight in saved.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[name], weight.bfloat16().float(), rtol=0, atol=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """Eighty modules with docstrings, and the language reference that comes with Python."""
    root = tmp_path_factory.mktemp("library")
    for i in range(80):
        docstring = f"Module {i}. " + "It does what its name says, and little else. " * 40
        (root / f"module{i}.py").write_text(f'"""{docstring}"""\n' + f"x{i} = [{i}, {i} + 1]\n" * 60)
    (root / "broken.py").write_text("def f(:\n")
    (root / "test").mkdir()
    (root / "test" / "module.py").write_text("x = 1\n")
    return list(documents(root))


def test_corpus_splits_by_file(corpus: list[Document]) -> None:
    held_out: dict[str, set[bool]] = {}
    domains: dict[str, set[bool]] = {"code": set(), "prose": set()}
    for doc in corpus:
        held_out.setdefault(doc.source, set()).add(doc.held_out)
        domains[doc.domain].add(doc.held_out)
    assert all(len(parts) == 1 for parts in held_out.values())
    assert domains == {"code": {False, True}, "prose": {False, True}}
    fraction = sum(True in parts for parts in held_out.values()) / len(held_out)
    assert 0.01 < fraction < 0.1
    assert not {"broken.py", "test/module.py"} & held_out.keys()


def test_tokenizer_and_stream_round_trip() -> None:
    docs = [
        Document("a.py", "code", "def f(x):\n    return x\n" * 20),
        Document("b.py", "prose", "naïve façade ☃ " * 20),
    ]
    tokenizer = train_tokenizer((d.text for d in docs), vocab_size=300)
    end = special_id(tokenizer, END_OF_TEXT)
    stream = token_stream(tokenizer, docs, seed=0)
    assert (stream == end).sum() == 2
    assert stream[-1] == end
    first, second = np.split(stream, [int((stream == end).argmax()) + 1])
    texts = {tokenizer.decode(part[:-1].tolist()) for part in (first, second)}
    assert texts == {d.text for d in docs}


def test_crops_depend_on_their_seed_alone(stream: np.ndarray) -> None:
    first, again, other = (crops(stream, 3, 16, seed) for seed in ((0, 4), (0, 4), (0, 5)))
    assert first.shape == (3, 16)
    assert (first == again).all()
    assert (first != other).any()


def test_prompts_come_from_held_out_texts(corpus: list[Document], tmp_path: Path) -> None:
    tokenizer = train_tokenizer((d.text for d in corpus if not d.held_out), vocab_size=400)
    prompts = openings(corpus, tokenizer, per_domain=2)
    assert [p.domain for p in prompts] == ["code"] * 2 + ["prose"] * 2
    held_out = [d for d in corpus if d.held_out]
    assert all(any(d.source == p.source and d.text.startswith(p.text) for d in held_out) for p in prompts)
    write_prompts(tmp_path / "prompts.jsonl", prompts)
    assert len((tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()) == 4


def test_rollouts_continue_prompts_as_the_target_would() -> None:
    """Greedy rows are plain decoding's; sampled rows have the target's law."""
    network = CausalLM(MODEL)
    initialise(network, seed=0, std=0.3)
    prompts = torch.randint(MODEL.vocab_size, (6, 5), generator=torch.Generator().manual_seed(1))
    greedy = torch.stack(list(roll_out(network, prompts, torch.zeros(6), 4, seed=0)), 1)
    text = prompts
    for step in range(4):
        positions = torch.arange(text.shape[1]).expand(6, -1)
        with torch.inference_mode():
            hidden, _ = network(text, positions, causal_attend)
            expected = network.logits(hidden[:, -1]).argmax(-1)
        assert torch.equal(greedy[:, step], expected)
        text = torch.cat([text, expected[:, None]], 1)

    rows = 20_000
    with torch.inference_mode():
        hidden, _ = network(prompts[:1], torch.arange(5)[None], causal_attend)
        probs = (network.logits(hidden[0, -1]) / 0.8).softmax(-1)
    drawn = next(roll_out(network, prompts[:1].expand(rows, -1), torch.full((rows,), 0.8), 1, seed=2))
    assert chi_square_pvalue(drawn, probs) > CHI_SQUARE
