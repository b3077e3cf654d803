"""Rules that the sources keep, read from the sources: which module imports which, and what no file may hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dspark

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dspark"
MAX_LINES = 400

ARROWS = ("cli", "integrations", "decode", "models policy", "ops", "kernels")
"""Each layer may import those after it; the two that stand together know nothing of each other."""

DECODE = {"admission", "batch", "decode", "measure", "processing", "requests"}
"""The modules of which the layer ``decode`` is made."""

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
"""Folder or module of the package -> the others that it may import; ``dspark`` is the package itself."""

KERNELS_MAY_IMPORT = {"__future__", "triton", "dspark"}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path.read_text(encoding="utf-8") for path in SOURCES}
"""Name of each module of the package -> its source."""


def imported_modules(source: str, modules: Collection[str] = MODULES.keys()) -> set[str]:
    """Every module that a file imports, wherever in the file: inside functions and for the type checker, too.

    ``from dspark.ops import cache`` is ``dspark.ops.cache`` if that is one of the modules, else ``dspark.ops``. Of the
    package's own public names, which are loaded when they are used, it is the module behind.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                behind = dspark._MODULE_OF.get(alias.name) if node.module == "dspark" else None
                found.add(inner if inner in modules else behind or node.module)
    return found


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


def import_graph(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> those that have to be imported before it is: what it names, and the packages that these are in.

    A package that the module itself is in does not count, unless the module names it: its import has begun by then.
    """
    graph: dict[str, set[str]] = {}
    for name, source in modules.items():
        around = packages_of(name)
        named = imported_modules(source, modules.keys()) & modules.keys()
        run = {package for module in named for package in packages_of(module)} - around
        graph[name] = (named | (run & modules.keys())) - {name}
    return graph


def packages_of(module: str) -> set[str]:
    """The packages that a module is in, itself included."""
    parts = module.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Circles of imports, each as modules of which every one imports the next; without them there would be none."""
    left, found = {module: set(imports) for module, imports in graph.items()}, []
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            circle: list[str] = error.args[1][::-1]
            found.append(circle)
            left[circle[0]].remove(circle[1])
        else:
            return found


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


def test_the_table_keeps_to_the_arrows() -> None:
    rank = {name: place for place, names in enumerate(ARROWS) for name in names.split()}
    rank |= dict.fromkeys(DECODE, rank["decode"]) | dict.fromkeys(("__init__", "__main__", "dspark"), -1)
    for layer, others in MAY_IMPORT.items():
        if layer == "testing":  # tools, which nothing but the command line imports
            continue
        for other in others - {"testing", "dspark"}:
            assert rank[layer] < rank[other] or {layer, other} <= DECODE, f"{layer} -> {other}"
    importers = {layer for layer, others in MAY_IMPORT.items() if "testing" in others or "dspark" in others}
    assert importers == {"cli"}


def test_no_module_is_imported_in_a_circle() -> None:
    assert circles(import_graph(MODULES)) == []


@pytest.mark.parametrize(
    ("modules", "circle"),
    [
        pytest.param(
            {"dspark.a": "import dspark.b", "dspark.b": "from dspark.c import f", "dspark.c": "from dspark import a"},
            {"dspark.a", "dspark.b", "dspark.c"},
            id="three",
        ),
        pytest.param(
            {"dspark.a": "from dspark.b import f", "dspark.b": "def f():\n    from dspark.a import g"},
            {"dspark.a", "dspark.b"},
            id="in a function",
        ),
        pytest.param(
            {
                "dspark.ops": "from dspark.ops.cache import append",
                "dspark.ops.cache": "from dspark.ops.cache.launch import plan",
                "dspark.ops.cache.launch": "from dspark.ops import append",
            },
            {"dspark.ops", "dspark.ops.cache", "dspark.ops.cache.launch"},
            id="a package from inside",
        ),
        pytest.param(
            {
                "dspark.ops.a": "from dspark.ops.b import f",
                "dspark.ops.b": "from dspark.ops.c.inner import g",
                "dspark.ops.c": "from dspark.ops.a import h",
                "dspark.ops.c.inner": "",
            },
            {"dspark.ops.a", "dspark.ops.b", "dspark.ops.c"},
            id="through the package of what is imported",
        ),
    ],
)
def test_a_circle_is_seen(modules: dict[str, str], circle: set[str]) -> None:
    (found,) = circles(import_graph(modules))
    assert set(found) == circle
    assert found[0] == found[-1]


def test_every_circle_is_seen() -> None:
    two = {"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c", "a"}}
    assert sorted(map(sorted, map(set, circles(two)))) == [["a", "b"], ["c", "d"]]


def test_what_is_no_circle_passes() -> None:
    """A package of what it exports, siblings in it, and a diamond."""
    modules = {
        "dspark.ops": "from dspark.ops.cache import append",
        "dspark.ops.cache": "from dspark.ops.cache.launch import plan\nfrom dspark.ops.types import PagedKV",
        "dspark.ops.cache.launch": "from dspark.ops.types import PagedKV",
        "dspark.ops.types": "import torch",
    }
    assert circles(import_graph(modules)) == []


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
