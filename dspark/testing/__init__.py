"""Tools to certify a policy, a rule or an engine: exact laws of decoding processes, causality, goodness of fit."""

from dspark.testing.causality import Turn, assert_non_anticipating, find_anticipation, random_history
from dspark.testing.law import JointLaw, exact_law, marginal, plain_law, total_variation
from dspark.testing.rules import (
    BlockToy,
    CoupledToy,
    MatchToy,
    Noise,
    RatioToy,
    Realisation,
    ToyRequest,
    ToyRule,
    stepwise,
)
from dspark.testing.statistics import probability_integral, uniformity_p_value

__all__ = [
    "BlockToy",
    "CoupledToy",
    "JointLaw",
    "MatchToy",
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
    "probability_integral",
    "random_history",
    "stepwise",
    "total_variation",
    "uniformity_p_value",
]
