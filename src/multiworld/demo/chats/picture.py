"""Picture of the chat demo: tokens over time, with the events marked."""

from __future__ import annotations

from pathlib import Path

from multiworld.demo.chats.chats import Chat
from multiworld.demo.pipeline.picture import COLORS, draw_replicas, mark
from multiworld.demo.pipeline.story import ReplicaCounts, Scene

CUT = "#e6194b"
"""Color of a chat that was cut."""


def draw(
    path: Path,
    chats: list[Chat],
    scenes: list[Scene],
    replica_counts: list[ReplicaCounts],
    labels: list[str],
) -> None:
    """Draw the tokens of each chat over time, and the ready replicas.

    Args:
        path: File to write; its suffix decides the format.
        chats: The chats.
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
