"""Policies: how many drafts each request verifies, and what they need to know."""

from dspark.policy.bandit import Bandit
from dspark.policy.calibration import SequentialTemperatures, fit_sts
from dspark.policy.confidence import ConfidenceProvider, ConstantConfidence, Tempered, TrainedHead, WithConfidence
from dspark.policy.cost import CostProfile, StepCost
from dspark.policy.fixed import ConfidenceThreshold, FixedK, NoSpeculation
from dspark.policy.gated import DraftGate, Gated
from dspark.policy.goodput import Goodput
from dspark.policy.learned import HeadMarginLogistic, MarginLogistic, OnlineTempered, RunningMean
from dspark.policy.oracle import DistributionOracle, Oracle
from dspark.policy.protocol import Outcome, Signals, VerifyPolicy
from dspark.policy.roofline import H200, RTX_4090, Hardware, ModelSize, roofline_profile
from dspark.policy.scheduled import ConfidenceScheduled
from dspark.policy.tracked import TrackedProfile

__all__ = [
    "H200",
    "RTX_4090",
    "Bandit",
    "ConfidenceProvider",
    "ConfidenceScheduled",
    "ConfidenceThreshold",
    "ConstantConfidence",
    "CostProfile",
    "DistributionOracle",
    "DraftGate",
    "FixedK",
    "Gated",
    "Goodput",
    "Hardware",
    "HeadMarginLogistic",
    "MarginLogistic",
    "ModelSize",
    "NoSpeculation",
    "OnlineTempered",
    "Oracle",
    "Outcome",
    "RunningMean",
    "SequentialTemperatures",
    "Signals",
    "StepCost",
    "Tempered",
    "TrackedProfile",
    "TrainedHead",
    "VerifyPolicy",
    "WithConfidence",
    "fit_sts",
    "roofline_profile",
]
