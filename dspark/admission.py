"""Requests that wait for room, and the pages of the cache that the running ones hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dspark.models.cache import PagePool, pages_for
from dspark.requests import Completion, Request, SamplingParams


@dataclass
class Admission:
    """A queue in order of arrival. A request is admitted when the cache has room for all that it may ever need, so a
    running one never runs out.

    Attributes:
        pool: the pages.
        page_size: tokens per page.
        max_batch: most requests running at once.
        look_ahead: tokens past its last one that a request may write.
        vocab_size, max_context: of the target.
        unique_seeds: refuse a seed that a request had before.
    """

    pool: PagePool
    page_size: int
    max_batch: int
    look_ahead: int
    vocab_size: int
    max_context: int
    unique_seeds: bool
    _waiting: deque[Request] = field(default_factory=deque)
    _seeds: set[int] = field(default_factory=set)
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
            needed = self._pages_needed(request)
            if needed > self.pool.num_pages:
                raise ValueError(
                    f"prompt: {len(prompt)} tokens and {request.max_tokens} to emit need {needed} pages of "
                    f"{self.page_size}, and the cache has {self.pool.num_pages}"
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
        """Take requests from the queue, with their pages, while there is room."""
        admitted: list[Request] = []
        while self._waiting and num_running + len(admitted) < self.max_batch:
            pages = self.pool.allocate(self._pages_needed(self._waiting[0]))
            if pages is None:
                break
            admitted.append(self._waiting.popleft())
            admitted[-1].pages = pages
        return admitted

    def release(self, requests: Iterable[Request]) -> list[Request]:
        """Give back the pages of those that have finished; returns the others."""
        running = []
        for request in requests:
            if request.completion.finish_reason is None:
                running.append(request)
            else:
                self.pool.free(request.pages)
        return running

    def _pages_needed(self, request: Request) -> int:
        return pages_for(len(request.prompt) + request.max_tokens + self.look_ahead, self.page_size)
