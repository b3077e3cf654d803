"""Checkpoint folders: what loads, and the one clear error of each that does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.models import Target, load_drafter, load_target, query_batch
from tests.models.helpers import close, random_hf_model, scattered_table

GOLDEN = Path(__file__).parents[1] / "golden"
Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(GOLDEN / "target")


def copy(source: str, tmp_path: Path) -> Path:
    folder = tmp_path / source
    folder.mkdir()
    for file in (GOLDEN / source).iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def config(**changes: Any) -> Edit:
    """Change keys of config.json; None removes one."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        raw = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))

    return edit


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Edit:
    """Change the tensors of model.safetensors in place."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        change(weights)
        path.unlink()
        save_file(weights, path)

    return edit


def remove(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Edit:
    return lambda folder: (folder / name).write_text(text) and None


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])


def shard(folder: Path, split: int = 20) -> None:
    """Split model.safetensors in two files and an index, as transformers does."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:split], "model-00002-of-00002.safetensors": names[split:]}
    for file, part in parts.items():
        save_file({name: weights[name].clone() for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def logits(target: Target) -> Tensor:
    """Logits of a short text, ``[9, V]``."""
    table = scattered_table(1, 9, 4)
    batch = query_batch(table, torch.tensor([0]), [9], 4)
    hidden, _ = target.forward(torch.arange(3, 12), batch, target.new_cache(4, 4))
    return target.logits(hidden)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_what_transformers_saves_loads(tmp_path: Path, model_type: str, max_shard_size: str, tied: bool) -> None:
    model = random_hf_model(model_type, {"tie_word_embeddings": tied})
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    loaded = load_target(str(tmp_path))
    with torch.no_grad():
        expected = model(torch.arange(3, 12)[None]).logits[0]
    close(logits(loaded), expected)
    assert (loaded.network.lm_head.weight is loaded.network.model.embed_tokens.weight) == tied


def test_weights_take_the_dtype_asked_for(tmp_path: Path) -> None:
    folder = copy("target", tmp_path)
    tensors(lambda w: w.update({name: t.bfloat16() for name, t in w.items()}))(folder)
    wide, narrow = load_target(folder), load_target(GOLDEN / "target", dtype=torch.bfloat16)
    assert {p.dtype for p in wide.network.parameters()} == {torch.float32}
    assert {p.dtype for p in narrow.network.parameters()} == {torch.bfloat16}
    for a, b in zip(wide.network.parameters(), narrow.network.parameters(), strict=True):
        assert torch.equal(a, b.float())
    drafter = load_drafter(GOLDEN / "draft_rnn", narrow)
    assert {p.dtype for p in drafter.network.parameters()} == {torch.bfloat16}


def test_weights_are_real_frozen_and_do_not_follow_the_file(tmp_path: Path) -> None:
    folder = copy("target", tmp_path)
    loaded = load_target(folder)
    before = logits(loaded)
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    assert torch.equal(logits(loaded), before)
    assert all(p.device.type == "cpu" and not p.requires_grad for p in loaded.network.parameters())


def test_shards_load_like_one_file(tmp_path: Path, target: Target) -> None:
    folder = copy("target", tmp_path)
    shard(folder)
    assert torch.equal(logits(load_target(folder)), logits(target))


@pytest.mark.parametrize(
    ("generation", "own", "expected"),
    [
        ({"eos_token_id": [5, 6]}, 4, (5, 6)),
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": 0}, 4, (0,)),
        ({}, 4, (4,)),
        (None, [4, 7], (4, 7)),
        (None, None, ()),
    ],
)
def test_end_tokens(tmp_path: Path, generation: dict[str, Any] | None, own: Any, expected: tuple[int, ...]) -> None:
    folder = copy("target", tmp_path)
    config(eos_token_id=own)(folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load_target(folder).config.eos_token_ids == expected


def test_tensors_that_follow_from_others_are_ignored(tmp_path: Path, target: Target) -> None:
    """Old files store rotary frequencies; a tied model may store its head again."""
    folder = copy("target", tmp_path)
    tensors(lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(12)}))(folder)
    assert torch.equal(logits(load_target(folder)), logits(target))
    config(tie_word_embeddings=True)(folder)
    network = load_target(folder).network
    assert torch.equal(network.lm_head.weight, target.network.model.embed_tokens.weight)


def add(name: str, tensor: Tensor) -> Edit:
    return tensors(lambda w: w.update({name: tensor}))


FAULTS: dict[str, tuple[Edit, type[Exception], str]] = {
    "folder": (shutil.rmtree, FileNotFoundError, "no such folder"),
    "config": (remove("config.json"), FileNotFoundError, "has no config.json"),
    "config_json": (write("config.json", "{"), ValueError, "config.json is not valid JSON"),
    "config_kind": (write("config.json", "[]"), ValueError, "must hold a JSON object"),
    "weights": (remove("model.safetensors"), FileNotFoundError, "neither model.safetensors nor"),
    "truncated": (truncate, ValueError, "model.safetensors is truncated or corrupt"),
    "empty": (write("model.safetensors", ""), ValueError, "model.safetensors is truncated or corrupt"),
    "vocabulary": (config(vocab_size=321), ValueError, r"embed_tokens.weight is \[320, 64\], expected \[321, 64\]"),
}
TARGET_FAULTS = {
    **FAULTS,
    "model_type": (config(model_type="mamba"), ValueError, "model_type 'mamba'"),
    "architecture": (config(architectures=["Qwen3ForSequenceClassification"]), ValueError, "architectures"),
    "rope": (config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), ValueError, "rope_type 'dynamic'"),
    "missing": (tensors(lambda w: w.pop("model.norm.weight")), ValueError, "missing tensors: model.norm.weight"),
    "layers": (config(num_hidden_layers=7, layer_types=None), ValueError, r"missing tensors: .* and 17 more"),
    "unexpected": (add("model.extra", torch.zeros(1)), ValueError, "unexpected tensors: model.extra"),
    "shape": (
        add("model.norm.weight", torch.zeros(63)),
        ValueError,
        r"mis-shaped tensors: model.norm.weight is \[63\], expected \[64\]",
    ),
    "quantised": (
        add("model.norm.weight", torch.zeros(64, dtype=torch.int8)),
        ValueError,
        r"must be F32, F16, BF16: model.norm.weight \(I8\)",
    ),
}
DRAFTER_FAULTS = {
    **FAULTS,
    "vocabulary": (config(vocab_size=321), ValueError, "drafter's vocab_size is 321, but the target has 320"),
    "hidden": (config(hidden_size=32), ValueError, "drafter's hidden_size is 32, but the target has 64"),
    "depth": (config(num_target_layers=6), ValueError, "drafter's num_target_layers is 6, but the target has 5"),
    "head_absent": (config(markov_head_type=None), ValueError, "lacks markov_head_type"),
    "rank_absent": (config(markov_rank=None), ValueError, "lacks markov_rank"),
    "confidence_absent": (config(confidence_head_with_markov=None), ValueError, "lacks confidence_head_with_markov"),
    "missing": (
        tensors(lambda w: w.pop("markov_head.joint_proj.bias")),
        ValueError,
        "missing tensors: markov_head.joint_proj.bias",
    ),
    "other_head": (config(markov_head_type="gated"), ValueError, "missing tensors: markov_head.gate_proj.weight"),
    "no_head": (
        config(markov_rank=0, confidence_head_with_markov=False),
        ValueError,
        "unexpected tensors: markov_head.joint_proj.bias",
    ),
    "features": (
        config(target_layer_ids=[1, 3]),
        ValueError,
        r"mis-shaped tensors: fc.weight is \[64, 192\], expected \[64, 128\]",
    ),
}


