"""What one stage has of each sequence. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from multiworld.serve.transport.generation_messages import SequenceStart
from multiworld.serve.transport.protocol import Key

StreamId = tuple[str, int]
"""Gateway and stream, whichever attempt."""

MAX_EARLY = 4096
"""Maximum number of sequences of which the next stage reports before the gateway."""


@dataclass(slots=True)
class SequenceState:
    """One sequence at one stage.

    Attributes:
        opening: The sequence, as its gateway described it.
        held: Tokens whose keys and values are here.
        is_cached: Those are in blocks of the prefix cache, and are not copied until the
            sequence is computed.
        logged: First token whose output is in the activation log, which ends at
            ``held``.
        sent: Tokens that the next stage has, or was sent; None until it has reported.
        prepared: Stages that are prepared for it while it continues elsewhere; none if
            it has begun here.
        is_evicted: It was dropped for lack of memory, so rows of it that are on their
            way are useless.
    """

    opening: SequenceStart
    held: int = 0
    is_cached: bool = False
    logged: int = 0
    sent: int | None = None
    prepared: Sequence[int] = ()
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

    def lacking(self, begin: int, count: int) -> int | None:
        """Return how many of ``count`` rows, the last ones, are still to be computed.

        None if rows before them are missing.
        """
        return None if begin > self.held else max(0, begin + count - self.held)

    def take_unsent(self, begin: int, count: int) -> int:
        """Return how many of ``count`` computed rows, the last ones, are to be sent.

        They count as sent from now on.
        """
        end, sent = begin + count, self.sent or 0
        self.sent = max(end, sent)
        return min(count, max(0, end - sent))

    def reset(self) -> None:
        """Record that all of it was dropped, here and in later stages."""
        self.held, self.logged, self.is_cached, self.is_evicted = 0, 0, False, False
        self.sent = None if self.sent is None else 0


class SequenceTable:
    """The sequences of one stage."""

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last
        self._states: dict[StreamId, SequenceState] = {}
        self._early: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(list(self._states.values()))

    def of(self, stream: StreamId) -> SequenceState | None:
        """Return a sequence, whichever attempt of it is known."""
        return self._states.get(stream)

    def get(self, key: Key) -> SequenceState | None:
        """Return a sequence, if this attempt of it is known."""
        state = self._states.get(key[:2])
        return state if state is not None and state.key == key else None

    def begin(
        self, opening: SequenceStart, prepared: Sequence[int] = ()
    ) -> tuple[SequenceState, int | None]:
        """Add an attempt; it keeps what an earlier one has here.

        Returns:
            The sequence, and how many tokens the next stage reported before, if it did.
        """
        state = SequenceState(opening, prepared=prepared)
        found = next(filter(None, map(self.get, state.earlier)), None)
        if found is not None:
            # The last token is computed again where it is sampled.
            most = len(opening.tokens) - self._is_last
            state.held, state.is_cached = min(found.held, most), found.is_cached
            state.logged = min(found.logged, state.held)
        self._states[opening.key[:2]] = state
        return state, self._early.pop(opening.key, None)

    def end(self, key: Key) -> SequenceState | None:
        """Forget a sequence; return it if this attempt of it was known."""
        self._early.pop(key, None)
        return None if self.get(key) is None else self._states.pop(key[:2])

    def note_early(self, key: Key, held: int) -> None:
        """Keep what the next stage has of a sequence that is still to begin here."""
        self._early[key] = held
        while len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)
