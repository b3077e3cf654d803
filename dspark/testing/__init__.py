"""Tools to certify a policy, a rule or an engine: exact laws of decoding processes, causality, goodness of fit."""

from dspark.testing.causality import Turn, assert_non_anticipating, find_anticipation, random_history
from dspark.testing.certify import assert_exact_law, certify_policy, toy_request
from dspark.testing.guards import Guarded, SyncError, forbid_sync, guarded, poisoned_empty
from dspark.testing.law import JointLaw, exact_law, marginal, plain_law, total_variation
from dspark.testing.lossless import Certificate, assert_lossless, assert_lossless_outputs
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
from dspark.testing.statistics import (
    chi_square_p_value,
    detectable_variation,
    probability_integral,
    uniformity_p_value,
)
from dspark.testing.trees import drawn_tree_law, recursive_tree_law, without_replacement

__all__ = [
    "BlockToy",
    "Certificate",
    "CoupledToy",
    "Guarded",
    "JointLaw",
    "MatchToy",
    "Noise",
    "RatioToy",
    "Realisation",
    "SyncError",
    "ToyRequest",
    "ToyRule",
    "Turn",
    "assert_exact_law",
    "assert_lossless",
    "assert_lossless_outputs",
    "assert_non_anticipating",
    "certify_policy",
    "chi_square_p_value",
    "detectable_variation",
    "drawn_tree_law",
    "exact_law",
    "find_anticipation",
    "forbid_sync",
    "guarded",
    "marginal",
    "plain_law",
    "poisoned_empty",
    "probability_integral",
    "random_history",
    "recursive_tree_law",
    "stepwise",
    "total_variation",
    "toy_request",
    "uniformity_p_value",
    "without_replacement",
]
