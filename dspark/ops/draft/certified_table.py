"""The likeliest successors of every token under a Markov head: built once for a checkpoint, and kept beside it."""

from __future__ import annotations

import hashlib
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.ops.types import MarkovHead

TABLE_FILE = "bias_table.safetensors"
_VERSION = "1"


class BiasTable(NamedTuple):
    """The largest biases of each previous token, and a bound on the others.

    Attributes:
        tokens: ``[V, M]`` int32, the tokens with the largest ``B(x, .)``.
        biases: ``[V, M]`` float32, their biases.
        bound: ``[V]`` float32, the largest of the others; -inf where there are none.
        norm: ``[V]`` float32, at least ``|B(x, v)|`` of every token ``v`` (Cauchy and Schwarz); what sums in another
            order may differ by is a fraction of it.
    """

    tokens: Tensor
    biases: Tensor
    bound: Tensor
    norm: Tensor


@torch.no_grad()
def build_bias_table(head: MarkovHead, *, top_m: int = 64, chunk: int = 1024) -> BiasTable:
    """Compute the table, ``chunk`` previous tokens at a time: ``2 V^2 r`` operations, ``8 V M`` bytes.

    Args:
        head: a Markov head; its weights' device is where the table is computed and lies.
        top_m: ``M``; at most ``V`` are kept.
        chunk: previous tokens at a time, each of which takes ``4 V`` bytes.

    Raises:
        TypeError: another kind of head, whose bias is no function of the previous token.
        ValueError: ``top_m`` or ``chunk`` is not positive.

    >>> table = build_bias_table(MarkovHead(torch.eye(3), torch.tensor([[1., 0, 0], [3, 0, 0], [2, 5, 0]])), top_m=2)
    >>> table.tokens[0].tolist(), table.biases[0].tolist(), table.bound[0].item()
    ([1, 2], [3.0, 2.0], 1.0)
    """
    if not isinstance(head, MarkovHead):
        raise TypeError(f"head: expected a MarkovHead, got {type(head).__name__}")
    if top_m < 1 or chunk < 1:
        raise ValueError(f"top_m, chunk: expected at least 1, got {top_m} and {chunk}")
    w1, w2 = head.w1, head.w2.float()
    vocab_size = w2.shape[0]
    top_m = min(top_m, vocab_size)
    tokens, biases, bounds = [], [], []
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        for part in torch.split(w1, chunk):
            top = (part.float() @ w2.T).topk(min(top_m + 1, vocab_size), dim=-1)
            tokens.append(top.indices[:, :top_m].int())
            biases.append(top.values[:, :top_m].contiguous())
            bound = top.values[:, top_m] if top_m < vocab_size else top.values.new_full((len(part),), -torch.inf)
            bounds.append(bound.contiguous())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    widest = w2.double().square().sum(-1).sqrt().max()
    norm = (w1.double().square().sum(-1).sqrt() * widest * (1 + 2.0**-20)).float()
    return BiasTable(torch.cat(tokens), torch.cat(biases), torch.cat(bounds), norm)


def save_bias_table(table: BiasTable, head: MarkovHead, path: str | PathLike[str]) -> None:
    """Write a table as safetensors (needs the ``models`` extra), with a checksum of the weights that it was built of.

    Args:
        table: of ``head``.
        head: its weights are read, and brought to the host.
        path: of the file.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu().contiguous() for name, tensor in table._asdict().items()}
    save_file(tensors, str(path), metadata={"version": _VERSION, "weights": checksum(head)})


def load_bias_table(head: MarkovHead, path: str | PathLike[str], *, top_m: int) -> BiasTable:
    """Read a table, and see that it belongs to ``head``; it lies on the device of the head's weights.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is another file, of other weights, or has another ``M``.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no bias table here")
    try:
        with safe_open(str(path), framework="pt", device=str(head.w1.device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from error
    names = set(BiasTable._fields)
    if metadata.get("version") != _VERSION or tensors.keys() != names:
        raise ValueError(f"{path}: not a bias table of version {_VERSION}")
    if metadata.get("weights") != checksum(head):
        raise ValueError(f"{path}: a table of other weights; build it again")
    wanted = min(top_m, head.w2.shape[0])
    if tensors["tokens"].shape != (head.w1.shape[0], wanted):
        raise ValueError(f"{path}: expected {wanted} biases per token, got {tensors['tokens'].shape[-1]}")
    return BiasTable(**tensors)


def cached_bias_table(head: MarkovHead, folder: str | PathLike[str], *, top_m: int = 64) -> BiasTable:
    """The table in a checkpoint's folder, built and written there if there is none, or one of other weights or size."""
    path = Path(folder) / TABLE_FILE
    if path.is_file():
        try:
            return load_bias_table(head, path, top_m=top_m)
        except ValueError:
            pass
    table = build_bias_table(head, top_m=top_m)
    save_bias_table(table, head, path)
    return table


def checksum(head: MarkovHead) -> str:
    """SHA-256 of the weights' shapes, dtypes and bits."""
    digest = hashlib.sha256()
    for tensor in (head.w1, head.w2):
        digest.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
