"""Policies: how many drafts each request verifies, and what they need to know."""

from dspark.policy.cost import CostProfile
from dspark.policy.fixed import FixedK
from dspark.policy.oracle import Oracle
from dspark.policy.protocol import Outcome, Signals, VerifyPolicy
from dspark.policy.scheduled import ConfidenceScheduled

__all__ = ["ConfidenceScheduled", "CostProfile", "FixedK", "Oracle", "Outcome", "Signals", "VerifyPolicy"]
