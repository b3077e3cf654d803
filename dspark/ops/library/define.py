"""How an op becomes ``torch.ops.dspark.*``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.ops.op import _library


def define(name: str, schema: str, implementation: Callable[..., None]) -> None:
    """Register ``torch.ops.dspark.<name>``, an op that writes into tensors that its caller allocates."""
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dspark::{name}", _nothing, lib=_library)


def _nothing(*_: object) -> None:
    """What an op does to fake tensors: its results have the shapes that the caller gave them."""
