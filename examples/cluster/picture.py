"""Picture of the cluster example: load, latency and replicas over time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from multiworld.demo.chats.picture import COLORS, CUT, DPI, draw_replicas, mark
from multiworld.demo.chats.story import ReplicaCounts, Scene
from multiworld.serve.load.summary import Sample


def draw(
    path: Path,
    samples: dict[str, list[Sample]],
    scenes: list[Scene],
    replica_counts: list[ReplicaCounts],
    labels: list[str],
) -> None:
    """Draw the requests of each tenant, and the ready replicas under each label."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(
        3,
        1,
        sharex=True,
        figsize=(8.0, 6.5),
        height_ratios=(1, 2, 1.4),
        layout="constrained",
    )
    above, middle, below = rows
    for (tenant, found), color in zip(samples.items(), COLORS, strict=False):
        counts = Counter(int(s.due_s) for s in found)
        seconds = range(max(counts, default=0) + 1)
        rates = [counts[second] for second in seconds]
        above.step(seconds, rates, where="post", color=color, label=tenant)
        good = [s for s in found if s.is_answered and s.is_right is not False]
        refused = [s for s in found if s.status == 429]
        bad = [s for s in found if s not in good and s.status != 429]
        for shown, marker, shade, label in (
            (good, ".", color, "answered"),
            (refused, "|", color, "refused, 429"),
            (bad, "x", CUT, "lost or wrong"),
        ):
            if shown:
                middle.scatter(
                    [s.due_s for s in shown],
                    [s.latency_s * 1000 for s in shown],
                    s=8,
                    marker=marker,
                    color=shade,
                    label=f"{tenant}: {label}\n({len(shown)})",
                )
    middle.set_yscale("log")
    draw_replicas(below, replica_counts, labels)
    mark(scenes, above, rows)
    above.set_ylabel("requests/s")
    middle.set_ylabel("latency (ms)")
    for axes in (above, middle):
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
