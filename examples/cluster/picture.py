"""Picture of the demo's timeline: load, latency, ready replicas and events."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from multiworld.demo.pipeline.picture import COLORS, draw_replicas, mark
from multiworld.demo.pipeline.story import ReplicaCounts, Scene
from multiworld.serve.load.summary import Sample

BAD = "#e6194b"
"""Color of lost and wrong answers."""

SLOT_S = 1.0
"""Seconds that one step of the load curve covers."""


def draw(
    path: Path,
    samples: dict[str, list[Sample]],
    scenes: list[Scene],
    replica_counts: list[ReplicaCounts],
    labels: list[str],
) -> None:
    """Draw load, latency and ready replicas over time, with the scenes marked.

    Args:
        path: File to write; its suffix decides the format.
        samples: Requests of each tenant, by tenant name.
        scenes: Events to mark.
        replica_counts: Ready replicas over time.
        labels: Labels of the counts in ``replica_counts``, in the same order.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(
        3,
        1,
        sharex=True,
        figsize=(13, 9),
        height_ratios=(1, 2, 1.4),
        layout="constrained",
    )
    above, middle, below = rows
    for number, (tenant, found) in enumerate(samples.items()):
        color = COLORS[number % len(COLORS)]
        _load(above, found, color, tenant)
        _latency(middle, found, color, tenant)
    draw_replicas(below, replica_counts, labels)
    mark(scenes, middle, rows, "bottom")
    above.set_title("Three tenants on four nodes: load, latency, replicas")
    above.set_ylabel("requests/s")
    middle.set_yscale("log")
    middle.set_ylabel("latency (ms)")
    for axes in rows:
        low, high = axes.get_ylim()
        room = high * (high / low) ** 0.15 if axes is middle else high + 0.3 * high
        axes.set_ylim(top=room)
        axes.legend(loc="upper left", ncols=5, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _load(axes: Any, samples: list[Sample], color: str, tenant: str) -> None:
    counts = Counter(int(s.due_s / SLOT_S) for s in samples)
    last = max(counts, default=0)
    axes.step(
        [slot * SLOT_S for slot in range(last + 1)],
        [counts[slot] / SLOT_S for slot in range(last + 1)],
        where="post",
        color=color,
        label=tenant,
    )


def _latency(axes: Any, samples: list[Sample], color: str, tenant: str) -> None:
    good = [s for s in samples if s.is_answered and s.is_right is not False]
    refused = [s for s in samples if s.status == 429]
    bad = [s for s in samples if s not in good and s.status != 429]
    for found, marker, shade, label in (
        (good, ".", color, f"{tenant}: answered ({len(good)})"),
        (refused, "|", color, f"{tenant}: refused, 429 ({len(refused)})"),
        (bad, "x", BAD, f"{tenant}: lost or wrong ({len(bad)})"),
    ):
        if found:
            axes.scatter(
                [s.due_s for s in found],
                [s.latency_s * 1000 for s in found],
                s=30 if marker == "x" else 12,
                marker=marker,
                color=shade,
                label=label,
            )
