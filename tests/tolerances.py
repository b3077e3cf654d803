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

REPLAY = {"nearest": 0.12, "tokens": 0.025}
"""Tokens and drafts per round and throughput of a policy, replayed from a run that verified everything, against a trace
with a row at every position (relative). In the synthetic trace a hard token stays hard from nearby, which ``tokens``
assumes and ``nearest`` forgets; on the tiny pair it is the other way round."""

ROTARY = 2e-6
"""Normalised and rotated heads in float32, a few units in size, their squares summed in another order (absolute)."""

IDLE_SPECULATION = 0.02
"""Throughput that a policy may lose to plain decoding where speculation does not pay, for looking whether it does."""

SCHEDULED = 0.01
"""Throughput that the scheduler may lose to the fixed length that turns out to be best under a load: it sees expected
survival, one round at a time, and the drafts of a round do not come out as expected."""

TEMPERATURE = 0.2
"""Relative error of temperatures fitted to some thousands of rounds: the grid's steps are 4 %, and the calibration
error is flat around its minimum."""

LEARNED = 0.06
"""Mean error of confidences learned from some hundreds of rounds against the true chances (absolute)."""

ONE_ULP = {"bfloat16": 2**-7, "float16": 2**-10}
"""A result in 16 bits against the same float32 numbers rounded by torch (relative): Triton's interpreter truncates
bfloat16, and where the float32 numbers differ by their rounding, the 16 bits may."""
