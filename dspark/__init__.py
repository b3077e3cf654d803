"""Speculative decoding as reusable parts: drafting, confidence-scheduled verification, lossless acceptance.

Importing the package loads nothing heavy; each public name brings in its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.decode import Decoder
    from dspark.models import load_drafter, load_target, tiny_pair
    from dspark.policy import ConfidenceScheduled, CostProfile, FixedK, Oracle
    from dspark.requests import Completion, SamplingParams

__version__ = "0.1.0"

_MODULE_OF = {
    "Completion": "dspark.requests",
    "ConfidenceScheduled": "dspark.policy",
    "CostProfile": "dspark.policy",
    "Decoder": "dspark.decode",
    "FixedK": "dspark.policy",
    "Oracle": "dspark.policy",
    "SamplingParams": "dspark.requests",
    "load_drafter": "dspark.models",
    "load_target": "dspark.models",
    "tiny_pair": "dspark.models",
}

__all__ = [
    "Completion",
    "ConfidenceScheduled",
    "CostProfile",
    "Decoder",
    "FixedK",
    "Oracle",
    "SamplingParams",
    "__version__",
    "load_drafter",
    "load_target",
    "tiny_pair",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dspark' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
