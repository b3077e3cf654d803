"""Openings of held-out documents, shipped with the tiny pair so that it can be tried on text it has not seen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from dspark.models.tiny import Prompt
from dspark.models.training.corpus import Document

PROMPT_TOKENS = 96
_MIN_TOKENS = 192


def openings(docs: Iterable[Document], tokenizer: Tokenizer, per_domain: int) -> list[Prompt]:
    """The first tokens of up to ``per_domain`` held-out documents of each domain, one per source, long ones only."""
    taken: dict[str, list[Prompt]] = {"code": [], "prose": []}
    seen: set[tuple[str, str]] = set()
    for doc in docs:
        chosen, key = taken[doc.domain], (doc.domain, doc.source)
        if not doc.held_out or key in seen or len(chosen) == per_domain:
            continue
        ids = tokenizer.encode(doc.text).ids
        if len(ids) >= _MIN_TOKENS:
            seen.add(key)
            chosen.append(Prompt(doc.domain, doc.source, tokenizer.decode(ids[:PROMPT_TOKENS])))
    return [prompt for chosen in taken.values() for prompt in chosen]


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts as JSON lines."""
    lines = [json.dumps(dataclasses.asdict(p), ensure_ascii=False) for p in prompts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
