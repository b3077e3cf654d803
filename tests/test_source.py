"""Rules that the sources keep, read from the sources: which layer imports which, and what no file may hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import dspark

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dspark"
MAX_LINES = 400

MAY_IMPORT = {
    "kernels": set(),
    "ops": {"kernels"},
    "policy": {"ops"},
    "models": {"ops"},
    "testing": {"ops", "policy", "requests"},
    "requests": {"ops"},
    "processing": {"ops", "requests"},
    "batch": {"models", "ops", "processing", "requests"},
    "admission": {"models", "requests"},
    "measure": {"batch", "models", "policy", "requests"},
    "decode": {"admission", "batch", "models", "ops", "policy", "requests"},
    "cli": {"dspark", "decode", "measure", "models", "ops", "policy", "requests", "testing"},
    "__main__": {"cli"},
    "__init__": {"decode", "models", "policy", "requests"},
}
"""Layer (a folder or module of the package) -> the other layers it may import; ``dspark`` is the package itself."""

KERNELS_MAY_IMPORT = {"__future__", "triton", "dspark"}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(source: str) -> set[str]:
    """Every module that a file imports, wherever in the file; ``from dspark import ops`` counts as ``dspark.ops``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            if node.module == "dspark":
                found |= {_behind(alias.name) for alias in node.names}
            else:
                found.add(node.module)
    return found


def _behind(name: str) -> str:
    if name in dspark._MODULE_OF:
        return dspark._MODULE_OF[name]
    is_module = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
    return f"dspark.{name}" if is_module else "dspark"


def forbidden_imports(layer: str, source: str) -> set[str]:
    """The imports of a file that its layer may not make."""
    bad: set[str] = set()
    for module in imported_modules(source):
        top, _, rest = module.partition(".")
        if layer == "kernels" and top not in KERNELS_MAY_IMPORT:
            bad.add(module)
        if top == "dspark" and (rest.partition(".")[0] or "dspark") not in MAY_IMPORT[layer] | {layer}:
            bad.add(module)
    return bad


def layer_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    layer = layer_of(path)
    assert layer in MAY_IMPORT, f"say in MAY_IMPORT what {layer} may import"
    assert not forbidden_imports(layer, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("layer", "source", "bad"),
    [
        ("policy", "from dspark.models.target import Target", "dspark.models.target"),
        ("policy", "def f():\n    from dspark import models", "dspark.models"),
        ("policy", "from dspark import load_target", "dspark.models"),
        ("policy", "import dspark", "dspark"),
        ("policy", "import dspark.kernels.draft.walk", "dspark.kernels.draft.walk"),
        ("models", "from dspark.policy import FixedK", "dspark.policy"),
        ("ops", "from dspark.decode import Decoder", "dspark.decode"),
        ("kernels", "import torch", "torch"),
        ("kernels", "from dspark.ops.types import Draft", "dspark.ops.types"),
        ("testing", "from dspark.decode import Decoder", "dspark.decode"),
        ("decode", "from dspark.cli import main", "dspark.cli"),
    ],
)
def test_an_import_against_the_arrows_is_seen(layer: str, source: str, bad: str) -> None:
    assert forbidden_imports(layer, source) == {bad}


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("kernels", "from __future__ import annotations\nimport triton\nfrom dspark.kernels import noise"),
        ("ops", "import torch\nfrom dspark.kernels.draft.walk import walk_kernel"),
        ("policy", "from dspark.ops import schedule_prefix"),
        ("cli", "from dspark import __version__, load_target"),
    ],
)
def test_an_import_along_the_arrows_passes(layer: str, source: str) -> None:
    assert forbidden_imports(layer, source) == set()


REMOVED_FROM_TRITON = re.compile(r"\bmake_block_ptr\b|\btl\.advance\b")


@pytest.mark.parametrize("path", [*SOURCES, *sorted((ROOT / "benchmarks").rglob("*.py"))], ids=name_of)
def test_nothing_uses_block_pointers(path: Path) -> None:
    """Triton removed them."""
    assert not REMOVED_FROM_TRITON.search(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("line", ["p = tl.make_block_ptr(base)", "p = tl.advance(p, (0, 64))"])
def test_block_pointers_are_seen(line: str) -> None:
    assert REMOVED_FROM_TRITON.search(line)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
