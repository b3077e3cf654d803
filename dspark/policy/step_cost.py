"""What a step of an engine costs, with drafts or without."""

from __future__ import annotations

from dataclasses import replace

from dspark.policy.cost import CostProfile


class StepCost:
    """Seconds of a step, looked up as often as a simulation does.

    Args:
        profile: of rounds. Where it has a curve for drafting, a step without drafts does not pay it.
        plain: of steps without drafts, for a profile that has no such curve; None charges them like rounds.

    Raises:
        ValueError: ``plain`` is given beside a profile with a curve for drafting.
    """

    def __init__(self, profile: CostProfile, plain: CostProfile | None = None) -> None:
        if plain is not None and profile.draft_requests:
            raise ValueError("plain: expected None, since the profile itself says what drafting costs")
        self.profile = profile
        verify = replace(profile, draft_requests=(), draft_seconds=())
        self._verify = {True: _Curve(verify), False: _Curve(verify if plain is None else plain)}
        self._draft = (
            _Curve(CostProfile(profile.draft_requests, profile.draft_seconds)) if profile.draft_requests else None
        )

    def seconds(self, rows: int, requests: int, context_tokens: int, drafting: bool) -> float:
        """How long a step takes.

        Args:
            rows: that the target processes: anchors, drafts to verify, prompt tokens.
            requests: that decode.
            context_tokens: their tokens of context, all together.
            drafting: whether drafts are made for them.
        """
        curve = self._verify[drafting]
        extra = curve.profile.seconds_per_context_token * (context_tokens - curve.profile.context_tokens)
        if drafting and self._draft is not None:
            extra += self._draft.at(requests)
        return max(curve.at(rows) + extra, curve.least)


class _Curve:
    """A profile's seconds by rows as a list, as long as was needed so far."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self.least = min(profile.seconds) / 100  # as the profile itself has it
        self._seconds: list[float] = []

    def at(self, rows: int) -> float:
        if rows >= len(self._seconds):
            self._seconds = (1 / self.profile.steps_per_second(2 * rows)).tolist()
        return self._seconds[rows]
