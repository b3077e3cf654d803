"""The scheduler against the paper's Algorithm 1 and appendix A, written out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.schedule import schedule_prefix
from dspark.ops.schedule.reference import MAX_ROWS, UNIT_BITS, ScheduleMode

NAN = float("nan")
UNIT = 2**UNIT_BITS
FLAT = torch.ones(64, dtype=torch.float64)


def lengths(confidence: list[list[float]], speed: Tensor | None, **options: Any) -> list[int]:
    return schedule_prefix(torch.tensor(confidence, dtype=torch.float64), speed, **options).tolist()


@dataclass(frozen=True)
class Problem:
    """A batch: confidences, a curve, and what may adjust the choice."""

    confidence: list[list[float]]
    speed: list[float]
    caps: list[int] | None = None
    floors: list[int] | None = None
    weights: list[float] | None = None

    def survivals(self) -> list[list[int]]:
        """Of each draft, in whole units."""
        found = []
        for r, row in enumerate(self.confidence):
            survival, own = 1.0, []
            for c in row:
                survival *= c
                own.append(int((1.0 if self.weights is None else self.weights[r]) * survival * UNIT))
            found.append(own)
        return found

    def ends(self, r: int) -> tuple[int, int]:
        """The floor and the cap of a request."""
        cap = len(self.confidence[r]) if self.caps is None else min(self.caps[r], len(self.confidence[r]))
        return min(0 if self.floors is None else self.floors[r], cap), cap

    def start(self) -> tuple[list[int], int]:
        """Lengths and worth before the search."""
        floors = [self.ends(r)[0] for r in range(len(self.confidence))]
        anchors = sum(UNIT if self.weights is None else int(self.weights[r] * UNIT) for r in range(len(floors)))
        return floors, anchors + sum(sum(own[:n]) for own, n in zip(self.survivals(), floors, strict=True))

    def candidates(self) -> list[tuple[int, int, int]]:
        """Every draft ``(worth, request, k)`` to search, the most likely first, ties by (request, k)."""
        found = []
        for r, own in enumerate(self.survivals()):
            floor, cap = self.ends(r)
            found += [(units, r, k) for k, units in enumerate(own) if units > 0 and floor <= k < cap]
        return sorted(found, key=lambda x: (-x[0], x[1], x[2]))


def algorithm_1(problem: Problem) -> list[int]:
    """Algorithm 1 as the paper prints it, from the floors on."""
    admitted, tau = problem.start()
    rows = len(admitted) + sum(admitted)
    best = tau * problem.speed[rows]
    for survival, r, k in problem.candidates():
        rows += 1
        tau += survival
        theta = tau * problem.speed[rows]
        if theta <= best:
            break
        best = theta
        admitted[r] = k + 1
    return admitted


def best_of_all(problem: Problem) -> list[int]:
    """The same walk without the stop: the first of the best totals."""
    admitted, tau = problem.start()
    rows = len(admitted) + sum(admitted)
    best, chosen = tau * problem.speed[rows], list(admitted)
    for survival, r, k in problem.candidates():
        rows += 1
        tau += survival
        admitted[r] = k + 1
        if tau * problem.speed[rows] > best:
            best, chosen = tau * problem.speed[rows], list(admitted)
    return chosen


def first_of(problem: Problem, budget: int) -> list[int]:
    admitted, _ = problem.start()
    for _, r, k in problem.candidates()[: max(budget - sum(admitted), 0)]:
        admitted[r] = k + 1
    return admitted


# A coarse grid makes ties, zeros and ones common; any double in between makes them rare.
probabilities = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0, 1.0]), st.floats(0, 1))


@st.composite
def problems(draw: st.DrawFn, max_requests: int = 5, max_drafts: int = 5) -> Problem:
    requests, draft_len = draw(st.integers(1, max_requests)), draw(st.integers(1, max_drafts))

    def each(elements: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(elements, min_size=requests, max_size=requests))

    confidence = each(st.lists(probabilities, min_size=draft_len, max_size=draft_len))
    count = requests * (1 + draft_len) + 1
    if draw(st.booleans()):
        speed = draw(st.lists(st.floats(0.01, 10), min_size=count, max_size=count))  # jagged
    else:
        base, slope = draw(st.floats(0.1, 20)), draw(st.floats(0, 1))
        step = draw(st.integers(1, 4))  # graphs pad to a multiple of it
        speed = [1 / (base + slope * -(-rows // step) * step) for rows in range(count)]
    return Problem(
        confidence,
        speed,
        caps=each(st.integers(0, draft_len + 1)) if draw(st.booleans()) else None,
        floors=each(st.integers(0, draft_len + 1)) if draw(st.booleans()) else None,
        weights=each(st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0, 1)) if draw(st.booleans()) else None,
    )


def arguments_of(problem: Problem) -> dict[str, Any]:
    """A problem's tensors by the op's names."""
    return {
        "confidence": torch.tensor(problem.confidence, dtype=torch.float64),
        "steps_per_second": torch.tensor(problem.speed, dtype=torch.float64),
        "max_lengths": None if problem.caps is None else torch.tensor(problem.caps),
        "min_lengths": None if problem.floors is None else torch.tensor(problem.floors),
        "weights": None if problem.weights is None else torch.tensor(problem.weights, dtype=torch.float64),
    }


def scheduled(problem: Problem, **options: Any) -> list[int]:
    return schedule_prefix(**arguments_of(problem), **options).tolist()


@given(problems())
def test_early_stop_is_algorithm_1(problem: Problem) -> None:
    assert scheduled(problem, mode="early_stop") == algorithm_1(problem)


@given(problems())
def test_global_is_the_best_of_all(problem: Problem) -> None:
    assert scheduled(problem, mode="global") == best_of_all(problem)


@given(problems(), st.integers(-1, 30))
def test_budget_takes_the_most_likely(problem: Problem, budget: int) -> None:
    assert scheduled(problem, mode="budget", budget=torch.tensor(budget)) == first_of(problem, budget)


@given(problems(), st.data())
def test_c9_early_stop_does_not_look_ahead(problem: Problem, data: st.DataObject) -> None:
    """Whether draft k is verified does not change with the request's later confidences, which its token influences."""
    confidence = problem.confidence
    r = data.draw(st.integers(0, len(confidence) - 1))
    kept = data.draw(st.integers(0, len(confidence[r])))
    later = data.draw(st.lists(probabilities, min_size=len(confidence[r]) - kept, max_size=len(confidence[r]) - kept))
    other = [list(row) for row in confidence]
    other[r] = confidence[r][:kept] + later
    before, after = (scheduled(p, mode="early_stop") for p in (problem, replace(problem, confidence=other)))
    assert min(before[r], kept) == min(after[r], kept)


