"""The scheduler against the paper's Algorithm 1 and appendix A, written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.schedule import ScheduleMode, schedule_prefix

NAN = float("nan")
FLAT = torch.ones(64, dtype=torch.float64)


def lengths(confidence: list[list[float]], speed: Tensor | None, **options: Any) -> list[int]:
    return schedule_prefix(torch.tensor(confidence, dtype=torch.float64), speed, **options).tolist()


def candidates(confidence: list[list[float]], caps: list[int] | None) -> list[tuple[float, int, int]]:
    """Every admissible draft ``(survival, request, slot)``, the most likely first, ties by (request, slot)."""
    found = []
    for r, row in enumerate(confidence):
        survival = 1.0
        for k, c in enumerate(row):
            survival *= c
            if survival > 0 and (caps is None or k < caps[r]):
                found.append((survival, r, k))
    return sorted(found, key=lambda x: (-x[0], x[1], x[2]))


def algorithm_1(confidence: list[list[float]], speed: list[float], caps: list[int] | None = None) -> list[int]:
    """Algorithm 1 as the paper prints it."""
    admitted = [0] * len(confidence)
    rows = len(confidence)
    tau = float(rows)
    best = tau * speed[rows]
    for survival, r, k in candidates(confidence, caps):
        rows += 1
        tau += survival
        theta = tau * speed[rows]
        if theta <= best:
            break
        best = theta
        admitted[r] = k + 1
    return admitted


def best_of_all(confidence: list[list[float]], speed: list[float], caps: list[int] | None = None) -> list[int]:
    """The same walk without the stop: the first of the best totals."""
    admitted = [0] * len(confidence)
    rows = len(confidence)
    tau = float(rows)
    best, chosen = tau * speed[rows], list(admitted)
    for survival, r, k in candidates(confidence, caps):
        rows += 1
        tau += survival
        admitted[r] = k + 1
        if tau * speed[rows] > best:
            best, chosen = tau * speed[rows], list(admitted)
    return chosen


def first_of(confidence: list[list[float]], budget: int, caps: list[int] | None = None) -> list[int]:
    admitted = [0] * len(confidence)
    for _, r, k in candidates(confidence, caps)[: max(budget, 0)]:
        admitted[r] = k + 1
    return admitted


# A coarse grid makes ties, zeros and ones common; any double in between makes them rare.
probabilities = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0, 1.0]), st.floats(0, 1))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[float]], list[float], list[int] | None]:
    requests, draft_len = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    row = st.lists(probabilities, min_size=draft_len, max_size=draft_len)
    confidence = draw(st.lists(row, min_size=requests, max_size=requests))
    count = requests * (1 + draft_len) + 1
    if draw(st.booleans()):
        speed = draw(st.lists(st.floats(0.01, 10), min_size=count, max_size=count))  # jagged
    else:
        base, slope = draw(st.floats(0.1, 20)), draw(st.floats(0, 1))
        step = draw(st.integers(1, 4))  # graphs pad to a multiple of it
        speed = [1 / (base + slope * -(-rows // step) * step) for rows in range(count)]
    caps = draw(st.none() | st.lists(st.integers(0, draft_len + 1), min_size=requests, max_size=requests))
    return confidence, speed, caps


def scheduled(confidence: list[list[float]], speed: list[float], caps: list[int] | None, **options: Any) -> list[int]:
    return lengths(
        confidence,
        torch.tensor(speed, dtype=torch.float64),
        max_lengths=None if caps is None else torch.tensor(caps),
        **options,
    )


@given(cases())
def test_early_stop_is_algorithm_1(case: tuple[list[list[float]], list[float], list[int] | None]) -> None:
    assert scheduled(*case, mode="early_stop") == algorithm_1(*case)


@given(cases())
def test_global_is_the_best_of_all(case: tuple[list[list[float]], list[float], list[int] | None]) -> None:
    assert scheduled(*case, mode="global") == best_of_all(*case)


@given(cases(), st.integers(-1, 30))
def test_budget_takes_the_most_likely(
    case: tuple[list[list[float]], list[float], list[int] | None], budget: int
) -> None:
    confidence, _, caps = case
    assert scheduled(*case, mode="budget", budget=torch.tensor(budget)) == first_of(confidence, budget, caps)


@given(cases(), st.data())
def test_c9_early_stop_does_not_look_ahead(
    case: tuple[list[list[float]], list[float], list[int] | None], data: st.DataObject
) -> None:
    """Whether slot k is verified does not change with the request's later confidences, which its token influences."""
    confidence, speed, caps = case
    r = data.draw(st.integers(0, len(confidence) - 1))
    kept = data.draw(st.integers(0, len(confidence[r])))
    later = data.draw(st.lists(probabilities, min_size=len(confidence[r]) - kept, max_size=len(confidence[r]) - kept))
    other = [list(row) for row in confidence]
    other[r] = confidence[r][:kept] + later
    before, after = (scheduled(c, speed, caps, mode="early_stop") for c in (confidence, other))
    assert min(before[r], kept) == min(after[r], kept)


