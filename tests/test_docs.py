"""What the documents name is there: the files they link to, and the functions of the tables of places."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING"))]

_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
_PLACE = re.compile(r"`((?:dspark|tests|benchmarks)/[\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?")


def dead_links(document: Path) -> list[str]:
    """The links of a document to a file or a heading that does not exist."""
    dead = []
    for file, heading in _LINK.findall(_CODE.sub("", document.read_text(encoding="utf-8"))):
        target = document.parent / file if file else document
        if not target.exists() or (heading and heading not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(f"{file}#{heading}")
    return dead


def anchors(text: str) -> set[str]:
    """The headings of a document as GitHub addresses them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def lost_places(text: str) -> list[str]:
    """Files that a text names and that do not exist, and of ``file.py: name`` the names that are not defined there.

    A capital word stands for any: ``FAMILY``, ``NAME``.
    """
    lost = []
    for file, names in _PLACE.findall(text):
        if re.search("[A-Z]{2}", file):
            continue
        if not (ROOT / file).exists():
            lost.append(file)
            continue
        source = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names):
            if not re.search(rf"^\s*(?:def|class) {name}\b|^{name} =", source, flags=re.MULTILINE):
                lost.append(f"{file}: {name}")
    return lost


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document: Path) -> None:
    assert dead_links(document) == []
    assert lost_places(document.read_text(encoding="utf-8")) == []


def test_what_is_lost_is_seen(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    links = "[a](page.md#a-page-of-two) [b](gone.md) [c](#none) [d](https://e.org) `e[0](f)`"
    document.write_text(f"# A page: of `two`\n{links}")
    assert dead_links(document) == ["gone.md#", "#none"]
    text = "`dspark/gone.py`, `dspark/ops/types.py`: `Sampling`, `Gone`; `tests/test_docs.py`, `dspark/policy/NAME.py`"
    assert lost_places(text) == ["dspark/gone.py", "dspark/ops/types.py: Gone"]
