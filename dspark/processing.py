"""Logits processors of running requests: what each asks for, and what it has emitted so far.

The state advances by emitted tokens alone, so a request's scores are those of plain decoding after the same tokens,
whatever was drafted and however many rounds it took.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.ops.sample import count_tokens, process_logits
from dspark.ops.types import Processors, Rows, Verdict
from dspark.requests import Request


class Processing:
    """The processors of a batch of requests, and their state on the device.

    Args:
        requests: the ``R`` requests, with what they have emitted so far.
        vocab_size: ``V``.
        device: where the tensors go.
    """

    def __init__(self, requests: Sequence[Request], vocab_size: int, device: torch.device) -> None:
        self._requests, self._vocab_size = requests, vocab_size
        params = [request.params for request in requests]

        def asked(field: str, off: float, dtype: torch.dtype) -> Tensor | None:
            """``[R]`` values of a parameter, or None when nobody asks."""
            values = [getattr(p, field) for p in params]
            return torch.tensor(values, dtype=dtype, device=device) if any(v != off for v in values) else None

        def listed(tokens: Sequence[Sequence[int]]) -> Tensor:
            """Lists of ids as ``[R, K]``, padded with -1."""
            width = max(map(len, tokens))
            return torch.tensor([[*ids, *[-1] * (width - len(ids))] for ids in tokens], device=device).long()

        def counted(tokens: Sequence[Sequence[int]]) -> Tensor:
            """How often each token is in each list, ``[R, V]``."""
            counts = torch.zeros(len(tokens), vocab_size, dtype=torch.int32, device=device)
            count_tokens(counts, listed(tokens), torch.tensor([len(ids) for ids in tokens], device=device))
            return counts

        emitted = [request.completion.token_ids for request in requests]
        processors = Processors(
            repetition_penalty=asked("repetition_penalty", 1.0, torch.float32),
            presence_penalty=asked("presence_penalty", 0.0, torch.float32),
            frequency_penalty=asked("frequency_penalty", 0.0, torch.float32),
            min_new_tokens=asked("min_new_tokens", 0, torch.int64),
            num_emitted=torch.tensor([len(ids) for ids in emitted], device=device),
            eos_tokens=listed([p.stop_token_ids for p in params]),
            banned_tokens=listed([p.banned_tokens for p in params]) if any(p.banned_tokens for p in params) else None,
        )
        if processors.penalises:
            processors = processors._replace(output_counts=counted(emitted))
        if processors.repetition_penalty is not None:
            processors = processors._replace(prompt_mask=counted([r.prompt for r in requests]) > 0)
        self._processors = processors

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int, device: torch.device) -> Processing | None:
        """The processors of these requests; None when none of them asks for any."""
        return cls(requests, vocab_size, device) if any(r.params.processes for r in requests) else None

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        """The processed scores ``[T, V]`` float32 of a verify batch; arguments as :func:`process_logits` has them."""
        processors = self._processors
        if any(request.params.allowed_tokens is not None for request in self._requests):
            mask = self._allowed_mask(rows.tokens.tolist(), rows.query_start.tolist()).to(logits.device)
            processors = processors._replace(allowed_mask=mask)
        return process_logits(logits, rows, processors=processors)

    def commit(self, verdict: Verdict, logits: Tensor, query_start: Tensor) -> Verdict:
        """Take note of what was emitted.

        Args:
            verdict: on the processed scores.
            logits: ``[T, V]``, the target's own.
            query_start: ``[R + 1]``, as for the verdict.

        Returns:
            The verdict with log-probabilities under the target's own distribution.
        """
        state = self._processors
        if state.output_counts is not None:
            count_tokens(state.output_counts, verdict.tokens, verdict.num_emitted)
        if state.num_emitted is not None:
            state.num_emitted.add_(verdict.num_emitted)
        emitted = verdict.path >= 0  # [R, N]
        rows = torch.where(emitted, query_start[:-1, None] + verdict.path, 0)
        logprobs = logits.float().log_softmax(-1)[rows, verdict.tokens.clamp(min=0)]
        return verdict._replace(logprobs=torch.where(emitted, logprobs, 0.0))

    def _allowed_mask(self, tokens: list[int], query_start: list[int]) -> Tensor:
        """``[T, ceil(V / 32)]`` int32 bits of what each row's request allows there."""
        width = -(-self._vocab_size // 32)
        allowed = torch.ones(len(tokens), width * 32, dtype=torch.bool)
        for r, request in enumerate(self._requests):
            function = request.params.allowed_tokens
            if function is None:
                continue
            never_inside = {*request.params.stop_token_ids, *request.params.banned_tokens}
            prefix = request.prompt + request.completion.token_ids
            choices: set[int] = set()
            for row in range(query_start[r], query_start[r + 1]):
                if row > query_start[r]:
                    # Plain decoding does not get past such a draft, nor does a verdict: the rows after it are unused.
                    if tokens[row] not in choices or tokens[row] in never_inside:
                        break
                    prefix = [*prefix, tokens[row]]
                choices = self._checked(function(prefix))
                allowed[row] = False
                allowed[row, list(choices)] = True
        bits = allowed.view(-1, width, 32).long() << torch.arange(32)
        return bits.sum(-1).int()

    def _checked(self, choices: Sequence[int]) -> set[int]:
        found = set(choices)
        for token in (min(found, default=0), max(found, default=0)):
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"allowed_tokens: expected token ids from 0 to {self._vocab_size - 1}, got {token}")
        return found
