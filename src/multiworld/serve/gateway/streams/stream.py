"""State of one stream of generated tokens, at its gateway. Pure."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from multiworld.serve.deadlines import LEFT_S
from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.routing.poison_rules import STREAM_RULE, LossLedger
from multiworld.serve.text.prefixes import Digest
from multiworld.serve.wire.generation_messages import Sampling
from multiworld.serve.wire.origin import NOWHERE, Origin


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of a stream besides its deadline; None: no limit."""

    first_token_s: float | None = None
    between_tokens_s: float | None = None


NO_LIMITS = TimeLimits()


def for_no_deadline(limits: TimeLimits, wait_s: float) -> TimeLimits:
    """Set unset limits to ``wait_s``, for a stream without a deadline."""
    first_s, between_s = limits.first_token_s, limits.between_tokens_s
    return TimeLimits(
        wait_s if first_s is None else first_s,
        wait_s if between_s is None else between_s,
    )


class Phase(StrEnum):
    WAITING = "waiting"  # no chain, and no replica keeps the stream's KV
    COMPUTING = "computing"  # a chain computes the current attempt
    MOVING = "moving"  # like COMPUTING, while other replicas are prepared to take over
    # No chain; replicas keep the KV of an earlier attempt for the next one.
    PAUSED = "paused"
    ENDED = "ended"  # the last token or an error was delivered, or the client is gone


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    # To computing: every stage has a replica for the stream.
    Phase.WAITING: frozenset({Phase.COMPUTING, Phase.ENDED}),
    # To moving: a replica drains, or a new replica has less load. To paused: a part of
    # the chain failed; the other replicas keep KV. To waiting: the stream starts over,
    # from its tokens.
    Phase.COMPUTING: frozenset(
        {Phase.MOVING, Phase.PAUSED, Phase.WAITING, Phase.ENDED}
    ),
    # To computing: the move is done or abandoned.
    Phase.MOVING: frozenset(
        {Phase.COMPUTING, Phase.PAUSED, Phase.WAITING, Phase.ENDED}
    ),
    # To computing: the lost replicas are replaced. To waiting: a loss that was noticed
    # late has made the stream a suspect, so it starts over.
    Phase.PAUSED: frozenset({Phase.COMPUTING, Phase.WAITING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Chain:
    """One replica of each stage."""

    version: str  # version of the model
    replicas: tuple[str, ...]  # by stage


@dataclass(slots=True, eq=False)
class Move:
    """A move of a stream: other replicas are prepared while the stream continues."""

    chain: Chain  # chain after the move
    attempt: int = -1  # attempt for which the new replicas are prepared; -1: none yet
    tokens: int = 0  # number of the stream's tokens at the last ``PrepareSequence``
    began_at: float = 0.0  # monotonic time
    waits_for: int = 0  # number of ``SequencePrepared`` that have not yet arrived


@dataclass(slots=True, eq=False)
class SuspectGroup:
    """Streams that are jointly suspected of causing losses."""

    # Number of the group at this gateway, from 1.
    number: int
    members: dict[int, Stream]
    # True: while a stage-0 replica has steps of members in flight, it has no steps of
    # other streams in flight.
    is_isolated: bool
    # The groups into which a crowd was split, including this group.
    split: list[SuspectGroup] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Returned:
    """A chain that a stream left because one of its replicas returned the stream."""

    chain: tuple[str, ...]
    was_alone: bool  # ``Stream.is_alone`` on that chain
    at: float  # monotonic time


@dataclass(frozen=True, slots=True)
class Hit:
    """A stream's part in the loss of a replica."""

    source: str  # the replica of stage 0 that sent the stream's steps
    is_alone: bool  # ``source`` had only steps of the stream's group in flight
    has_left: bool  # a neighbour had returned the stream before the loss was noticed


@dataclass(slots=True, eq=False)
class Stream:
    """A stream whose client waits for tokens."""

    number: int  # unique at this gateway
    model: str
    version: str
    tokens: list[int]  # the prompt, and the delivered tokens
    prompt: int  # number of prompt tokens
    sampling: Sampling
    deadline_at: float  # monotonic time
    via: dict[int, str]  # for a probe: replicas through which it must pass, by stage
    limits: TimeLimits
    began_at: float
    share: Share = DEFAULT_SHARE
    prefixes: tuple[Digest, ...] = ()
    adapter: str = ""  # the LoRA adapter to compute with; empty: none
    session: str = ""  # streams of one session prefer the same replicas; empty: none
    origin: Origin = NOWHERE
    earlier_s: float = 0.0  # its age when another gateway handed it over
    earlier: int = 0  # number of tokens that other gateways have delivered
    attempt: int = 0
    last_attempt: int = 0  # highest attempt number so far
    chain: tuple[str, ...] = ()  # replicas by stage that compute the current attempt
    kept: tuple[str, ...] = ()  # replicas by stage that keep an earlier attempt's KV
    kept_attempt: int = -1  # number of the attempt whose KV is kept
    move: Move | None = None
    stays_until: float = 0.0  # monotonic time before which the stream is not moved
    given_up: int = 0  # number of abandoned moves
    # Hardware fingerprint of the replicas that computed the stream, by stage.
    fingerprints: dict[int, str] = field(default_factory=dict)
    losses: LossLedger = field(
        default_factory=lambda: LossLedger(STREAM_RULE, has_begun=True)
    )
    # Number of attempts that have ended since the latest token. A lost replica, or an
    # attempt of more than ``KEPT_S``, restarts the count.
    returns: int = 0
    attempt_at: float = 0.0  # monotonic time at which the current attempt began
    # Monotonic time from which the duration of repeated failures is measured: the end
    # of the first attempt that failed, and later the start of the second attempt.
    failing_since: float = 0.0
    group: SuspectGroup | None = None  # None: not a suspect
    is_alone: bool = False  # its stage-0 replica computes only the stream's group
    # Noise source that sampled the tokens; None: any replica may continue the stream.
    noise: str | None = None
    returned: Returned | None = None  # None: the previous chain did not return it
    # Attempt (-1: none) in which this suspect lost a replica before the gateway knew
    # whether the suspect ran alone; and whether other streams may have caused the loss.
    unclear: tuple[int, bool] = (-1, False)
    not_before: float = 0.0  # monotonic time before which no attempt starts
    # Monotonic time at which the computation of its prompt began; None: not yet.
    computing_at: float | None = None
    first_at: float | None = None  # monotonic time of the first token at this gateway
    last_at: float = 0.0
    longest_s: float = 0.0  # longest time between two tokens
    phase: Phase = Phase.WAITING

    def become(self, phase: Phase) -> None:
        if phase is not self.phase and phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.name} cannot go from {self.phase} to {phase}")
        self.phase = phase

    @property
    def has_ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def made(self) -> int:
        """Number of delivered tokens."""
        return len(self.tokens) - self.prompt

    @property
    def made_here(self) -> int:
        """Number of tokens that this gateway has delivered."""
        return self.made - self.earlier

    @property
    def left(self) -> tuple[str, ...]:
        """The chain that returned the stream; empty: none."""
        return () if self.returned is None else self.returned.chain

    def hit_by(self, lost: str, now: float) -> Hit | None:
        """Return the stream's part in the loss of a replica; None if it has none.

        The stream may have already left the replica: if a neighbour noticed the loss
        first, it has returned the stream, which may run elsewhere by now.
        """
        returned, is_there = self.returned, lost in self.chain
        if not is_there and (
            returned is None
            or lost not in returned.chain
            or now - returned.at >= LEFT_S
        ):
            return None
        chain = self.chain if is_there else self.left
        is_alone = self.is_alone or (returned is not None and returned.was_alone)
        return Hit(chain[0], is_alone, has_left=not is_there)

    @property
    def is_isolated(self) -> bool:
        """True for a suspect whose steps run alone, or with the steps of its group."""
        return self.group is not None and self.group.is_isolated

    @property
    def is_single(self) -> bool:
        """True for a suspect that is isolated from all other streams."""
        group = self.group
        return group is not None and group.is_isolated and len(group.members) == 1

    @property
    def name(self) -> str:
        request = self.origin.request or "without a request"
        return f"request {request}, stream {self.number}"

    def next_attempt(self) -> int:
        self.last_attempt += 1
        return self.last_attempt

    def late(self, now: float, resumed_at: float = -math.inf) -> str:
        """Describe the time limit that has passed; empty if none has."""
        if now > self.deadline_at:
            limit = self.sampling.max_tokens
            return f"deadline passed after {self.made} of at most {limit} tokens"
        # If this gateway was paused, a wait counts only from the end of the pause.
        since, limit_s = self._wait(resumed_at)
        if limit_s is None or now - since <= limit_s:
            return ""
        what = f"token after {self.made}" if self.made else "first token"
        return f"no {what} within {limit_s:g} s"

    def late_at(self, resumed_at: float = -math.inf) -> float:
        """Return the time at which the stream will be late if no token arrives."""
        since, limit_s = self._wait(resumed_at)
        wait_ends = math.inf if limit_s is None else since + limit_s
        return min(self.deadline_at, wait_ends)

    def _wait(self, resumed_at: float) -> tuple[float, float | None]:
        """Return when the current wait for a token began, and the limit in seconds."""
        if self.first_at is None:
            return max(self.began_at, resumed_at), self.limits.first_token_s
        return max(self.last_at, resumed_at), self.limits.between_tokens_s


class StreamIndex:
    """Streams by number, and by the replicas of their chains."""

    def __init__(self) -> None:
        self.all: dict[int, Stream] = {}
        self._at: dict[str, dict[int, Stream]] = {}

    def enter(self, stream: Stream) -> None:
        for name in stream.chain:
            self._at.setdefault(name, {})[stream.number] = stream

    def leave(self, stream: Stream) -> None:
        for name in stream.chain:
            there = self._at[name]
            there.pop(stream.number, None)
            if not there:
                del self._at[name]

    def at(self, replica: str) -> list[Stream]:
        return list(self._at.get(replica, {}).values())


class StreamTimers:
    """Streams by ``late_at``; the caller checks them again when that time has come."""

    def __init__(self) -> None:
        self._times: list[tuple[float, int]] = []

    def watch(self, stream: Stream, resumed_at: float = -math.inf) -> None:
        """Make ``due`` return a stream once it may be late."""
        heapq.heappush(self._times, (stream.late_at(resumed_at), stream.number))

    def due(self, now: float, streams: dict[int, Stream]) -> list[Stream]:
        """Remove and return the ``streams`` that may be late, ordered by number."""
        if len(self._times) > 4 * len(streams) + 64:
            self._times = [time for time in self._times if time[1] in streams]
            heapq.heapify(self._times)
        found: set[int] = set()
        while self._times and self._times[0][0] <= now:
            found.add(heapq.heappop(self._times)[1])
        return [streams[number] for number in sorted(found) if number in streams]


# Model, version and kept replicas of a waiting stream, whether the stream has a token,
# its number if it is a probe (else -1), and its noise.
Kind = tuple[str, str, tuple[str, ...], bool, int, str | None]


class WaitingStreams:
    """Streams that have no chain, in the order in which they began to wait."""

    def __init__(self) -> None:
        self._all: dict[int, tuple[Stream, Kind]] = {}
        # Number of streams of each kind. Either all streams of a kind can get a chain,
        # or none can.
        self.kinds: Counter[Kind] = Counter()

    def __contains__(self, number: int) -> bool:
        return number in self._all

    def __iter__(self) -> Iterator[tuple[Stream, Kind]]:
        return iter(list(self._all.values()))

    def count(self, model: str) -> int:
        return sum(count for kind, count in self.kinds.items() if kind[0] == model)

    def add(self, stream: Stream) -> None:
        """Add a waiting stream; its ``kept`` must not change while it waits."""
        probe = stream.number if stream.via else -1
        has_token = stream.made > 0
        name, version = stream.model, stream.version
        kind = name, version, stream.kept, has_token, probe, stream.noise
        self._all[stream.number] = stream, kind
        self.kinds[kind] += 1

    def remove(self, stream: Stream) -> None:
        _, kind = self._all.pop(stream.number)
        self.kinds[kind] -= 1
        if not self.kinds[kind]:
            del self.kinds[kind]
