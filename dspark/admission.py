"""Requests that wait for room, and the pages of the caches that the running ones hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dspark.models.block_table import BlockTable, BlockTables
from dspark.models.pool import pages_for
from dspark.requests import Completion, Output, Request, SamplingParams


@dataclass
class Admission:
    """A queue in order of arrival. A request is admitted when the cache has room for all that it may ever need, so a
    running one never runs out.

    Attributes:
        tables: the pages, with those kept of earlier prefixes.
        max_batch: most requests running at once.
        look_ahead: tokens past its last one that a request may write.
        vocab_size, max_context: of the target.
        unique_seeds: refuse a seed that a request had before.
        processors: whether a request may ask for logits processors.
    """

    tables: BlockTables
    max_batch: int
    look_ahead: int
    vocab_size: int
    max_context: int
    unique_seeds: bool
    processors: bool = True
    _waiting: deque[Request] = field(default_factory=deque)
    _seeds: set[int] = field(default_factory=set)
    _tables_of: dict[int, BlockTable] = field(default_factory=dict)
    _next_id: int = 0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def add(self, asked: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        """Queue all of these requests, or none when one of them is at fault.

        Raises:
            ValueError: a prompt that the model or the cache cannot take, or a seed used before where that matters.
        """
        requests: list[Request] = []
        seeds = set(self._seeds)
        for prompt, params in asked:
            request_id = self._next_id + len(requests)
            request = Request.checked(prompt, params, request_id, self.vocab_size, self.max_context)
            if params.processes and not self.processors:
                raise ValueError(
                    "sampling: penalties, min_new_tokens, banned_tokens and allowed_tokens go with chains; this "
                    "decoder drafts trees"
                )
            size, pool = self.tables.page_size, self.tables.pool
            needed = pages_for(self._capacity(request), size)
            if needed > pool.num_pages:
                raise ValueError(
                    f"prompt: {len(prompt)} tokens and {request.max_tokens} to emit need {needed} pages of {size}, and "
                    f"the cache has {pool.num_pages}"
                )
            if self.unique_seeds:
                if request.seed in seeds:
                    raise ValueError(
                        f"seed: {request.seed} was used before; under a rule that draws drafts and target apart every "
                        "request of a decoder needs its own (leave seed None to get one), or a policy could know a "
                        "draft before it is made"
                    )
                seeds.add(request.seed)
            requests.append(request)
        self._next_id += len(requests)
        self._seeds = seeds
        self._waiting += requests
        return [request.completion for request in requests]

    def admit(self, num_running: int) -> list[Request]:
        """Take requests from the queue, with their pages, while there is room.

        What the caches already hold of a prompt is the request's ``num_cached``.
        """
        admitted: list[Request] = []
        while self._waiting and num_running + len(admitted) < self.max_batch:
            request = self._waiting[0]
            table = self.tables.admit(request.prompt, self._capacity(request))
            if table is None:
                break
            request.pages, request.num_cached = table.pages, table.hit
            self._tables_of[request.completion.request_id] = table
            admitted.append(self._waiting.popleft())
        return admitted

    def commit(self, requests: Iterable[Request], outputs: Iterable[Output]) -> None:
        """Note what requests emitted, whose keys and values every cache now holds but for the last token's."""
        for request, output in zip(requests, outputs, strict=True):
            held = dict.fromkeys(self.tables.caches, request.context_len)
            self._tables_of[output.request_id].commit(output.token_ids, **held)

    def release(self, requests: Iterable[Request]) -> list[Request]:
        """Give back the pages of those that have finished; returns the others."""
        running = []
        for request in requests:
            if request.completion.finish_reason is None:
                running.append(request)
            else:
                self._tables_of.pop(request.completion.request_id).release()
        return running

    def _capacity(self, request: Request) -> int:
        return len(request.prompt) + request.max_tokens + self.look_ahead
