"""A tree as the library's ops take it."""

from __future__ import annotations

from torch import Tensor

from dspark.ops.types import Tree
