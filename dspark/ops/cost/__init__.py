"""What ops move and launch: bytes requested from memory, exactly, and the least that an op must move.

One module per op. A model counts the loads and stores of the kernels as they are written; what a cache serves twice
counts twice. The traffic gate holds every model to what Triton's interpreter counts.
"""

from dspark.ops.cost.accept import AcceptCall, QKind, accept_cost
from dspark.ops.cost.attention import AttentionCall, attention_cost
from dspark.ops.cost.process import ProcessCall, process_cost
from dspark.ops.cost.sample import SampleCall, sample_cost, truncate_cost
from dspark.ops.cost.statistics import Search
from dspark.ops.cost.types import Cost
from dspark.ops.cost.walk import WalkCall, certified_cost, walk_cost

__all__ = [
    "AcceptCall",
    "AttentionCall",
    "Cost",
    "ProcessCall",
    "QKind",
    "SampleCall",
    "Search",
    "WalkCall",
    "accept_cost",
    "attention_cost",
    "certified_cost",
    "process_cost",
    "sample_cost",
    "truncate_cost",
    "walk_cost",
]
