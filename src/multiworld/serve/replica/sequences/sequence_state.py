"""State of each sequence at one stage. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from multiworld.serve.wire.generation_messages import SequenceStart
from multiworld.serve.wire.protocol import Key, StreamId

# Maximum number of reports kept about sequences that have not begun here yet.
MAX_EARLY = 4096
# Maximum number of ended sequences to remember: messages about them may be in flight.
MAX_ENDED = 4096


@dataclass(slots=True)
class SequenceState:
    """One sequence at one stage."""

    start: SequenceStart  # the sequence, as its gateway described it
    held: int = 0  # number of tokens whose KV is here
    # True if ``held`` counts blocks in the prefix cache, which are copied before the
    # first step of the sequence.
    is_cached: bool = False
    # Position of the first token whose output is in the activation log, which ends at
    # ``held``.
    logged: int = 0
    # Number of tokens that the next stage has or was sent. None: it has not reported
    # yet.
    sent: int | None = None
    # Stages at which the sequence is only prepared while it runs elsewhere.
    prepared: Sequence[int] = ()
    # True if the next stage may not know the sequence: the first step sent there
    # announces it.
    is_untold: bool = False
    # Time at which the previous stage announced the sequence. None: the gateway
    # announced it.
    announced_at: float | None = None
    # Paused, or returned to the gateway: only a later attempt can continue it.
    is_paused: bool = False
    # Evicted for lack of memory: rows in flight must be ignored.
    is_evicted: bool = False

    @property
    def earlier(self) -> list[Key]:
        """Keys of earlier attempts that it may continue here."""
        before = self.start.previous, self.start.prepared
        return [(*self.start.key[:2], attempt) for attempt in before if attempt >= 0]

    @property
    def key(self) -> Key:
        return self.start.key

    @property
    def stream(self) -> StreamId:
        return self.start.key[:2]

    def lacking(self, begin: int, count: int) -> int | None:
        """Return how many of ``count`` rows, from the end, must still be computed."""
        # None: rows before these are missing.
        return None if begin > self.held else max(0, begin + count - self.held)

    def take_unsent(self, begin: int, count: int) -> int:
        """Mark ``count`` rows as sent; return how many, from the end, were unsent."""
        end, sent = begin + count, self.sent or 0
        self.sent = max(end, sent)
        return min(count, max(0, end - sent))

    def reset(self) -> None:
        """Record that all rows were dropped, here and in later stages."""
        self.held, self.logged, self.is_cached, self.is_evicted = 0, 0, False, False
        self.sent = None if self.sent is None else 0


class SequenceTable:
    """The sequences of one stage."""

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last
        self._states: dict[StreamId, SequenceState] = {}
        self._early: OrderedDict[Key, int] = OrderedDict()
        self._ended: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(list(self._states.values()))

    def of(self, stream: StreamId) -> SequenceState | None:
        """Return a sequence by its stream, whichever attempt it is."""
        return self._states.get(stream)

    def get(self, key: Key) -> SequenceState | None:
        """Return a sequence, if its current attempt is ``key``."""
        state = self._states.get(key[:2])
        return state if state is not None and state.key == key else None

    def is_new(self, key: Key) -> bool:
        """Return whether neither this attempt nor a later one has begun."""
        known = self._states.get(key[:2])
        is_older = known is not None and known.key[2] >= key[2]
        return not is_older and key not in self._ended

    def confirm(self, key: Key) -> None:
        """Record that the gateway itself has announced a sequence."""
        state = self.get(key)
        if state is not None:
            state.announced_at = None

    def unconfirmed(self, before: float) -> list[Key]:
        """Return sequences that only the previous stage announced, before this time."""
        times = ((s.key, s.announced_at) for s in self)
        return [key for key, at in times if at is not None and at < before]

    def excuse(self, now: float) -> None:
        """Restart the wait for gateways, because this process was stopped."""
        for state in self:
            if state.announced_at is not None:
                state.announced_at = now

    def begin(
        self, start: SequenceStart, prepared: Sequence[int] = ()
    ) -> tuple[SequenceState, int | None]:
        """Add an attempt, which takes over the KV that an earlier one has here."""
        state = SequenceState(start, prepared=prepared)
        found = next(filter(None, map(self.get, state.earlier)), None)
        if found is not None:
            # In the last stage, the last token is computed again, to sample the next
            # one.
            limit = len(start.tokens) - self._is_last
            state.held, state.is_cached = min(found.held, limit), found.is_cached
            state.logged = min(found.logged, state.held)
        self._states[start.key[:2]] = state
        # The second value is the number of tokens that the next stage has reported;
        # None: it has not reported yet.
        return state, self._early.pop(start.key, None)

    def end(self, key: Key) -> SequenceState | None:
        """Remove a sequence and return it, if its current attempt is ``key``."""
        self._early.pop(key, None)
        self._ended[key] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return None if self.get(key) is None else self._states.pop(key[:2])

    def note_early(self, key: Key, held: int) -> None:
        """Record the next stage's report on a sequence that has not begun here yet."""
        newer = self._states.get(key[:2])
        if newer is not None and newer.key[2] > key[2]:
            return
        self._early[key] = held
        while len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)
