"""Plot of a simulated run: load, replicas, latencies."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from multiworld.serve.load.summary import quantile
from multiworld.serve.simulation.pipeline import SimulationResult

COLORS = ("#4363d8", "#f58231", "#3cb44b", "#911eb4", "#469990", "#808000")
POINTS = 300  # maximum number of points in time in a plot


def draw(path: Path, title: str, outcomes: dict[str, list[SimulationResult]]) -> None:
    """Plot the runs of all policies; the suffix of ``path`` selects the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    count = len(outcomes)
    figure, rows = plt.subplots(
        count + 2,
        1,
        sharex=True,
        figsize=(12, 3 + 2 * count),
        height_ratios=[1.4, *[1.0] * count, 1.6],
        layout="constrained",
    )
    first = next(iter(outcomes.values()))
    _load(rows[0], first)
    rows[0].set_title(title)
    for axes, (policy, found) in zip(rows[1:-1], outcomes.items(), strict=True):
        _replicas(axes, policy, found)
    for number, (policy, found) in enumerate(outcomes.items()):
        _latencies(rows[-1], policy, found, COLORS[number % len(COLORS)])
    limits = {o.objective_s for o in first if o.objective_s}
    for limit in limits:
        rows[-1].axhline(limit, color="#e6194b", lw=0.8, ls="--", label="objective")
    rows[-1].set_yscale("log")
    rows[-1].set_ylabel("slowest (s)")
    rows[-1].legend(loc="upper left", ncols=count + 1, fontsize=8)
    rows[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _width(outcomes: list[SimulationResult]) -> float:
    return max(1.0, max(o.seconds for o in outcomes) / POINTS)


def _load(axes: Any, outcomes: list[SimulationResult]) -> None:
    width = _width(outcomes)
    for number, outcome in enumerate(outcomes):
        counts = Counter(int(at / width) for at, _ in outcome.requests)
        last = max(counts, default=0)
        axes.step(
            [n * width for n in range(last + 1)],
            [counts[n] / width for n in range(last + 1)],
            where="post",
            color=COLORS[number % len(COLORS)],
            label=outcome.model,
            lw=0.9,
        )
    axes.set_ylabel("requests/s")
    axes.legend(loc="upper left", fontsize=8)


def _replicas(axes: Any, policy: str, outcomes: list[SimulationResult]) -> None:
    for number, outcome in enumerate(outcomes):
        at = [m.at for m in outcome.moments] + [outcome.seconds]
        ready = [sum(m.ready) for m in outcome.moments]
        axes.step(
            at,
            [*ready, *ready[-1:]],
            where="post",
            color=COLORS[number % len(COLORS)],
            label=outcome.model,
        )
    axes.set_ylabel(f"{policy}\nreplicas", fontsize=8)
    axes.set_ylim(bottom=0)


def _latencies(
    axes: Any, policy: str, outcomes: list[SimulationResult], color: str
) -> None:
    width = _width(outcomes)
    slots: dict[int, list[float]] = {}
    for outcome in outcomes:
        for at, took in outcome.requests:
            if took >= 0:
                slots.setdefault(int(at / width), []).append(took)
    axes.plot(
        [n * width for n in sorted(slots)],
        [quantile(slots[n], 0.99) for n in sorted(slots)],
        color=color,
        lw=0.8,
        label=policy,
    )