def test_appendix_a() -> None:
    """Early stop admits nothing whatever c_2 is; without the stop c_2, which depends on x_1, decides about x_1."""
    speed = torch.tensor([0.0, 1.0, 0.5, 0.45], dtype=torch.float64)
    # Theta_0 = 1.0 and Theta_1 = 1.8 * 0.5 = 0.9; Theta_2 = 2.52 * 0.45 = 1.134, or 1.8 * 0.45 = 0.81.
    for c_2, unstopped in ((0.9, [2]), (0.0, [0])):
        assert lengths([[0.8, c_2]], speed, mode="early_stop") == [0]
        assert lengths([[0.8, c_2]], speed, mode="global") == unstopped


def test_ties_go_by_request_then_slot() -> None:
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


@pytest.mark.parametrize("mode", ["early_stop", "global", "budget"])
def test_never_reads_the_device(mode: ScheduleMode) -> None:
    """Meta tensors have shapes and no numbers."""
    budget = torch.tensor(3, device="meta") if mode == "budget" else None
    confidence = torch.rand(2, 3, device="meta")
    caps = torch.tensor([1, 2], device="meta")
    got = schedule_prefix(confidence, FLAT.to("meta"), mode=mode, budget=budget, max_lengths=caps)
    assert got.shape == (2,)


FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dimensions": ({"confidence": torch.rand(3)}, ValueError, r'confidence: expected shape "R G"'),
    "integers": ({"confidence": torch.ones(2, 3).long()}, TypeError, "confidence: expected dtype"),
    "short curve": (
        {"steps_per_second": torch.ones(8)},
        ValueError,
        r'steps_per_second: expected shape "C" with C > R \* \(1 \+ G\) = 8, got \[8\]',
    ),
    "p24 no curve": ({"steps_per_second": None}, ValueError, 'mode "early_stop" needs the speed curve "C", got None'),
    "p24 no curve, global": ({"steps_per_second": None, "mode": "global"}, ValueError, 'mode "global" needs the speed'),
    "curve dimensions": ({"steps_per_second": torch.ones(9, 1)}, ValueError, 'steps_per_second: expected shape "C"'),
    "mode": ({"mode": "best"}, ValueError, "mode: expected one of 'early_stop', 'global', 'budget', got 'best'"),
    "no budget": ({"mode": "budget"}, ValueError, 'budget: expected with mode "budget" and with no other, got None'),
    "p04 unused budget": ({"budget": torch.tensor(3)}, ValueError, 'budget: expected with mode "budget" and with no'),
    "budget per request": ({"mode": "budget", "budget": torch.tensor([3, 3])}, ValueError, 'budget: expected shape ""'),
    "float budget": ({"mode": "budget", "budget": torch.tensor(3.0)}, TypeError, "budget: expected dtype int64"),
    "caps": ({"max_lengths": torch.tensor([1])}, ValueError, r'max_lengths: expected shape "R" with R = 2'),
    "float caps": ({"max_lengths": torch.tensor([1.0, 2.0])}, TypeError, "max_lengths: expected dtype int64"),
    "backend": ({"backend": "cuda"}, ValueError, "backend"),
    "no kernel": ({"backend": "triton"}, ValueError, "backend: schedule_prefix has no Triton kernel"),
}


@pytest.mark.parametrize(("changes", "error", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"mode": "early_stop", **changes}
    confidence = arguments.pop("confidence", torch.rand(2, 3))
    speed = arguments.pop("steps_per_second", torch.ones(9))
    with pytest.raises(error, match=message):
        schedule_prefix(confidence, speed, **arguments)
