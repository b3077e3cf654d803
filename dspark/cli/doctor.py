"""``doctor``: what this machine has, and which backend each op takes on it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

EXTRAS = {
    "models": ("huggingface_hub", "safetensors", "tokenizers"),
    "cli": ("rich", "typer"),
    "plot": ("matplotlib",),
}
"""Optional extras and the packages that each brings."""

app = typer.Typer(add_completion=False)


def report() -> dict[str, Any]:
    """Everything that the command shows, ready for JSON."""
    import torch

    import dspark
    from dspark import ops
    from dspark.ops.op import OPS

    return {
        "dspark": dspark.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip},
        "triton": installed("triton"),
        "devices": devices(),
        "extras": {extra: {name: installed(name) for name in names} for extra, names in EXTRAS.items()},
        "ops": {
            name: {device: backend(name, device) for device in ("cpu", "cuda")} for name in ops.__all__ if name in OPS
        },
    }


def installed(distribution: str) -> str | None:
    """The installed version of a package, read from its metadata without importing it; None when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[str]:
    """Every device that torch can use here, the CPU first."""
    import torch

    found = [f"cpu ({torch.get_num_threads()} threads)"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)")
    return found


def backend(op: str, device: str) -> str:
    """What ``backend="auto"`` means for ``op`` on a device type, whether or not this machine has such a device."""
    import torch

    from dspark.ops.op import OPS

    return OPS[op].choose("auto", torch.device(device))


def _table(found: dict[str, Any]) -> Table:
    table = Table("", "found", title=f"dspark {found['dspark']}", title_justify="left")
    build = found["torch"]
    table.add_row("python", found["python"])
    table.add_row("platform", found["platform"])
    table.add_row("torch", build["version"])
    table.add_row("CUDA / HIP build", f"{build['cuda'] or 'none'} / {build['hip'] or 'none'}")
    table.add_row("triton", found["triton"] or "missing")
    table.add_row("devices", "\n".join(found["devices"]), end_section=True)
    for extra, packages in found["extras"].items():
        lines = [f"{name} {version or 'missing'}" for name, version in packages.items()]
        if None in packages.values():
            lines.append(f'pip install "dspark\\[{extra}]"')
        table.add_row(f"extra: {extra}", "\n".join(lines), end_section=extra == "plot")
    for op, taken in found["ops"].items():
        table.add_row(f"op: {op}", f"CPU tensors: {taken['cpu']}, CUDA tensors: {taken['cuda']}")
    return table


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Show versions, devices, extras, and which backend each op takes."""
    found = report()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(_table(found))
