"""The engine that is simulated."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from dspark.policy.cost import CostProfile, StepCost


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