@pytest.mark.parametrize("fault", TARGET_FAULTS)
def test_faulty_targets_raise(tmp_path: Path, fault: str) -> None:
    edit, error, message = TARGET_FAULTS[fault]
    folder = copy("target", tmp_path)
    edit(folder)
    with pytest.raises(error, match=message):
        load_target(folder)


@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
def test_faulty_drafters_raise(tmp_path: Path, target: Target, fault: str) -> None:
    edit, error, message = DRAFTER_FAULTS[fault]
    folder = copy("draft_rnn", tmp_path)
    edit(folder)
    with pytest.raises(error, match=message):
        load_drafter(folder, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({"architectures": ["Eagle3DraftModel"]}, "Eagle3DraftModel"),
        ({"architectures": None, "speculators_model_type": "dspark"}, "speculators"),
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"dspark_block_size": 5}, "dspark_block_size"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size"),
    ],
)
def test_p10_other_formats_raise(tmp_path: Path, target: Target, change: dict[str, Any], message: str) -> None:
    """A block of another slot convention has the same tensors and drafts badly, silently."""
    folder = copy("draft_vanilla", tmp_path)
    config(**change)(folder)
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, target)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (remove("model-00002-of-00002.safetensors"), FileNotFoundError, "model-00002-of-00002.safetensors"),
        (write("model.safetensors.index.json", "{}"), ValueError, "no weight_map"),
        (write("model-00001-of-00002.safetensors", "x"), ValueError, "00001-of-00002.safetensors is truncated"),
    ],
)
def test_faulty_shards_raise(tmp_path: Path, edit: Edit, error: type[Exception], message: str) -> None:
    folder = copy("target", tmp_path)
    shard(folder)
    edit(folder)
    with pytest.raises(error, match=message):
        load_target(folder)


def test_roles_cannot_be_swapped(target: Target) -> None:
    with pytest.raises(ValueError, match="Qwen3DSparkModel"):
        load_target(GOLDEN / "draft_rnn")
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        load_drafter(GOLDEN / "target", target)
