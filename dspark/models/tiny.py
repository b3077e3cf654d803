"""The embedded tiny pair: a target and its DSpark drafter, trained by ``python -m dspark train``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.models.drafter import DSparkDrafter
from dspark.models.loading import load_drafter, load_target
from dspark.models.target import Target

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TINY_FOLDER = Path(__file__).parent / "tiny"
TINY_TARGET = TINY_FOLDER / "target"
TINY_DRAFTER = TINY_FOLDER / "drafter"


@dataclass(frozen=True)
class Prompt:
    """A prompt and the kind of text that it is."""

    domain: str
    source: str
    text: str


def tiny_pair() -> tuple[Target, DSparkDrafter]:
    """Load the embedded pair (fp32, CPU).

    >>> target, drafter = tiny_pair()
    >>> drafter.block_size
    7
    """
    target = load_target(TINY_TARGET)
    return target, load_drafter(TINY_DRAFTER, target)


def load_tokenizer(folder: str | Path = TINY_TARGET) -> Tokenizer:
    """Load ``tokenizer.json`` from a model folder (needs the ``models`` extra).

    Raises:
        FileNotFoundError: the folder has no ``tokenizer.json``.
    """
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: no tokenizer here")
    return Tokenizer.from_file(str(path))


def held_out_prompts() -> list[Prompt]:
    """Openings of texts that the tiny pair was not trained on, code and prose."""
    lines = (TINY_FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]
