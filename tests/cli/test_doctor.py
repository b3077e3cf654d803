"""``python -m dspark``: the command line starts quickly, and ``doctor`` tells the truth about the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dspark
from dspark import ops
from dspark.cli import doctor
from dspark.cli.app import COMMANDS, app

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """``python -m dspark`` in a new interpreter, after some code; its last line of output says if torch was loaded."""
    code = (
        f"import atexit, runpy, sys\n{before}\n"
        "atexit.register(lambda: print('torch loaded:', 'torch' in sys.modules))\n"
        f"sys.argv = ['dspark', *{list(arguments)!r}]\n"
        "runpy.run_module('dspark', run_name='__main__')\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def found() -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.output)
    return answer


def test_json_names_the_versions_in_use() -> None:
    answer = found()
    assert answer["dspark"] == dspark.__version__
    assert answer["python"].split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    assert answer["torch"] == {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    assert answer["triton"] == importlib.metadata.version("triton")
    assert answer["devices"][0].startswith("cpu")
    assert len(answer["devices"]) == 1 + torch.cuda.device_count()


def test_every_op_is_listed_with_the_backend_it_takes() -> None:
    answer = found()["ops"]
    assert answer.keys() >= {"accept", "append_kv", "draft_walk", "sample", "schedule_prefix", "verify_attention"}
    assert "PagedKV" not in answer
    for name, taken in answer.items():
        assert callable(getattr(ops, name))
        assert taken["cpu"] == "reference"


def test_an_op_takes_its_kernels_for_cuda_tensors_only() -> None:
    assert doctor.backend("accept", "cuda") == "triton"
    assert doctor.backend("accept", "cpu") == "reference"


def test_the_table_shows_what_json_does() -> None:
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    answer = found()
    for text in (answer["python"], answer["torch"]["version"], answer["triton"], answer["devices"][0], *answer["ops"]):
        assert text in result.output
    assert "missing" not in result.output


def test_a_missing_extra_is_shown_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without_matplotlib(name: str) -> str:
        if name == "matplotlib":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_matplotlib)
    assert found()["extras"]["plot"] == {"matplotlib": None}
    output = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "120"}).output
    assert "matplotlib missing" in output
    assert 'pip install "dspark[plot]"' in output
    assert 'pip install "dspark[models]"' not in output


def test_the_extras_are_those_that_an_install_declares() -> None:
    declared: dict[str, set[str]] = {}
    for extra in doctor.EXTRAS:
        lines = importlib.metadata.requires("dspark") or []
        declared[extra] = {line.split(">=")[0].replace("-", "_") for line in lines if f"extra == '{extra}'" in line}
    own = {extra: set(names) for extra, names in doctor.EXTRAS.items()}
    assert declared == own | {"cli": own["cli"] | own["models"]}


def test_help_lists_the_commands_without_loading_torch() -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("torch loaded: False\n")
    for name, line in COMMANDS.items():
        assert name in done.stdout
        assert line in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_is_its_own(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert f"{command} [OPTIONS]" in result.output


def test_an_unknown_command_is_an_error_that_names_it() -> None:
    done = run("prophesy")
    assert done.returncode == 2
    assert "prophesy" in done.stderr
    assert "Traceback" not in done.stderr


REFUSE = "import dspark.cli.doctor as doctor\ndef refuse(): raise {error}\ndoctor.report = refuse"


@pytest.mark.parametrize("error", ["ValueError('top_p: 2')", "FileNotFoundError(2, 'no such file', 'top_p: 2')"])
def test_input_that_the_library_refuses_is_one_line(error: str) -> None:
    done = run("doctor", before=REFUSE.format(error=error))
    assert done.returncode == 2
    assert done.stderr.startswith("dspark: ")
    assert "top_p: 2" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    done = run("doctor", before=REFUSE.format(error="RuntimeError('broken')"))
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_cli_extra_the_program_says_how_to_get_it(package: str) -> None:
    done = run("doctor", before=f"sys.modules[{package!r}] = None")
    assert done.returncode == 1
    assert 'pip install "dspark[cli]"' in done.stderr
    assert package in done.stderr
    assert "Traceback" not in done.stderr


def test_the_console_script_is_the_same_program() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="dspark")
    assert script.load() is dspark.cli.main
