"""Picture of the chat demo: tokens over time, with the events marked."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from multiworld.demo.chats.chats import Chat
from multiworld.demo.chats.story import Chains, ReplicaCounts, Scene, Story

# Colors of chains and of stages, in order; color-blind readers can tell them apart
# (Okabe and Ito, 2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARK = "#555555"  # color of events
CUT = "#e6194b"  # color of a chat that was cut off

SIZE_IN, DPI = (8.0, 5.4), 200  # the plot is readable at a width of 800 pixels


def draw(path: Path, chats: list[Chat], story: Story) -> None:
    """Draw the tokens of each chat over time, and the ready replicas.

    Each chat is a line, in the color of the chain of replicas that computes it. The
    suffix of ``path`` decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=SIZE_IN, height_ratios=(3, 1), layout="constrained"
    )
    colors: dict[tuple[str, ...], str] = {}
    for chat in chats:
        for chain, times, first in pieces(chat, story.chains):
            color = colors.setdefault(chain, COLORS[len(colors) % len(COLORS)])
            if chat.error:
                color = CUT
            tokens = range(first, first + len(times))
            above.step(times, tokens, where="post", color=color, lw=1.0)
    above.set_ylabel("tokens of each chat")
    draw_replicas(below, story.replica_counts, story.labels)
    mark(story.scenes, above, (above, below))
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def pieces(
    chat: Chat, looks: list[Chains]
) -> Iterator[tuple[tuple[str, ...], list[float], int]]:
    """Yield a chat's parts by chain: the chain, times, and index of the first token."""
    known = [
        (look.at_s, look.of[chat.request]) for look in looks if chat.request in look.of
    ]
    at = [at_s for at_s, _ in known]

    def chain_at(time_s: float) -> tuple[str, ...]:
        if not known:
            return ()
        return known[max(0, bisect.bisect_right(at, time_s) - 1)][1]

    numbered = list(enumerate(chat.times))
    for chain, group in itertools.groupby(numbered, lambda each: chain_at(each[1])):
        part = list(group)
        first, last = part[0][0], part[-1][0]
        # Include the next part's first time, so that the line has no gap.
        yield chain, chat.times[first : last + 2], first


def draw_replicas(axes: Any, counts: list[ReplicaCounts], labels: list[str]) -> None:
    """Draw the ready replicas of each stage over time, named in the margin."""
    for number, label in enumerate(labels):
        axes.step(
            [s.at_s for s in counts],
            [s.ready[number] + 0.07 * number for s in counts],
            where="post",
            color=COLORS[number],
            lw=1.4,
        )
        if counts:
            axes.annotate(
                label,
                (1.01, counts[-1].ready[number] + 0.07 * number),
                xycoords=("axes fraction", "data"),
                xytext=(0, 9 * (number - (len(labels) - 1) / 2)),
                textcoords="offset points",
                color=COLORS[number],
                va="center",
                annotation_clip=False,
            )
    axes.set_ylabel("ready\nreplicas")
    axes.set_xlabel("seconds")
    axes.set_ylim(bottom=-0.2)


def mark(scenes: list[Scene], top: Any, every: Sequence[Any]) -> None:
    """Mark each event by a thin line, and write its title in the margin above."""
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        for scene in scenes:
            axes.axvline(scene.begin_s, color=MARK, lw=0.8, ls=(0, (3, 2)))
    for scene in scenes:
        top.annotate(
            scene.title,
            (scene.begin_s, 1.01),
            xycoords=("data", "axes fraction"),
            rotation=30,
            va="bottom",
            ha="left",
            color=MARK,
            annotation_clip=False,
        )
