"""What ``process_logits`` moves and launches.

The lower bound counts the logits and the result once, a request's counts and prompt mask once, and one bit per token of
a row's mask. The kernel reads counts and prompt for every row of a request, which a cache may serve, and each lane asks
for the word that holds its token's bit, which a warp's load serves 32 times: bytes requested count both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.ops.cost.types import Cost, Tally
from dspark.ops.sample.process_launch import ProcessConfig, process_config


@dataclass(frozen=True)
class ProcessCall:
    """A call of ``process_logits`` with at least one row and request.

    Attributes:
        lengths: rows of each request.
        vocab_size: of the call.
        itemsize: bytes per logit.
        max_query_len: rows of a request that are processed; None: all.
        unowned: rows past the last request's.
        repetition, prompt, presence, frequency, allowed: which fields of :class:`dspark.ops.Processors` are given.
        eos: end tokens per request, with ``min_new_tokens``; 0: that is off.
        too_short: rows whose request has not yet emitted ``min_new_tokens`` tokens.
        banned: banned tokens per request; 0: off.
    """

    lengths: Sequence[int]
    vocab_size: int
    itemsize: int = 2
    max_query_len: int | None = None
    unowned: int = 0
    repetition: bool = False
    prompt: bool = False
    presence: bool = False
    frequency: bool = False
    allowed: bool = False
    eos: int = 0
    too_short: int = 0
    banned: int = 0

    @property
    def counts(self) -> bool:
        """Whether a penalty is on, so that counts are read."""
        return self.repetition or self.presence or self.frequency

    @property
    def owned(self) -> list[int]:
        """Index of each row that is processed, within its request."""
        most = max(self.lengths) if self.max_query_len is None else self.max_query_len
        return [i for length in self.lengths for i in range(min(length, most))]


def process_cost(call: ProcessCall, config: ProcessConfig | None = None) -> Cost:
    """The cost of a call.

    >>> cost = process_cost(ProcessCall(lengths=[8], vocab_size=151_936, banned=4))
    >>> cost.lower_bound, cost.launches, cost.total / cost.lower_bound < 1.02
    (7292928, 1, True)
    """
    config = config or process_config(call.vocab_size)
    tiles = -(-call.vocab_size // config.block_v)
    num_rows, owned = sum(call.lengths) + call.unowned, call.owned
    search_steps = (len(call.lengths) - 1).bit_length()
    tally = Tally(launches=1)
    tally.read += num_rows * (call.vocab_size * call.itemsize + tiles * 8 * (search_steps + 2))
    tally.written += num_rows * 4 * call.vocab_size

    per_token = 4 * call.counts + (call.repetition and call.prompt) + 4 * call.allowed
    per_program = 4 * (call.repetition + call.presence + call.frequency) + 16 * (call.eos > 0) + 8 * call.banned
    tally.read += len(owned) * (per_token * call.vocab_size + per_program * tiles)
    tally.read += tiles * 8 * (call.counts * sum(owned) + call.eos * call.too_short)

    bound = num_rows * (call.itemsize + 4) * call.vocab_size
    requests = sum(length > 0 for length in call.lengths)
    bound += requests * call.vocab_size * (4 * call.counts + (call.repetition and call.prompt))
    bound += call.allowed * len(owned) * 4 * -(-call.vocab_size // 32)
    return tally.cost(bound)
