"""Results as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dspark.policy.simulator.results import Result


def write_picture(path: str | Path, results: Sequence[Result]) -> None:
    """Draw throughput against speed per user, and what is verified and wasted against the load, a line per policy.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'a picture needs matplotlib; install it with: pip install "dspark[plot]"', name="matplotlib"
        ) from error

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (speed, budget, waste) = plt.subplots(1, 3, figsize=(16, 4.5))
    for policy in dict.fromkeys(result.policy for result in results):
        own = [result for result in results if result.policy == policy]
        running = [result.running for result in own]
        speed.plot([r.user_tokens_per_s for r in own], [r.tokens_per_s for r in own], "o-", label=policy, markersize=3)
        budget.plot(running, [r.verified_per_round for r in own], "o-", label=policy, markersize=3)
        waste.plot(running, [100 * r.waste for r in own], "o-", label=policy, markersize=3)
    speed.set(xlabel="tokens/s per user", ylabel="tokens/s of the service", yscale="log")
    budget.set(xlabel="running requests", ylabel="drafts verified per request and round")
    waste.set(xlabel="running requests", ylabel="verified drafts that were rejected, %")
    speed.legend(fontsize=8)
    for axes in (budget, waste):
        axes.set_xscale("log", base=2)
    for axes in (speed, budget, waste):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(Path(path), dpi=120)
    plt.close(figure)