def test_appendix_a() -> None:
    """Early stop admits nothing whatever c_2 is; without the stop c_2, which depends on x_1, decides about x_1."""
    speed = torch.tensor([0.0, 1.0, 0.5, 0.45], dtype=torch.float64)
    # Theta_0 = 1.0 and Theta_1 = 1.8 * 0.5 = 0.9; Theta_2 = 2.52 * 0.45 = 1.134, or 1.8 * 0.45 = 0.81.
    for c_2, unstopped in ((0.9, [2]), (0.0, [0])):
        assert lengths([[0.8, c_2]], speed, mode="early_stop") == [0]
        assert lengths([[0.8, c_2]], speed, mode="global") == unstopped


def test_ties_go_by_request_then_draft() -> None:
    tied = [[0.5, 1.0], [0.5, 1.0], [0.5, 1.0]]
    chosen = [lengths(tied, None, mode="budget", budget=torch.tensor(n)) for n in range(8)]
    assert chosen == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [2, 1, 0], [2, 2, 0], [2, 2, 1], [2, 2, 2], [2, 2, 2]]


def test_ties_keep_their_order_beyond_a_small_sort() -> None:
    """Sorts that are stable by accident on a few elements are not on many."""
    assert lengths([[1.0] * 7] * 300, None, mode="budget", budget=torch.tensor(1000)) == [7] * 142 + [6] + [0] * 157


