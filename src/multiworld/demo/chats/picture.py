"""Picture of the chat demo: tokens over time, with the events marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multiworld.demo.chats.chats import Chat
from multiworld.demo.chats.story import ReplicaCounts, Scene

# Colors of chats, tenants and stages, in order.
COLORS = ("#4363d8", "#911eb4", "#3cb44b", "#f58231", "#469990")
SHADE = "#f58231"  # background color for the duration of an event
CUT = "#e6194b"  # color of a chat that was cut off


def draw(
    path: Path,  # its suffix decides the format
    chats: list[Chat],
    scenes: list[Scene],
    replica_counts: list[ReplicaCounts],
    labels: list[str],  # names of the columns of ``replica_counts``
) -> None:
    """Draw the tokens of each chat over time, and the ready replicas."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(13, 8), height_ratios=(3, 1), layout="constrained"
    )
    for chat in chats:
        color = CUT if chat.error else COLORS[chat.number % len(COLORS)]
        above.step(
            chat.times, range(len(chat.times)), where="post", color=color, lw=1.2
        )
    above.set_ylabel("tokens of each chat")
    above.set_title("Chats on a model in three stages: each line is a stream")
    mark(scenes, above, (above, below), "top")
    draw_replicas(below, replica_counts, labels)
    below.legend(loc="upper left", ncols=len(labels))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_replicas(
    axes: Any, replica_counts: list[ReplicaCounts], labels: list[str]
) -> None:
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
    """Shade the time of each scene, and write its title."""
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
