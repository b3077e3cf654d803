"""The tiny pair's corpus: the running Python's standard library, split by file.

Code documents are the ``.py`` sources; prose documents are docstrings and the language reference that ships in
``pydoc_data``. A file lies in the held-out part when a hash of its path says so, and everything taken from it follows.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dspark.models.tiny import Prompt

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
PROMPT_TOKENS = 96

_SKIPPED_FOLDERS = {
    "site-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data", "lib2to3", "turtledemo",
}  # fmt: skip
_MIN_PROSE_CHARS = 160
_MIN_PROMPT_TEXT = 2 * PROMPT_TOKENS
_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Document:
    """One text of the corpus and where it came from."""

    source: str
    domain: Literal["code", "prose"]
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.source.encode()).digest()
        return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def documents(root: Path | None = None) -> Iterator[Document]:
    """Yield the corpus in a fixed order.

    Args:
        root: the standard library's folder; the running interpreter's by default.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        source = relative.as_posix()
        yield Document(source, "code", text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node, clean=True)
                if docstring and len(docstring) >= _MIN_PROSE_CHARS:
                    yield Document(source, "prose", docstring)
    yield from _language_reference()


def _language_reference() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield Document(f"pydoc_data/topics.py#{name}", "prose", inspect.cleandoc(text))


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with the two special tokens that the pair needs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, docs: list[Document], seed: int) -> np.ndarray:
    """Concatenate documents in a seeded order, each ended by the end-of-text token, as one uint16 array."""
    order = np.random.default_rng(seed).permutation(len(docs))
    end = special_id(tokenizer, END_OF_TEXT)
    encoded = tokenizer.encode_batch([docs[i].text for i in order])
    return np.concatenate([np.asarray([*e.ids, end], dtype=np.uint16) for e in encoded])


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of :data:`END_OF_TEXT` or :data:`MASK`.

    Raises:
        ValueError: the tokenizer was not made by :func:`train_tokenizer`, and lacks it.
    """
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"tokenizer: expected one with the special token {token}")
    return found


def crops(stream: np.ndarray, batch: int, length: int, seed: tuple[int, ...]) -> np.ndarray:
    """Draw ``batch`` random windows ``[batch, length]`` (int64); a pure function of ``seed``, so runs can resume."""
    starts = np.random.default_rng(seed).integers(0, len(stream) - length, size=batch)
    return np.stack([stream[s : s + length] for s in starts]).astype(np.int64)


def openings(docs: Iterable[Document], tokenizer: Tokenizer, per_domain: int) -> list[Prompt]:
    """The first tokens of up to ``per_domain`` held-out documents of each domain, one per source, long ones only.

    They ship with the tiny pair, so that it can be tried on text that it has not seen.
    """
    taken: dict[str, list[Prompt]] = {"code": [], "prose": []}
    seen: set[tuple[str, str]] = set()
    for doc in docs:
        chosen, key = taken[doc.domain], (doc.domain, doc.source)
        if not doc.held_out or key in seen or len(chosen) == per_domain:
            continue
        ids = tokenizer.encode(doc.text).ids
        if len(ids) >= _MIN_PROMPT_TEXT:
            seen.add(key)
            chosen.append(Prompt(doc.domain, doc.source, tokenizer.decode(ids[:PROMPT_TOKENS])))
    return [prompt for chosen in taken.values() for prompt in chosen]


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts as JSON lines."""
    lines = [json.dumps(dataclasses.asdict(p), ensure_ascii=False) for p in prompts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