@pytest.mark.parametrize("mode", ["early_stop", "global"])
def test_free_verification_takes_all_but_the_impossible(mode: ScheduleMode) -> None:
    """A survival of 0 is never worth a row, though it would cost none of the speed."""
    assert lengths([[0.1, 0.1, 0.1], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], FLAT, mode=mode) == [3, 1, 0]
    assert lengths([[0.5, 0.0]], None, mode="budget", budget=torch.tensor(2)) == [1]


@pytest.mark.parametrize("mode", ["early_stop", "global"])
def test_p23_no_draft_is_worth_a_full_batch(mode: ScheduleMode) -> None:
    """Where every row costs as much as the round, the best length is 0."""
    speed = torch.tensor([1.0 / max(rows, 1) for rows in range(64)], dtype=torch.float64)
    assert lengths([[0.9] * 7] * 4, speed, mode=mode) == [0] * 4


@pytest.mark.parametrize("mode", ["early_stop", "global"])
def test_a_draft_that_gains_nothing_is_not_verified(mode: ScheduleMode) -> None:
    """Theta_0 = 1 * 1.0 and Theta_1 = 2 * 0.5."""
    assert lengths([[1.0]], torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64), mode=mode) == [0]


def test_survival_is_ranked_in_float64() -> None:
    """The second request's product exceeds the first's confidence by 2^-26, which float32 rounds away."""
    confidence = torch.tensor([[1 - 2**-12, 0.0], [1 - 2**-13, 1 - 2**-13]])
    assert schedule_prefix(confidence, None, mode="budget", budget=torch.tensor(2)).tolist() == [0, 2]


def test_a_jagged_curve_stops_one_search_and_not_the_other() -> None:
    speed = torch.tensor([9.0, 9.0, 1.0, 0.4, 1.0, 1.0], dtype=torch.float64)
    assert lengths([[0.9], [0.9]], speed, mode="early_stop") == [0, 0]
    assert lengths([[0.9], [0.9]], speed, mode="global") == [1, 1]


def test_floors_are_verified_whatever_they_are_worth() -> None:
    """Rows cost so much that the search takes nothing beyond them; a cap cuts a floor."""
    steep = torch.tensor([1.0 / max(rows, 1) ** 2 for rows in range(64)], dtype=torch.float64)
    floors, caps = torch.tensor([2, 0, 3, 9]), torch.tensor([3, 3, 1, 3])
    for options in ({"mode": "early_stop"}, {"mode": "global"}, {"mode": "budget", "budget": torch.tensor(1)}):
        got = lengths([[0.0] * 3] * 4, steep, min_lengths=floors, max_lengths=caps, **options)
        assert got == [2, 0, 1, 3]


def test_a_budget_pays_for_the_floors_first() -> None:
    confidence = [[0.9, 0.9], [0.1, 0.1]]
    floors = torch.tensor([0, 1])
    chosen = [lengths(confidence, None, mode="budget", budget=torch.tensor(n), min_lengths=floors) for n in range(5)]
    assert chosen == [[0, 1], [0, 1], [1, 1], [2, 1], [2, 2]]


def test_the_search_counts_what_the_floors_gain() -> None:
    """Three tokens expected at two rows: a third row must bring half as much again, and .9 of one is less."""
    speed = torch.tensor([0.0, 1.0, 1.0, 2 / 3], dtype=torch.float64)
    assert lengths([[1.0, 0.9]], speed, mode="early_stop", min_lengths=torch.tensor([1])) == [1]
    assert lengths([[0.0, 0.9]], speed, mode="early_stop", min_lengths=torch.tensor([1])) == [1]


