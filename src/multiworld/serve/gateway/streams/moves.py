"""Moves of streams to other replicas without a pause. Pure.

When a replica drains, or a new replica has less load, a stream moves to another
replica. This target is prepared while the stream continues: the previous stage replays
its activation log to the target. Once the target lacks only a few tokens, the stream
continues there as another attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from multiworld.serve.deadlines import PREPARE_S
from multiworld.serve.gateway.streams.chain_selection import ChainSelection
from multiworld.serve.gateway.streams.stream import (
    Chain,
    Move,
    Phase,
    Stream,
    StreamIndex,
)
from multiworld.serve.wire.generation_messages import (
    PrepareSequence,
    SequenceStart,
)
from multiworld.serve.wire.protocol import Key

# Maximum number of streams that move off draining replicas at once, and (if more than
# one moves) the maximum total of their tokens, because other streams must wait while
# these tokens are computed.
MAX_MOVES = 4
TOKENS_AT_ONCE = 128
# Maximum number of tokens that the new replicas may lack when a stream moves. A step
# with this many tokens takes hardly longer than a step with one.
LAG = 8
WORTH = 32  # minimum remaining tokens for a move to a less loaded replica
RETRY_S = 1.0  # seconds until a move is retried; doubles with each retry, up to 32 s


class Moves:
    """The moves of one gateway's streams."""

    def __init__(
        self,
        name: str,
        chains: ChainSelection,
        index: StreamIndex,
        send: Callable[[str, PrepareSequence], None],
        end_at: Callable[[Iterable[str], Key], None],
        log: Callable[[Stream, str], None],
        counts: Counter[str],  # counts abandoned moves as ``given_up``
    ) -> None:
        self._name, self._chains, self._counts = name, chains, counts
        self._send, self._end_at, self._log = send, end_at, log
        self._index, self._moving = index, dict[int, Stream]()

    def tick(self, silent: frozenset[str], now: float) -> None:
        """Start moves; abandon moves that take too long or go to silent replicas."""
        for _, stream in sorted(self._moving.items()):
            assert stream.move is not None
            is_late = now - stream.move.began_at > PREPARE_S
            if is_late or not silent.isdisjoint(incoming(stream)):
                self.give_up(stream, now)
        self._leave_draining(now)
        for uneven in self._chains.uneven(now) if not self._moving else ():
            there = (s for s in self._index.at(uneven.busiest) if is_free(s, now))
            worth = [s for s in there if _left(s) >= WORTH and s.first_at is not None]
            for stream in sorted(worth, key=lambda s: (len(s.tokens), s.number)):
                chain = self._chains.chain_with_new(stream, uneven)
                if chain is not None:
                    self._begin(stream, chain, now)
                    return

    def _leave_draining(self, now: float) -> None:
        """Start to move streams off draining replicas, the oldest streams first."""
        if len(self._moving) >= MAX_MOVES:
            return
        tokens = sum(len(stream.tokens) for stream in self._moving.values())
        draining = self._chains.draining
        there = {s.number: s for name in draining for s in self._index.at(name)}
        stuck: set[tuple[str, ...]] = set()
        for _, stream in sorted(there.items()):
            if stream.chain in stuck or not is_free(stream, now):
                continue
            chain = self._chains.without_draining(stream)
            if chain is None:
                stuck.add(stream.chain)  # a stage has no other replica
                continue
            tokens += len(stream.tokens)
            if self._moving and tokens > TOKENS_AT_ONCE:
                return
            self._begin(stream, chain, now)
            if len(self._moving) >= MAX_MOVES:
                return

    def lost(self, replica: str, now: float) -> None:
        for _, stream in sorted(self._moving.items()):
            if stream.move is not None and replica in stream.move.chain.replicas:
                self.give_up(stream, now)

    def to_restart(self, now: float) -> list[tuple[Stream, Chain]]:
        """Return streams without a token that are to restart, with their new chains."""
        found: list[tuple[Stream, Chain]] = []
        for uneven in self._chains.uneven(now):
            there = [
                s
                for s in self._index.at(uneven.busiest)
                if s.first_at is None and is_free(s, now) and uneven.new not in s.left
            ]
            # Start with the latest streams, for which hardly anything was computed.
            there.sort(key=lambda s: (-s.began_at, s.number))
            for stream in there[: uneven.surplus]:
                chain = self._chains.chain_with_new(stream, uneven)
                if chain is not None:
                    stream.stays_until = now + RETRY_S
                    found.append((stream, chain))
        return found

    def _begin(self, stream: Stream, chain: Chain, now: float) -> None:
        stream.move = Move(chain, began_at=now)
        self._moving[stream.number] = stream
        stream.become(Phase.MOVING)
        self._chains.load.update(incoming(stream))
        self._prepare(stream, stream.move, now)

    def _prepare(self, stream: Stream, move: Move, now: float) -> None:
        chain, fresh = move.chain.replicas, set(incoming(stream))
        stages = tuple(n for n, name in enumerate(chain) if name in fresh)
        prepared, move.attempt = move.attempt, stream.next_attempt()
        move.tokens = len(stream.tokens)
        move.waits_for = sum(stage + 1 not in stages for stage in stages)
        start = SequenceStart(
            (self._name, stream.number, move.attempt),
            tuple(stream.tokens),
            stream.prompt,
            chain,
            stream.sampling,
            stream.share,
            stream.attempt,
            prepared=prepared,
            adapter=stream.adapter,
        )
        for stage in stages:
            self._send(chain[stage], PrepareSequence(start, stages))

    def prepared(self, stream: Stream, attempt: int, now: float) -> bool:
        """Record that a replica is prepared; return whether the stream can move now."""
        move = stream.move
        if move is None or move.attempt != attempt:
            return False
        move.waits_for -= 1
        if move.waits_for:
            return False
        if not self._chains.is_connected(move.chain):
            self.give_up(stream, now)
            return False
        if len(stream.tokens) - move.tokens > LAG:
            self._prepare(stream, move, now)
            return False
        return True

    def finish(self, stream: Stream) -> Move:
        """End the move of a stream, which now continues on the new replicas."""
        assert stream.move is not None
        self._chains.load.subtract(incoming(stream))  # the caller counts the new chain
        del self._moving[stream.number]
        move, stream.move = stream.move, None
        stream.become(Phase.COMPUTING)
        return move

    def drop(self, stream: Stream) -> None:
        if stream.move is not None:
            fresh = incoming(stream)
            self._chains.load.subtract(fresh)
            self._end_at(fresh, (self._name, stream.number, stream.move.attempt))
            del self._moving[stream.number]
            stream.move = None
            stream.become(Phase.COMPUTING)

    def log_is_gone(self, stream: Stream, replica: str, now: float) -> None:
        """Route a move around a replica whose log was dropped, or abandon the move."""
        assert stream.move is not None
        before, chain = stream.move.chain, None
        if replica in before.replicas and self._chains.is_leaving(stream):
            # The previous stage replays its log to a substitute for the replica; the
            # substitute then replays to the next stage.
            chain = self._chains.around(stream, before, replica)
        if chain is None:
            self.give_up(stream, now)
            return
        self.drop(stream)
        self._begin(stream, chain, now)

    def give_up(self, stream: Stream, now: float) -> None:
        """Abandon a move, to retry it later."""
        self._log(stream, "cannot be moved now; the move is retried later")
        self._counts["given_up"] += 1
        self.drop(stream)
        pause_s = RETRY_S * 2.0 ** min(stream.given_up, 5)
        stream.given_up += 1
        stream.stays_until = now + pause_s


def incoming(stream: Stream) -> list[str]:
    """Return the new replicas of a move, which are not in the current chain."""
    chain = () if stream.move is None else stream.move.chain.replicas
    return [name for name in chain if name not in stream.chain]


def is_free(stream: Stream, now: float) -> bool:
    is_settled = not stream.via and not stream.losses.counted
    is_due = stream.stays_until <= now
    return stream.phase is Phase.COMPUTING and is_settled and is_due


def _left(stream: Stream) -> int:
    return stream.sampling.max_tokens - stream.made
