"""Tools to certify a policy, a rule or a scheduler: exact laws of whole decoding processes, and causality."""

from dspark.testing.causality import Turn, assert_non_anticipating, find_anticipation, random_history
from dspark.testing.law import JointLaw, exact_law, marginal, plain_law, total_variation
from dspark.testing.rules import CoupledToy, Noise, RatioToy, Realisation, ToyRequest, ToyRule, stepwise

__all__ = [
    "CoupledToy",
    "JointLaw",
    "Noise",
    "RatioToy",
    "Realisation",
    "ToyRequest",
    "ToyRule",
    "Turn",
    "assert_non_anticipating",
    "exact_law",
    "find_anticipation",
    "marginal",
    "plain_law",
    "random_history",
    "stepwise",
    "total_variation",
]
