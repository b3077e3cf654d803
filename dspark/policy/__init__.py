"""Policies: how many drafts each request verifies, and what they need to know."""

from dspark.policy.bandit import Bandit
from dspark.policy.cost import CostProfile
from dspark.policy.fixed import FixedK
from dspark.policy.gated import DraftGate, Gated, NoSpeculation
from dspark.policy.goodput import Goodput
from dspark.policy.oracle import DistributionOracle, Oracle
from dspark.policy.protocol import Outcome, Signals, VerifyPolicy
from dspark.policy.roofline import H200, RTX_4090, Hardware, ModelSize, roofline_profile
from dspark.policy.scheduled import ConfidenceScheduled
from dspark.policy.step_cost import StepCost
from dspark.policy.threshold import ConfidenceThreshold
from dspark.policy.tracked import TrackedProfile

__all__ = [
    "H200",
    "RTX_4090",
    "Bandit",
    "ConfidenceScheduled",
    "ConfidenceThreshold",
    "CostProfile",
    "DistributionOracle",
    "DraftGate",
    "FixedK",
    "Gated",
    "Goodput",
    "Hardware",
    "ModelSize",
    "NoSpeculation",
    "Oracle",
    "Outcome",
    "Signals",
    "StepCost",
    "TrackedProfile",
    "VerifyPolicy",
    "roofline_profile",
]
