"""Every tolerance that a test uses, with its reason."""

from __future__ import annotations

LOGITS = 1e-4
"""Hidden states, logits and confidences in float32 against another implementation (absolute)."""

LOGPROBS = 1e-5
"""Log-probabilities in float32 against float64 (absolute)."""

LAW = 1e-9
"""Total variation between two laws that are computed exactly in float64."""

CUT = 1e-5
"""Probability mass within which two float32 computations may disagree about the token on a top-p or min-p edge."""

CHI_SQUARE = 1e-4
"""A chi-square test fails below this p-value. The seeds are fixed, so a pass never turns into a failure by chance."""

SIGMAS = 5.0
"""Standard errors that an estimated mean or correlation may lie from its true value (seeds are fixed here too)."""

ATTENTION = 2e-5
"""Attention outputs and log-sum-exps in float32 against float64, of unit-normal inputs (absolute)."""

SILICON_DECISIONS = 1 / 32
"""Share of requests whose verdict on a GPU may differ from the reference's on a CPU: an exponential is rounded the
other way there, and a draw lies within that rounding of the edge between two tokens."""
