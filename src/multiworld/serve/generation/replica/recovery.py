"""The tokens that a stage has of each sequence, and what the next one lacks. Pure.

The one rule of recovery: before every stage lies a log of its input. Stage 0 has the
tokens, and every other stage what the stage before it keeps of its own output. When a
sequence begins, or goes on with another replica somewhere in its chain, each replica
tells the one before it how many tokens it has, from the last stage up; that one sends
the rest from its log. A replica without the rows that the next one lacks takes itself
back as far as that, and is filled from further up; the tokens of stage 0 always suffice
("upstream backup", Hwang et al., "High-Availability Algorithms for Distributed Stream
Processing", 2005).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from multiworld.serve.transport.generation_messages import Opening
from multiworld.serve.transport.protocol import Key

StreamId = tuple[str, int]
"""Gateway and stream, whichever attempt."""

EARLY = 4096
"""Most sequences of which the next stage may tell before the gateway does."""


@dataclass(slots=True)
class Link:
    """One sequence at one stage.

    Attributes:
        opening: The sequence, as the gateway has told it.
        held: Number of its tokens whose keys and values are here.
        is_known: Whether those are in blocks of known prompts, and are not copied until
            it is computed.
        logged: First token whose output is in the log, which ends at ``held``.
        sent: Number of its tokens that the next stage has, or was sent; None until
            that one has told.
        stages: Stages that are prepared for it while it goes on elsewhere; none if it
            has begun here.
        is_evicted: Whether it was dropped for lack of memory, so that rows of it which
            are on their way are of no use.
    """

    opening: Opening
    held: int = 0
    is_known: bool = False
    logged: int = 0
    sent: int | None = None
    stages: Sequence[int] = ()
    is_evicted: bool = False

    @property
    def earlier(self) -> list[Key]:
        """Attempts that it may continue here."""
        before = self.opening.previous, self.opening.prepared
        return [(*self.opening.key[:2], attempt) for attempt in before if attempt >= 0]

    @property
    def key(self) -> Key:
        """Gateway, stream and attempt."""
        return self.opening.key

    @property
    def stream(self) -> StreamId:
        """Gateway and stream."""
        return self.opening.key[:2]

    def lacks(self, begin: int, count: int) -> int | None:
        """Return how many of some rows are still to be computed here.

        Args:
            begin: Position of the first row.
            count: Number of rows.

        Returns:
            The number of last rows that are; None if rows before them are missing.
        """
        return None if begin > self.held else max(0, begin + count - self.held)

    def unsent(self, begin: int, count: int) -> int:
        """Return how many of some computed rows the next stage lacks; they are sent.

        Args:
            begin: Position of the first row.
            count: Number of rows.

        Returns:
            The number of last rows to send.
        """
        end, sent = begin + count, self.sent or 0
        self.sent = max(end, sent)
        return min(count, max(0, end - sent))

    def reset(self) -> None:
        """Record that all of it was dropped, here and in later stages."""
        self.held, self.logged, self.is_known, self.is_evicted = 0, 0, False, False
        self.sent = None if self.sent is None else 0


@dataclass(frozen=True, slots=True)
class Resolved:
    """A sequence of which the next stage has told what it has.

    Attributes:
        link: The sequence.
        begin: First token to send the next stage from the log.
        end: The one after the last.
    """

    link: Link
    begin: int
    end: int


class Links:
    """The sequences of one stage.

    Args:
        is_last: Whether it is the last stage.
    """

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last
        self._links: dict[StreamId, Link] = {}
        self._early: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def of(self, stream: StreamId) -> Link | None:
        """Return a sequence, whichever attempt of it is known."""
        return self._links.get(stream)

    def get(self, key: Key) -> Link | None:
        """Return a sequence, if this attempt of it is known."""
        link = self._links.get(key[:2])
        return link if link is not None and link.key == key else None

    def begin(
        self, opening: Opening, stages: Sequence[int] = ()
    ) -> tuple[Link, int | None]:
        """Take a sequence in; it keeps what the attempt before has here.

        Args:
            opening: The sequence.
            stages: Stages that are prepared for it; none if it begins now.

        Returns:
            The sequence, and what the next stage had told of it before, if it has.
        """
        link = Link(opening, stages=stages)
        found = next(filter(None, map(self.get, link.earlier)), None)
        if found is not None:
            # The last token is computed again where it is sampled.
            most = len(opening.tokens) - self._is_last
            link.held, link.is_known = min(found.held, most), found.is_known
            link.logged = min(found.logged, link.held)
        self._links[opening.key[:2]] = link
        return link, self._early.pop(opening.key, None)

    def end(self, key: Key) -> Link | None:
        """Forget a sequence; return it if this attempt of it was known."""
        self._early.pop(key, None)
        return None if self.get(key) is None else self._links.pop(key[:2])

    def told(self, key: Key, count: int) -> Resolved | None:
        """Record what the next stage has of a sequence.

        Args:
            key: The sequence.
            count: Number of its tokens there.

        Returns:
            What to send it; None if the gateway has not told of the sequence yet.
        """
        link = self.get(key)
        if link is None:
            self._early[key] = count
            while len(self._early) > EARLY:
                self._early.popitem(last=False)
            return None
        link.sent = count
        if count < link.logged:  # only what comes before can give these rows
            link.held = link.logged = count
        return Resolved(link, min(count, link.held), link.held)

    def unlogged(self, stream: StreamId) -> None:
        """Record that the log of a sequence was dropped."""
        link = self._links[stream]
        link.logged = link.held


def neighbours_of(chain: Sequence[str], stage: int) -> set[str]:
    """Return the replicas of a chain that one of them exchanges messages with.

    Args:
        chain: The replicas, by stage.
        stage: Stage of that one.
    """
    found = {*chain[max(0, stage - 1) : stage + 2]}
    if stage in (0, len(chain) - 1):
        found |= {chain[0], chain[-1]}
    return found - {chain[stage]}
