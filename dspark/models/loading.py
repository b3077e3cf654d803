"""Loading of targets and drafters from Hugging Face folders: ``config.json`` and safetensors weights.

What a format means is stated here and in the configurations, never guessed from shapes; whatever does not fit is one
error that names it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.models.config import ARCHITECTURES, ModelConfig, require, token_ids
from dspark.models.draft_network import DrafterConfig, DSparkNetwork
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.models.transformer import CausalLM

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
STORED_DTYPES = ("F32", "F16", "BF16")


def load_target(
    path: str | PathLike[str], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Target:
    """Load a Qwen3, Qwen2 or Llama model.

    Args:
        path: folder with ``config.json``, ``model.safetensors`` (or shards with their index) and, optionally,
            ``generation_config.json``, whose ``eos_token_id`` comes before that of the configuration.
        dtype: what the weights are converted to, whatever the file holds.
        device: where they go.

    Raises:
        FileNotFoundError: the folder, its configuration or its weights are missing.
        ValueError: the architecture is not supported, a file is corrupt, or a tensor is missing, unexpected,
            mis-shaped or of a dtype that is no plain floating point.
    """
    folder = Path(path)
    raw = _read_config(folder)
    config = ModelConfig.from_hf(raw)
    known = [ARCHITECTURES[raw["model_type"]]]
    architectures = raw.get("architectures", known)
    require(architectures == known, f"{folder}: unsupported architectures {architectures!r}; supported: {known!r}")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = token_ids(_read_json(generation).get("eos_token_id"))
        config = dataclasses.replace(config, eos_token_ids=eos or config.eos_token_ids)
    with torch.device("meta"):
        network = CausalLM(config)
    _load_weights(network, folder, dtype, torch.device(device))
    return Target(network)


def load_drafter(path: str | PathLike[str], target: Target) -> DSparkDrafter:
    """Load a drafter in the DeepSpec format (DSpark, or DFlash as ``markov_rank`` 0), for ``target``.

    DeepSpec is anchor-first: see :class:`DSparkDrafter`. Weights take the target's dtype and device.

    Args:
        path: folder with ``config.json`` and weights as in :func:`load_target`.
        target: the target that it drafts for.

    Raises:
        FileNotFoundError: the folder, its configuration or its weights are missing.
        ValueError: another format, a configuration that does not fit the target or itself, or faulty weights.
    """
    folder = Path(path)
    raw = _read_config(folder)
    config = DrafterConfig.from_hf(raw)
    for name, own, wanted in (
        ("hidden_size", config.model.hidden_size, target.config.hidden_size),
        ("vocab_size", config.model.vocab_size, target.config.vocab_size),
        ("num_target_layers", config.num_target_layers, target.config.num_hidden_layers),
    ):
        require(own == wanted, f"{folder}: the drafter's {name} is {own}, but the target has {wanted}")
    with torch.device("meta"):
        network = DSparkNetwork(config)
    _load_weights(network, folder, target.dtype, target.device)
    return DSparkDrafter(network, slots="anchor-first")


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    config = folder / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{folder} has no config.json")
    return _read_json(config)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(content).__name__}")
    return content


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ValueError(f"{folder / INDEX} has no weight_map")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise FileNotFoundError(f"{folder} lacks shards that its index names: {_some(absent)}")
    return files


class _Stored(NamedTuple):
    """A tensor's header."""

    file: Path
    shape: list[int]
    dtype: str


def _load_weights(network: CausalLM | DSparkNetwork, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Fill a network that was built on the meta device.

    All names, shapes and dtypes are checked from the headers before any weight is read. Weights are read one tensor at
    a time, so the network is the only full copy; it is a copy, since weights that stay mapped would change with the
    file.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading weights needs safetensors: pip install 'dspark[models]'") from error

    stored: dict[str, _Stored] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (a reader is no mapping)
                    header = reader.get_slice(name)
                    stored[name] = _Stored(file, list(header.get_shape()), header.get_dtype())
        except SafetensorError as error:
            raise ValueError(f"{file} is truncated or corrupt: {error}") from error
    parameters = dict(network.named_parameters())
    # A tied head is a second name of one parameter, which a file may or may not repeat.
    aliases = network.state_dict().keys() - parameters.keys()
    _check_headers(folder, {name: list(p.shape) for name, p in parameters.items()}, aliases, stored)

    weights: dict[str, Tensor] = {}
    for name in parameters:
        # Opened anew each time, so that no more than this tensor of the file stays mapped beside the copies.
        with safe_open(stored[name].file, framework="pt") as reader:
            weights[name] = reader.get_tensor(name).to(device=device, dtype=dtype, copy=True)
    network.load_state_dict(weights, strict=False, assign=True)
    network.tie_weights()
    network.to(device).requires_grad_(False)


def _check_headers(
    folder: Path, shapes: Mapping[str, list[int]], aliases: Collection[str], stored: Mapping[str, _Stored]
) -> None:
    found = {name: stored[name] for name in shapes if name in stored}
    faults = {
        "missing tensors": [name for name in shapes if name not in stored],
        # Old files store rotary frequencies, which follow from the configuration.
        "unexpected tensors": [
            name for name in stored if not (name in shapes or name in aliases or name.endswith(".rotary_emb.inv_freq"))
        ],
        "mis-shaped tensors": [
            f"{name} is {header.shape}, expected {shapes[name]}"
            for name, header in found.items()
            if header.shape != shapes[name]
        ],
        f"tensors must be {', '.join(STORED_DTYPES)}": [
            f"{name} ({header.dtype})" for name, header in found.items() if header.dtype not in STORED_DTYPES
        ],
    }
    for fault, names in faults.items():
        require(not names, f"{folder}: {fault}: {_some(names)}")


def _some(items: list[str], limit: int = 5) -> str:
    """The first few of a list for a message."""
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + rest
