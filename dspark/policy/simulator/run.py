"""The simulated service: one pass of the loop is one step of the engine, over all running requests at once."""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.policy.cost import CostProfile, StepCost
from dspark.policy.gated import Clairvoyant, DraftGate
from dspark.policy.protocol import Outcome, Signals, VerifyPolicy
from dspark.policy.simulator.replay import Ints, Replay
from dspark.policy.simulator.workload import Workload
from dspark.policy.traces import Trace

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Engine:
    """A serving engine with continuous batching.

    Attributes:
        profile: what a round costs. With a curve for drafting, rounds without drafts are cheaper by it.
        plain: what a step without drafts costs, for a profile that has no such curve.
        max_batch: most requests in flight, those in prefill included.
        num_pages: pages of key/value cache; None is no limit. A request is admitted when there is room for all it may
            ever need (prompt, output, one block of drafts), in order of arrival.
        page_size: tokens per page.
        prefill_chunk: most prompt tokens that a step takes beside its decode rows, at the cost of as many rows; 0 is
            prompts that are processed elsewhere and arrive with their first token.

    Raises:
        ValueError: a number is outside its range, or both the profile and ``plain`` say what drafting costs.
    """

    profile: CostProfile
    _: KW_ONLY
    plain: CostProfile | None = None
    max_batch: int = 64
    num_pages: int | None = None
    page_size: int = 16
    prefill_chunk: int = 2048

    def __post_init__(self) -> None:
        for name in ("max_batch", "num_pages", "page_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if self.prefill_chunk < 0:
            raise ValueError(f"prefill_chunk: expected at least 0, got {self.prefill_chunk}")
        StepCost(self.profile, self.plain)

    @property
    def cost(self) -> StepCost:
        """The price of a step."""
        return StepCost(self.profile, self.plain)


@dataclass(frozen=True, eq=False)
class Run:
    """What happened, by request (``N``) and by step (``M``).

    Attributes:
        arrival, admitted, first, finish: ``[N]`` seconds of arrival, admission, first and last token.
        output: ``[N]`` tokens emitted.
        start, seconds: ``[M]``, when a step began and how long it took.
        requests: ``[M]`` decoding requests, of which ``drafted`` had drafts made for them.
        prefill: ``[M]`` prompt tokens processed beside them.
        verified, accepted: ``[M]`` drafts.
        emitted: ``[M]`` tokens, those of prompts that were completed included.
    """

    arrival: Floats
    admitted: Floats
    first: Floats
    finish: Floats
    output: Ints
    start: Floats
    seconds: Floats
    requests: Ints
    drafted: Ints
    prefill: Ints
    verified: Ints
    accepted: Ints
    emitted: Ints


def simulate(trace: Trace | Replay, policy: VerifyPolicy, workload: Workload, engine: Engine, *, seed: int = 0) -> Run:
    """Serve a workload under a policy.

    Args:
        trace: what the drafter says and the target accepts; a :class:`Replay` to share the index between runs (``seed``
            is then that of the replay).
        policy: any :class:`~dspark.policy.VerifyPolicy`. It gets the trace's confidences and margins, the requests'
            domains as classes, and the seconds of each step. If it has a method ``drafts``, it is asked before each
            round whether to draft (:class:`DraftGate`); if it has a method ``reveal``, it is told what would be
            accepted (:class:`Clairvoyant`).
        workload: requests.
        engine: machine.
        seed: of the order of the trace's requests.

    Raises:
        ValueError: a request could never fit into the cache, or the policy plans a length outside its bounds.

    The same arguments give the same run, and what a request would say does not depend on the policy.
    """
    replay = trace if isinstance(trace, Replay) else Replay(trace, seed)
    return _Service(replay, policy, workload, engine).run()


class _Batch(NamedTuple):
    """The decoding requests, one entry each."""

    request: Ints
    recorded: Ints  # the recorded request it walks along
    place: Ints  # its place in the replay
    turn: Ints  # how many recorded requests it had before
    left: Ints  # tokens to emit
    context: Ints  # tokens before its anchor


@dataclass
class _Service:
    replay: Replay
    policy: VerifyPolicy
    workload: Workload
    engine: Engine

    def __post_init__(self) -> None:
        count = len(self.workload)
        self.now = 0.0
        self.batch = _Batch(*np.empty((len(_Batch._fields), 0), dtype=np.int64))
        self._arrival = np.zeros(count) if self.workload.arrival is None else self.workload.arrival.copy()
        self._admitted, self._first, self._finish = (np.full(count, np.nan) for _ in range(3))
        self._origin = self.replay.order(count)
        need = self.workload.prompt + self.workload.output + self.replay.draft_len
        self._pages: list[int] = (-(-need // self.engine.page_size)).tolist()
        self._free = self.engine.num_pages
        if self._free is not None and max(self._pages) > self._free:
            worst = int(np.argmax(self._pages))
            raise ValueError(
                f"num_pages: request {worst} needs {self._pages[worst]} pages of {self.engine.page_size} tokens, "
                f"and the cache has {self._free}"
            )
        self._cost = self.engine.cost
        self._domains = np.array(self.replay.domains, dtype=object)
        self._next = 0  # the first request that was not admitted yet
        self._prompts: deque[list[int]] = deque()  # [request, tokens left to process]
        self._steps: list[tuple[float, ...]] = []
        self._gate = self.policy if isinstance(self.policy, DraftGate) else None
        self._oracle = self.policy if isinstance(self.policy, Clairvoyant) else None

    def run(self) -> Run:
        while True:
            ready = self._admit()
            if ready:
                self._join(ready)
            if not self._prompts and not len(self.batch.request):
                if self._next == len(self.workload):
                    break
                self.now = max(self.now, float(self._arrival[self._next]))
            else:
                self._step()
        start, seconds, *counts = np.array(self._steps, dtype=np.float64).reshape(-1, 8).T
        times = (self._arrival, self._admitted, self._first, self._finish)
        return Run(*times, self.workload.output, start, seconds, *(c.astype(np.int64) for c in counts))

    def _admit(self) -> list[int]:
        """Let requests in while there is room; the ones that need no prefill here are returned."""
        closed, ready = self.workload.arrival is None, []
        in_flight = len(self.batch.request) + len(self._prompts)
        while self._next < len(self.workload) and in_flight < self.engine.max_batch:
            request, pages = self._next, self._pages[self._next]
            if (not closed and self._arrival[request] > self.now) or (self._free is not None and pages > self._free):
                break
            if self._free is not None:
                self._free -= pages
            if closed:
                self._arrival[request] = self.now
            self._admitted[request] = self.now
            if self.engine.prefill_chunk:
                self._prompts.append([request, int(self.workload.prompt[request])])
            else:
                self._first[request] = self.now
                ready.append(request)
            self._next += 1
            in_flight += 1
        return ready

    def _step(self) -> None:
        """One forward pass: a round of the decoding requests, and a chunk of the prompts that wait."""
        start, batch = self.now, self.batch
        done, prefill = self._take_prompts()
        requests, ids = len(batch.request), tuple(batch.request.tolist())
        lengths = accepted = np.zeros(requests, dtype=np.int64)
        drafting, context = False, int(batch.context.sum())
        if requests:
            caps = np.minimum(batch.left - 1, self.replay.draft_len)
            drafting = bool(caps.max() > 0) and (self._gate is None or self._gate.drafts(requests, context))
            if drafting:
                lengths = self._plan(ids, caps, context)
                accepted = np.minimum(self.replay.accepted[batch.place], lengths)
        verified = int(lengths.sum())
        seconds = self._cost.seconds(requests + verified + prefill, requests, context, drafting)
        self.now += seconds
        if requests:
            counts = _tensor(lengths), _tensor(accepted)
            self.policy.observe(Outcome(ids, *counts, seconds, self._classes(), context))
        total = int(accepted.sum())
        emitted = requests + total + len(done)
        self._steps.append((start, seconds, requests, requests * drafting, prefill, verified, total, emitted))
        if requests:
            self._advance(accepted + 1)
        if done:
            self._first[done] = self.now
            self._join(done)

    def _take_prompts(self) -> tuple[list[int], int]:
        """Process a chunk of the oldest prompts: the requests that are through, and how many tokens it took."""
        room, done = self.engine.prefill_chunk, []
        while self._prompts and room:
            taken = min(room, self._prompts[0][1])
            room -= taken
            self._prompts[0][1] -= taken
            if not self._prompts[0][1]:
                done.append(self._prompts.popleft()[0])
        return done, self.engine.prefill_chunk - room

    def _plan(self, ids: tuple[int, ...], caps: Ints, context: int) -> Ints:
        place = _tensor(self.batch.place)
        confidence, margin = self.replay.confidence, self.replay.margin
        signals = Signals(
            request_ids=ids,
            max_lengths=_tensor(caps),
            draft_len=self.replay.draft_len,
            confidence=None if confidence is None else confidence.index_select(0, place),
            margin=None if margin is None else margin.index_select(0, place),
            classes=self._classes(),
            context_tokens=context,
        )
        if self._oracle is not None:
            self._oracle.reveal(_tensor(self.replay.accepted[self.batch.place]))
        planned = self.policy.plan(signals)
        lengths: Ints = planned.numpy()
        if lengths.shape != caps.shape or (lengths < 0).any() or (lengths > caps).any():
            raise ValueError(
                f"policy: expected lengths from 0 to {caps.tolist()}, got {planned.tolist()} from {self.policy}"
            )
        return lengths

    def _classes(self) -> tuple[str, ...]:
        return tuple(self._domains[self.replay.domain[self.batch.recorded]].tolist())

    def _join(self, requests: list[int]) -> None:
        """Requests whose first token is out start to decode, unless it was their only one."""
        new = np.array(requests, dtype=np.int64)
        only = self.workload.output[new] == 1
        self._leave(new[only])
        new = new[~only]
        if not new.size:
            return
        recorded = self._origin[new]
        added = _Batch(
            request=new,
            recorded=recorded,
            place=self.replay.begin[recorded],
            turn=np.zeros_like(new),
            left=self.workload.output[new] - 1,
            context=self.workload.prompt[new],
        )
        self.batch = _Batch(*map(np.concatenate, zip(self.batch, added, strict=True)))

    def _advance(self, emitted: Ints) -> None:
        """Move each decoding request on by what it emitted; let those go that are done."""
        request, recorded, place, turn, left, context = self.batch  # these change in place
        left -= emitted
        context += emitted
        place += emitted
        over = np.flatnonzero(place >= self.replay.end[recorded])
        if over.size:
            turn[over] += 1
            recorded[over] = self.replay.follow(recorded[over], request[over], turn[over])
            place[over] = self.replay.begin[recorded[over]]
        running = left > 0
        if not running.all():
            self._leave(request[~running])
            self.batch = _Batch(*(array[running] for array in self.batch))

    def _leave(self, requests: Ints) -> None:
        self._finish[requests] = self.now
        if self._free is not None:
            self._free += sum(self._pages[request] for request in requests.tolist())


def _tensor(array: Ints) -> Tensor:
    return torch.from_numpy(array)
