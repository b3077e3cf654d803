"""The embedded pair, as it ships."""

from __future__ import annotations

import json

import pytest

from dspark.cli.evaluate import draft_quality
from dspark.models import held_out_prompts, load_tokenizer, tiny_pair
from dspark.models.tiny import TINY_FOLDER
from dspark.models.training.corpus import END_OF_TEXT, MASK, Document, special_id


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in TINY_FOLDER.rglob("*")) <= 20e6


def test_the_pair_fits_its_tokenizer() -> None:
    (target, drafter), tokenizer = tiny_pair(), load_tokenizer()
    assert tokenizer.get_vocab_size() == target.vocab_size == 2048
    assert target.config.eos_token_ids == (special_id(tokenizer, END_OF_TEXT),)
    assert drafter.config.mask_token_id == special_id(tokenizer, MASK)


def test_prompts_are_held_out_code_and_prose() -> None:
    prompts, tokenizer = held_out_prompts(), load_tokenizer()
    domains = [p.domain for p in prompts]
    assert domains.count("code") >= 8
    assert domains.count("prose") >= 8
    for prompt in prompts:
        assert Document(prompt.source, "code", prompt.text).held_out
        assert 64 <= len(tokenizer.encode(prompt.text).ids) <= 128


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafter_is_as_good_as_its_card_says(temperature: float) -> None:
    """Other prompts than the card's, and fewer: the figures agree within their spread."""
    (target, drafter), tokenizer = tiny_pair(), load_tokenizer()
    prompts = [tokenizer.encode(p.text).ids for p in held_out_prompts()]
    quality = draft_quality(target, drafter, prompts, temperature)
    card = json.loads((TINY_FOLDER / "evaluation.json").read_text())
    rows = [row for domain in card.values() for row in domain["drafting"] if row["temperature"] == temperature]
    assert quality.tau > 0.85 * min(row["tau"] for row in rows)
    assert quality.confidence_auc > min(row["confidence_auc"] for row in rows) - 0.06
