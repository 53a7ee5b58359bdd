"""The record with which another gateway can continue an answer."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator

import msgspec

from multiworld.serve.gateway.http.kept_events import EventLog
from multiworld.serve.keeper.connection_record import ConnectionRecord
from multiworld.serve.keeper.frames import Kind
from multiworld.serve.wire.generation_messages import TokenItem

ANSWER = "multiworld.answer"  # scope key of the ``AnswerRecord`` of the request

KEY_BYTES = 16


class Drawn(msgspec.Struct, array_like=True):
    """Random and other choices for a request, which another gateway must repeat."""

    key: bytes  # seed of all random numbers of the request
    made_at: float  # epoch seconds at which this was drawn
    # Monotonic time, which all processes of a host share; None: not yet known.
    deadline_at: float | None = None
    version: str = ""  # version of the model that answers
    identity: str = ""  # name of the version's identity; empty: unknown
    noise: dict[int, str] = {}  # noise source of tokens, by index of the choice


_items = msgspec.msgpack.Decoder(tuple[int, TokenItem])
_drawn = msgspec.msgpack.Decoder(Drawn)
_encode = msgspec.msgpack.Encoder().encode


class AnswerRecord:
    """The record of one request's answer."""

    def __init__(
        self,
        record: ConnectionRecord,
        say: Callable[..., None],  # records an entry of the connection
        *,
        is_resumed: bool = False,  # whether another gateway had the request before
        # Called once the answer has an event log, which clients may read again.
        # It returns the bytes of the answer's own record.
        on_log: Callable[[AnswerRecord], int] = lambda answer: 0,
        # Returns whether another gateway continues the answer.
        is_abandoned: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._clock = say, clock
        self.is_abandoned = is_abandoned
        self.is_resumed, self._began_at = is_resumed, record.began_ns / 1e9
        # Whether another gateway has already sent bytes of the answer.
        self.has_begun = record.has_begun
        self.is_detached = record.is_detached
        # Id of the kept stream that the answer reads; empty: none.
        self.stream = "" if record.is_detached else record.stream.decode()
        # Event log of the answer, which clients may read again; None: there is none.
        self.log: EventLog | None = None
        self._on_log = on_log
        self._on_log_end: Callable[[], None] = lambda: None
        self._events = 0  # number of the answer's events so far
        self._before = record.events  # number of events that another gateway has sent
        self._items = list(record.items)
        if record.request:
            self.drawn = _drawn.decode(record.request)
        else:
            self.drawn = Drawn(secrets.token_bytes(KEY_BYTES), time.time())

    def admitted(self) -> None:
        """Record that the request is within its tenant's limits."""
        if not self.is_resumed:
            self._say(Kind.ADMITTED)

    def keep(self) -> None:
        """Record ``drawn`` after it has changed."""
        self._say(Kind.REQUEST, 0, _encode(self.drawn))

    def token(self, purpose: str, size: int = 12) -> str:
        """Return a random hexadecimal number that is the same at every gateway."""
        found = hashlib.blake2b(purpose.encode(), key=self.drawn.key, digest_size=size)
        return found.hexdigest()

    @property
    def seed(self) -> int:
        """A random number of 63 bits that is the same at every gateway."""
        return int(self.token("seed", 8), 16) >> 1

    @property
    def spent_s(self) -> float:
        """Seconds since the request began, if another gateway had it before; else 0."""
        return self._clock() - self._began_at if self.is_resumed else 0.0

    def replayed(self) -> Iterator[tuple[int, TokenItem]]:
        """Yield the tokens that another gateway sent, in order, with their choices."""
        items, self._items = self._items, []
        for item in items:
            yield _items.decode(item)

    def add(self, choice: int, item: TokenItem) -> None:
        """Record a token before it is sent to the client."""
        self._say(Kind.ITEM, 0, _encode((choice, item)))

    def count_event(self) -> bool:
        """Count an event of the answer; return whether the client lacks it."""
        self._events += 1
        return self._events > self._before

    def log_begun(self, log: EventLog) -> None:
        """Record that the answer has an event log, which outlives the client."""
        self.log = log
        self._say(Kind.KEPT, 0, log.name.encode())
        log.hold(self._on_log(self))

    def log_ended(self) -> None:
        """Record that clients can no longer resume reading the answer."""
        self.log = None
        self._on_log_end()

    def move(
        self,
        say: Callable[..., None],
        on_log_end: Callable[[], None],
        is_abandoned: Callable[[], bool],
    ) -> None:
        """From now on, record the answer through ``say``, in another connection."""
        self._say, self._on_log_end = say, on_log_end
        self.is_abandoned = is_abandoned

    @property
    def events(self) -> int:
        """Number of events that the client has, including those being sent."""
        return max(self._events, self._before)


def unrecorded() -> AnswerRecord:
    """Return the record of an answer that is not recorded anywhere."""
    return AnswerRecord(ConnectionRecord(0), lambda *said: None)
