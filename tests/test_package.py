"""What an install gives: how light the import is, what the wheel holds, and that the pins agree."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dspark

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dspark"

IMPORT_SECONDS = 2.0
OPTIONAL_MODULES = {
    "huggingface_hub", "safetensors", "tokenizers", "typer", "rich", "matplotlib",
    "transformers", "hypothesis", "pytest", "scipy",
}  # fmt: skip

USE_EVERY_PUBLIC_NAME = "import dspark; [getattr(dspark, name) for name in dspark.__all__]"

FORBID = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL_MODULES!r}:
            raise ModuleNotFoundError(f"refused: {{name}}", name=name)

def no_network(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"refused: {{event}}")

sys.meta_path.insert(0, Refuse())
sys.addaudithook(no_network)
"""


def python(code: str) -> str:
    """Run code in a new interpreter that sees no GPU and return what it printed."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, str]:
    """Package -> version in constraints.txt, on this Python and platform."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for line in lines:
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        assert canonicalize_name(requirement.name) not in found, f"{requirement.name} is pinned twice"
        found[canonicalize_name(requirement.name)] = specifier.version
    return found


def test_the_public_names_import_within_the_budget() -> None:
    """Beyond torch's own import, in processor time: on a starved machine the wall clock measures the neighbours."""
    code = f"import time, torch; t = time.process_time(); {USE_EVERY_PUBLIC_NAME}; print(time.process_time() - t)"
    tries = [float(python(code)) for _ in range(2)]
    assert min(tries) < IMPORT_SECONDS, tries


def test_a_bare_import_does_not_load_torch() -> None:
    assert python("import dspark, sys; print('torch' in sys.modules)") == "False\n"


def test_the_public_names_need_only_the_base_dependencies_and_no_network() -> None:
    python(f"{FORBID}\n{USE_EVERY_PUBLIC_NAME}\nimport dspark.kernels, dspark.ops, dspark.policy")


@pytest.mark.parametrize("module", ["rich", "safetensors.torch"])
def test_the_import_guard_refuses_what_it_should(module: str) -> None:
    with pytest.raises(AssertionError, match=f"refused: {module.partition('.')[0]}"):
        python(f"{FORBID}\nimport {module}")


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        dspark.NoSuchName  # noqa: B018


def test_dir_lists_the_public_names_before_they_are_used() -> None:
    listed = json.loads(python("import dspark, json; print(json.dumps(dir(dspark)))"))
    assert set(dspark.__all__) <= set(listed)


def run(*command: str, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def unpacked_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a source distribution holds, in a folder of its own."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"dspark-{dspark.__version__}"


@pytest.fixture(scope="module")
def wheel(unpacked_sdist: Path) -> Path:
    """Built from the source distribution, as pip does."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist", cwd=unpacked_sdist)
    (found,) = (unpacked_sdist / "dist").glob("*.whl")
    assert found.name.startswith(f"dspark-{dspark.__version__}-py3-none-any")
    return found


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("name", ["examples/minimal_engine.py", "Makefile", "constraints.txt", "tests/conftest.py"])
def test_the_source_distribution_holds_what_the_two_commands_need(unpacked_sdist: Path, name: str) -> None:
    assert (unpacked_sdist / name).exists()


def test_the_wheel_installs_and_decodes_on_its_own(wheel: Path, tmp_path: Path) -> None:
    """In a new environment that shares only what the package depends on, from a folder that is no checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=tmp_path)
    new = str(tmp_path / "venv/bin/python")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        new,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(wheel),
        cwd=tmp_path,
    )
    packages = Path(run(new, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    below = sysconfig.get_path("purelib")
    (packages / "below.pth").write_text(f"import sys; sys.path.append({below!r})\n")
    assert Path(run(new, "-c", "import dspark; print(dspark.__file__)", cwd=tmp_path).strip()).is_relative_to(packages)
    assert run(new, "-m", "dspark", "generate", "import os", "--max-tokens", "4", cwd=tmp_path).strip()


def test_the_wheel_holds_every_file_of_the_package(wheel_names: set[str]) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    files = {name for name in files if "/__pycache__/" not in name}
    assert "dspark/py.typed" in files
    assert {name for name in wheel_names if name.startswith("dspark/")} == files


@pytest.mark.parametrize("model", ["target", "drafter"])
def test_the_wheel_holds_the_tiny_pair(wheel_names: set[str], model: str) -> None:
    folder = f"dspark/models/tiny/{model}/"
    assert folder + "config.json" in wheel_names
    assert any(name.startswith(folder) and name.endswith(".safetensors") for name in wheel_names)


def test_the_wheel_holds_its_licence(wheel_names: set[str]) -> None:
    assert f"dspark-{dspark.__version__}.dist-info/licenses/LICENSE" in wheel_names


def test_every_dependency_of_the_project_is_pinned() -> None:
    """Direct and transitive, as installed here; what NVIDIA ships is pinned by torch's own requirements."""
    pinned = pins()
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    waiting = [Requirement(text) for text in [*project["dependencies"], *(r for rs in extras.values() for r in rs)]]
    seen: set[tuple[str, str]] = set()
    missing: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name == "dspark" or name.startswith(("nvidia-", "cuda-")):
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name not in pinned:
            missing.add(name)
            continue
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in importlib.metadata.requires(name) or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({**default_environment(), "extra": extra}):
                    needed.marker = None
                    waiting.append(needed)
    assert not missing
    assert len(seen) > 50


def test_pre_commit_runs_the_pinned_tools() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"], "a remote hook would carry a revision of its own"
    hooks = {hook["id"]: hook for hook in config["repos"][0]["hooks"]}
    assert hooks.keys() == {"ruff-check", "ruff-format", "mypy"}
    for name in ("ruff-check", "ruff-format"):
        assert hooks[name]["additional_dependencies"] == [f"ruff=={pins()['ruff']}"]
    assert hooks["mypy"]["language"] == "system"
    assert hooks["mypy"]["entry"].startswith(".venv/bin/python -m mypy")


def test_the_changelog_names_the_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[0] == dspark.__version__
