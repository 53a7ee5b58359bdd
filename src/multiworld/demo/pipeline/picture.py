"""Picture of the demo's timeline: latency, ready replicas and events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multiworld.demo.pipeline.story import ReplicaCounts, Scene
from multiworld.serve.load.summary import Sample

COLORS = ("#4363d8", "#911eb4", "#3cb44b", "#f58231", "#469990")
"""Colors of tenants, models and stages, in order."""

SHADE = "#f58231"
"""Color behind the time that an event took."""


def draw(
    path: Path,
    title: str,
    samples: dict[str, list[Sample]],
    scenes: list[Scene],
    replica_counts: list[ReplicaCounts],
    labels: list[str],
) -> None:
    """Draw latencies and ready replicas over time, with the scenes marked.

    Args:
        path: File to write; its suffix decides the format.
        title: Title of the picture.
        samples: Requests of each model, by model name.
        scenes: Events to mark.
        replica_counts: Ready replicas over time.
        labels: Labels of the counts in ``replica_counts``, in the same order.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(12, 7), height_ratios=(3, 1), layout="constrained"
    )
    for number, (model, found) in enumerate(samples.items()):
        name = f"{model}: " if len(samples) > 1 else ""
        _scatter(above, found, COLORS[2 * number], name)
    above.set_yscale("log")
    above.set_ylabel("latency (ms)")
    above.set_title(title)
    mark(scenes, above, (above, below), "top")
    above.legend(loc="lower left")
    draw_replicas(below, replica_counts, labels)
    below.legend(loc="upper left", ncols=len(labels))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_replicas(
    axes: Any, replica_counts: list[ReplicaCounts], labels: list[str]
) -> None:
    """Draw the ready replicas over time.

    Args:
        axes: Axes of the picture, the lowest ones.
        replica_counts: Ready replicas over time.
        labels: Labels of the counts in ``replica_counts``, in the same order.
    """
    for number, label in enumerate(labels):
        axes.step(
            [s.at_s for s in replica_counts],
            [s.ready[number] + 0.06 * number for s in replica_counts],
            where="post",
            label=label,
            color=COLORS[number % len(COLORS)],
        )
    axes.set_ylabel("ready replicas")
    axes.set_xlabel("seconds")
    axes.set_ylim(bottom=-0.2)


def mark(scenes: list[Scene], named: Any, every: Sequence[Any], side: str) -> None:
    """Shade the time of each scene, and write its title.

    Args:
        scenes: Events to mark.
        named: Axes that get the titles.
        every: Axes that get the shading.
        side: Edge that the titles start at: "top" or "bottom".
    """
    for scene in scenes:
        for axes in every:
            axes.axvspan(scene.begin_s, scene.end_s, color=SHADE, alpha=0.25, lw=0)
        named.annotate(
            scene.title,
            (scene.begin_s, 0.99 if side == "top" else 0.02),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va=side,
            ha="right",
            fontsize=9,
        )


def _scatter(axes: Any, samples: list[Sample], color: str, name: str) -> None:
    good = [s for s in samples if s.is_answered and s.is_right is not False]
    bad = [s for s in samples if not s.is_answered or s.is_right is False]
    axes.scatter(
        [s.due_s for s in good],
        [s.latency_s * 1000 for s in good],
        s=9,
        color=color,
        label=f"{name}answered and right ({len(good)})",
    )
    axes.scatter(
        [s.due_s for s in bad],
        [s.latency_s * 1000 for s in bad],
        s=30,
        marker="x",
        color="#e6194b",
        label=f"{name}lost or wrong ({len(bad)})",
    )