def test_weights_rank_and_pay() -> None:
    weights = torch.tensor([0.5, 1.0])
    options = {"mode": "budget", "budget": torch.tensor(2)}
    assert lengths([[0.9, 0.9], [0.5, 0.5]], None, **options) == [2, 0]
    assert lengths([[0.9, 0.9], [0.5, 0.5]], None, weights=weights, **options) == [1, 1]
    # 2.9 tokens at three quarters of the speed of 2, but 1.95 instead of 1.5.
    speed = torch.tensor([0.0, 1.0, 1.0, 0.75, 0.1, 0.1, 0.1], dtype=torch.float64)
    assert lengths([[0.9, 0.0], [0.0, 0.0]], speed, mode="early_stop") == [1, 0]
    assert lengths([[0.9, 0.0], [0.0, 0.0]], speed, mode="early_stop", weights=weights) == [0, 0]
    zero = torch.tensor([0.0, NAN])
    assert lengths([[0.9, 0.9], [0.5, 0.5]], FLAT, mode="global", weights=zero) == [0, 0]


def test_the_result_goes_where_it_is_wanted() -> None:
    out = torch.empty(2, dtype=torch.int64)
    assert schedule_prefix(torch.ones(2, 3), FLAT, mode="global", out=out) is out
    assert out.tolist() == [3, 3]


def test_caps() -> None:
    certain = [[1.0] * 3] * 4
    for options in ({"mode": "early_stop"}, {"mode": "global"}, {"mode": "budget", "budget": torch.tensor(99)}):
        assert lengths(certain, FLAT, max_lengths=torch.tensor([0, 1, 3, 9]), **options) == [0, 1, 3, 3]
    # What a cap frees goes to the next in line.
    caps = torch.tensor([0, 1, 3, 3])
    assert lengths(certain, None, mode="budget", budget=torch.tensor(3), max_lengths=caps) == [0, 1, 2, 0]


def test_bad_confidences_count_as_never_or_always() -> None:
    assert lengths([[0.5, NAN, 0.9], [NAN, 0.9, 0.9], [0.9, 0.9, -0.5]], FLAT, mode="early_stop") == [1, 0, 2]
    speed = torch.tensor([1.0, 1.0, 0.4, 0.3], dtype=torch.float64)
    assert lengths([[7.0, 1.0]], speed, mode="early_stop") == [0]


@pytest.mark.parametrize("mode", ["early_stop", "global"])
def test_dtypes(mode: ScheduleMode) -> None:
    confidence = torch.tensor([[0.9, 0.5], [0.75, 0.25]])
    speed = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8, 0.5, 0.1])
    expected = schedule_prefix(confidence.double(), speed.double(), mode=mode)
    caps = torch.tensor([2, 2], dtype=torch.int32)
    got = schedule_prefix(confidence, speed, mode=mode, max_lengths=caps)
    assert got.dtype == torch.int64
    assert torch.equal(got, expected)


def test_empty_batches() -> None:
    for shape in ((0, 3), (2, 0), (0, 0)):
        for options in ({"mode": "early_stop"}, {"mode": "global"}, {"mode": "budget", "budget": torch.tensor(2)}):
            got = schedule_prefix(torch.rand(shape), FLAT, **options)
            assert got.tolist() == [0] * shape[0]


FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "short curve": (
        {"steps_per_second": torch.ones(8)},
        ValueError,
        r'steps_per_second: expected shape "C" with C > R \* \(1 \+ G\) = 8, got \[8\]',
    ),
    "p24 no curve": ({"steps_per_second": None}, ValueError, 'mode "early_stop" needs the speed curve "C", got None'),
    "p24 no curve, global": ({"steps_per_second": None, "mode": "global"}, ValueError, 'mode "global" needs the speed'),
    "no budget": ({"mode": "budget"}, ValueError, 'budget: expected with mode "budget" and with no other, got None'),
    "p04 unused budget": ({"budget": torch.tensor(3)}, ValueError, 'budget: expected with mode "budget" and with no'),
    "backend": ({"backend": "cuda"}, ValueError, "backend"),
    "too many": ({"confidence": torch.empty(1, device="meta").expand(MAX_ROWS, 3)}, ValueError, "confidence: expected"),
}


@pytest.mark.parametrize(("changes", "error", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"mode": "early_stop", **changes}
    confidence = arguments.pop("confidence", torch.rand(2, 3))
    speed = arguments.pop("steps_per_second", torch.ones(9))
    with pytest.raises(error, match=message):
        schedule_prefix(confidence, speed, **arguments)
