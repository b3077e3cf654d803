"""Recorded rounds: what the drafter said and what the target accepted, to replay under any policy."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dspark.policy.protocol import Outcome, Signals, VerifyPolicy

SCHEMA = 1
"""Version of the file format; :meth:`Trace.load` refuses any other."""

_INTEGERS = ("request", "round", "position", "context", "domain", "accepted")
_BY_SLOT = ("confidence", "margin", "logprob")


@dataclass(frozen=True)
class TraceSummary:
    """Statistics of a trace, over its rows.

    Attributes:
        tau: mean of accepted + 1.
        acceptance_by_position: ``[G]``, of the drafts whose predecessors were accepted, the fraction accepted; NaN
            where there was none.
        confidence_by_position: ``[G]``, mean confidence of the same drafts; None without confidences. The two agree
            where the confidences are calibrated.
    """

    requests: int
    rows: int
    tau: float
    acceptance_by_position: tuple[float, ...]
    confidence_by_position: tuple[float, ...] | None


@dataclass(frozen=True, eq=False)
class Trace:
    """Rounds of some requests, one row each (``n`` rows), as they go when *every* draft is verified.

    Rows are in order of (request, round). A recorded run has a row where one of its rounds began; a *dense* trace has
    one at every position of the output, and is exact wherever a policy makes a round begin.

    Attributes:
        domains: names that ``domain`` points into.
        request: ``[n]`` int64, ids.
        round: ``[n]`` int64, increasing within a request.
        position: ``[n]`` int64, tokens of the output before the round, increasing within a request.
        context: ``[n]`` int64, tokens of the request before the round's anchor, the prompt included.
        domain: ``[n]`` int64, the same for all rows of a request.
        accepted: ``[n]`` int64 in ``0 .. G``, drafts accepted when all G are verified.
        confidence: ``[n, G]`` float32 in [0, 1], or None when the drafter has no confidence head.
        margin: ``[n, G]`` float32, see :class:`~dspark.policy.Signals`; or None.
        logprob: ``[n, G]`` float32 at most 0, log-probability of each draft under the drafter; or None.
        draft_len: G.

    Raises:
        TypeError: an array has another kind of dtype.
        ValueError: an array has another shape or a value outside its range, rows are out of order, or the domain of
            a request changes.
    """

    domains: tuple[str, ...]
    request: NDArray[np.int64]
    round: NDArray[np.int64]
    position: NDArray[np.int64]
    context: NDArray[np.int64]
    domain: NDArray[np.int64]
    accepted: NDArray[np.int64]
    draft_len: int
    confidence: NDArray[np.float32] | None = None
    margin: NDArray[np.float32] | None = None
    logprob: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if self.draft_len < 1:
            raise ValueError(f"draft_len: expected at least 1, got {self.draft_len}")
        rows = len(self.request)
        for name, array in self._arrays().items():
            if name in _INTEGERS:
                _check_array(name, array, np.integer, "n", (rows,))
            elif array is not None:
                _check_array(name, array, np.floating, "n G", (rows, self.draft_len))
        _check_range("position", self.position, 0, None)
        _check_range("context", self.context, 0, None)
        _check_range("domain", self.domain, 0, len(self.domains) - 1)
        _check_range("accepted", self.accepted, 0, self.draft_len)
        _check_range("confidence", self.confidence, 0, 1)
        _check_range("margin", self.margin, None, None)
        _check_range("logprob", self.logprob, None, 0)
        self._check_order()

    def _arrays(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_INTEGERS, *_BY_SLOT)}

    def _check_order(self) -> None:
        same = self.request[1:] == self.request[:-1]
        if (np.diff(self.request) < 0).any():
            raise ValueError("request: expected rows in order of (request, round), got a smaller id after a larger one")
        for name, step in (("round", np.diff(self.round)), ("position", np.diff(self.position))):
            if (step[same] <= 0).any():
                raise ValueError(f"{name}: expected it to increase within a request, got a step of {step[same].min()}")
        if (np.diff(self.domain)[same] != 0).any():
            raise ValueError("domain: expected one for all rows of a request, got several")

    def __len__(self) -> int:
        return len(self.request)

    @property
    def num_requests(self) -> int:
        """How many requests have rows."""
        return len(np.unique(self.request))

    def select(self, domain: str) -> Trace:
        """The rows of one domain, which becomes the only one.

        Raises:
            ValueError: the trace has no such domain.
        """
        if domain not in self.domains:
            raise ValueError(f"domain: expected one of {', '.join(self.domains)}, got {domain!r}")
        own = self.take(self.domain == self.domains.index(domain))
        return replace(own, domains=(domain,), domain=np.zeros(len(own), dtype=np.int64))

    def full_verification_path(self) -> Trace:
        """The rows that a run which verifies everything visits: each request's first, then the first one at or past
        the end of the last.

        Of a recorded run these are all rows.
        """
        keep, last, resume = np.zeros(len(self), dtype=bool), None, 0
        for i, (request, position) in enumerate(zip(self.request.tolist(), self.position.tolist(), strict=True)):
            if request != last or position >= resume:
                keep[i] = True
                last, resume = request, position + int(self.accepted[i]) + 1
        return self.take(keep)

    def take(self, keep: NDArray[np.bool_]) -> Trace:
        """The rows where ``keep``, ``[n]`` bool, holds."""
        kept: dict[str, Any] = {name: None if a is None else a[keep] for name, a in self._arrays().items()}
        return replace(self, **kept)

    def summary(self) -> TraceSummary:
        """Statistics over all rows; see also :meth:`select`."""
        slot = np.arange(self.draft_len)
        passed = (slot < self.accepted[:, None]).sum(0)
        reached = slot <= self.accepted[:, None]
        count = reached.sum(0)
        confidence = None if self.confidence is None else (self.confidence * reached).sum(0, dtype=np.float64)
        with np.errstate(invalid="ignore"):
            return TraceSummary(
                requests=self.num_requests,
                rows=len(self),
                tau=float(self.accepted.mean()) + 1 if len(self) else float("nan"),
                acceptance_by_position=tuple((passed / count).tolist()),
                confidence_by_position=None if confidence is None else tuple((confidence / count).tolist()),
            )

    @classmethod
    def concat(cls, traces: Sequence[Trace]) -> Trace:
        """Several traces as one. Requests are numbered anew, from 0 in order; domains are merged by name.

        Raises:
            ValueError: there is none, their draft lengths differ, or only some have confidences, margins or
                log-probabilities.
        """
        if not traces:
            raise ValueError("traces: expected at least one, got none")
        for name in ("draft_len", *_BY_SLOT):
            shown = [getattr(trace, name) for trace in traces]
            kinds = {"none" if v is None else "some" if isinstance(v, np.ndarray) else str(v) for v in shown}
            if len(kinds) > 1:
                raise ValueError(f"traces: expected the same {name} in all, got {' and '.join(sorted(kinds))}")
        domains = tuple(dict.fromkeys(name for trace in traces for name in trace.domains))
        columns: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_INTEGERS, *_BY_SLOT)}
        offset = 0
        for trace in traces:
            ids, request = np.unique(trace.request, return_inverse=True)
            renamed = np.array([domains.index(name) for name in trace.domains], dtype=np.int64)
            own = {"request": request.astype(np.int64) + offset, "domain": renamed[trace.domain]}
            offset += len(ids)
            for name, column in columns.items():
                column.append(own.get(name, getattr(trace, name)))
        arrays: dict[str, Any] = {name: np.concatenate(c) for name, c in columns.items() if c[0] is not None}
        return cls(domains=domains, draft_len=traces[0].draft_len, **arrays)

    def save(self, path: str | Path) -> None:
        """Write the trace as a compressed ``.npz`` (no pickles)."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays["domains"] = np.array(self.domains, dtype=np.str_)
        present: dict[str, Any] = {name: np.asarray(a) for name, a in arrays.items() if a is not None}
        with Path(path).open("wb") as file:
            np.savez_compressed(file, schema=np.array(SCHEMA), **present)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace that :meth:`save` wrote, and check it.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no trace, its version is another one, or its content contradicts itself.
        """
        try:
            with np.load(Path(path), allow_pickle=False) as file:
                arrays: dict[str, Any] = {name: file[name] for name in file.files}
        except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: not a trace (expected an .npz of arrays): {error!r}") from error
        schema = arrays.pop("schema", None)
        if schema is None or schema.shape != () or int(schema) != SCHEMA:
            raise ValueError(f"{path}: expected a trace of schema {SCHEMA}, got {'none' if schema is None else schema}")
        missing = {"domains", "draft_len", *_INTEGERS} - arrays.keys()
        unknown = arrays.keys() - {f.name for f in fields(cls)}
        if missing or unknown:
            raise ValueError(
                f"{path}: not a trace of schema {SCHEMA}: missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        try:
            domains = tuple(str(name) for name in arrays.pop("domains"))
            return cls(domains=domains, draft_len=int(arrays.pop("draft_len")), **arrays)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


def _check_array(name: str, array: Any, kind: type, pattern: str, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, kind):
        came = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f'{name}: expected a {kind.__name__} array "{pattern}", got {came}')
    if array.shape != shape:
        raise ValueError(f'{name}: expected shape "{pattern}" = {list(shape)}, got {list(array.shape)}')


def _check_range(name: str, array: NDArray[Any] | None, low: float | None, high: float | None) -> None:
    if array is None or not array.size:
        return
    least, most = array.min(), array.max()  # NaN when there is one, which no comparison passes
    if not ((low is None or least >= low) and (high is None or most <= high) and np.isfinite([least, most]).all()):
        bounds = f"from {'any' if low is None else low} to {'any' if high is None else high}"
        raise ValueError(f"{name}: expected finite values {bounds}, got {least} to {most}")


class _Recorded(NamedTuple):
    """One round, as copies that a reused buffer does not change. ``slots`` is None for a round without drafts."""

    outcome: Outcome
    context: Tensor | None
    slots: dict[str, Tensor] | None


class TraceRecorder:
    """Collects rounds of a run that verifies everything, and makes a :class:`Trace` of them.

    One call of :meth:`record` per round is all that an engine does. Where the engine has no such call, :meth:`watch`
    wraps its policy instead. Nothing is read from the device before :meth:`trace`.

    Rows whose drafts were not all verified (the last rounds of a request have no room for them) are left out of the
    trace: what the target would have said about the rest is not known.

    Args:
        domains: each request's domain by id (others are ``"text"``), or one name for all.

    >>> import torch
    >>> recorder = TraceRecorder("code")
    >>> signals = Signals((0,), torch.tensor([2]), 2, torch.tensor([[0.9, 0.4]]))
    >>> recorder.record(signals, Outcome((0,), torch.tensor([2]), torch.tensor([1])))
    >>> recorder.trace().summary().tau
    2.0
    """

    def __init__(self, domains: Mapping[int, str] | str = "text") -> None:
        self._domains = domains
        self._draft_len: int | None = None
        self._rounds: list[_Recorded] = []

    def record(
        self,
        signals: Signals | None,
        outcome: Outcome,
        *,
        context: Tensor | None = None,
        logprob: Tensor | None = None,
    ) -> None:
        """Add a round.

        Args:
            signals: what the policy saw; None for a round without drafts, which only moves the position on.
            outcome: what came of it.
            context: ``[R]`` int64, tokens before each anchor, the prompt included; None counts the output alone.
            logprob: ``[R, G]``, log-probability of each draft under the drafter.

        Raises:
            ValueError: the two are about different requests, or another draft length than before.
        """
        slots = None
        if signals is not None:
            if signals.request_ids != outcome.request_ids:
                raise ValueError(f"outcome: expected requests {signals.request_ids}, got {outcome.request_ids}")
            if self._draft_len not in (None, signals.draft_len):
                raise ValueError(f"signals: expected draft length {self._draft_len}, got {signals.draft_len}")
            self._draft_len = signals.draft_len
            shown = zip(_BY_SLOT, (signals.confidence, signals.margin, logprob), strict=True)
            slots = {name: value.detach().clone() for name, value in shown if value is not None}
        kept = replace(outcome, lengths=outcome.lengths.clone(), accepted=outcome.accepted.clone())
        self._rounds.append(_Recorded(kept, None if context is None else context.clone(), slots))

    def watch(self, policy: VerifyPolicy) -> VerifyPolicy:
        """The same policy, with each of its rounds recorded (without contexts and log-probabilities).

        >>> from dspark.policy import FixedK
        >>> watched = TraceRecorder().watch(FixedK(2))
        """
        return _Watched(policy, self)

    def trace(self) -> Trace:
        """The rounds so far.

        Raises:
            ValueError: no round had drafts, or only some had confidences, margins or log-probabilities.
        """
        if self._draft_len is None:
            raise ValueError("record: expected at least one round with drafts, got none")
        seen: dict[int, tuple[int, int]] = {}  # request -> its next round and position
        names: dict[str, int] = {}
        rows: list[tuple[int, ...]] = []
        slots: dict[str, list[NDArray[np.float32]]] = {name: [] for name in _BY_SLOT}
        for outcome, context, shown in self._rounds:
            accepted, lengths = outcome.accepted.tolist(), outcome.lengths.tolist()
            known = []
            for i, request in enumerate(outcome.request_ids):
                number, position = seen.get(request, (0, 1))  # the prompt gave the first token
                seen[request] = number + 1, position + accepted[i] + 1
                if shown is None or lengths[i] < self._draft_len:
                    continue
                known.append(i)
                domain = names.setdefault(self._domain(request), len(names))
                before = position if context is None else int(context[i])
                rows.append((request, number, position, before, domain, accepted[i]))
            for name, value in (shown or {}).items():
                slots[name].append(value[known].float().cpu().numpy())
        table = np.array(rows, dtype=np.int64).reshape(-1, len(_INTEGERS))
        order = np.lexsort((table[:, 1], table[:, 0]))
        arrays: dict[str, Any] = dict(zip(_INTEGERS, table[order].T.copy(), strict=True))
        for name, parts in slots.items():
            if not parts:
                continue
            values = np.concatenate(parts)
            if len(values) != len(table):
                raise ValueError(f"{name}: expected it in every round or in none, got it in some")
            arrays[name] = values[order]
        return Trace(domains=tuple(names), draft_len=self._draft_len, **arrays)

    def _domain(self, request: int) -> str:
        return self._domains if isinstance(self._domains, str) else self._domains.get(request, "text")


class _Watched:
    """A policy that tells a recorder of its rounds."""

    def __init__(self, policy: VerifyPolicy, recorder: TraceRecorder) -> None:
        self._policy, self._recorder = policy, recorder
        self._signals: Signals | None = None

    def plan(self, signals: Signals) -> Tensor:
        self._signals = signals
        return self._policy.plan(signals)

    def observe(self, outcome: Outcome) -> None:
        self._recorder.record(self._signals, outcome)
        self._signals = None
        self._policy.observe(outcome)
