"""Streams that are moved to other replicas without a pause.

If a replica drains, or another one has less to do, its place in a chain is taken by
another one that was prepared for it: while the stream goes on, the stage before sends
the new one what it has logged of it, and the new one computes that. Once it has all but
a few tokens, the stream becomes another attempt there, and keeps what is prepared.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

from multiworld.serve.generation.gateway.chain_selection import Chains
from multiworld.serve.generation.gateway.stream import Chain, Move, Stream
from multiworld.serve.transport.generation_messages import Opening, Prepare
from multiworld.serve.transport.protocol import Key

logger = logging.getLogger("multiworld.serve")

AT_ONCE = 4
"""Most streams that are prepared at once; preparing takes time from others."""

LAG = 8
"""Most tokens that may be missing when a stream is moved: they are computed in one
step, which takes hardly longer than that of one token."""

WORTH = 32
"""Fewest tokens that are still to come, for a move to a replica with less to do."""

PREPARE_S = 60.0
"""Seconds after which a preparation is given up."""

RETRY_S = 1.0
"""Seconds until it is tried again; doubles each time, to 32 times as long."""


class Moves:
    """The moves of one gateway's streams.

    Args:
        name: Name of the gateway.
        chains: Chooses replicas.
        tell: Sends a message to a replica.
        end_at: Ends an attempt at some replicas.
        counts: Counts moves that were given up.
    """

    def __init__(
        self,
        name: str,
        chains: Chains,
        tell: Callable[[str, Prepare], None],
        end_at: Callable[[Iterable[str], Key], None],
        counts: Counter[str],
    ) -> None:
        self._name, self._chains, self._counts = name, chains, counts
        self._tell, self._end_at = tell, end_at

    def look(self, streams: Collection[Stream], now: float) -> None:
        """Begin moves, and give those up that take too long.

        Args:
            streams: All streams.
            now: Monotonic time in seconds.
        """
        moving = 0
        for stream in streams:
            if stream.move is None:
                continue
            is_late = now - stream.move.told_at > PREPARE_S
            if is_late or not self._chains.silent.isdisjoint(_fresh(stream)):
                self.give_up(stream, now)
            else:
                moving += 1
        free = [s for s in streams if _is_free(s, now)]
        for stream in free:
            if moving >= AT_ONCE:
                return
            chain = self._chains.leaving(stream)
            if chain is not None:
                self._begin(stream, chain, now)
                moving += 1
        for uneven in self._chains.uneven(now) if not moving else ():
            worth = [s for s in free if uneven.busiest in s.chain and _left(s) >= WORTH]
            worth = [s for s in worth if s.first_at is not None]
            if worth:
                stream = min(worth, key=lambda s: len(s.tokens))
                swap = {uneven.busiest: uneven.new}
                names = tuple(swap.get(name, name) for name in stream.chain)
                self._begin(stream, Chain(stream.version, names), now)
                return

    def waiting(self, streams: Collection[Stream], now: float) -> Iterator[Stream]:
        """Yield streams that wait for a busy replica, and had better begin anew.

        They have no token yet, and are the last that came, so that hardly anything was
        computed for them.

        Args:
            streams: All streams.
            now: Monotonic time in seconds.
        """
        for uneven in self._chains.uneven(now):
            there = [
                s
                for s in streams
                if s.first_at is None and uneven.busiest in s.chain and _is_free(s, now)
            ]
            there.sort(key=lambda s: -s.began_at)
            for stream in there[: uneven.surplus]:
                stream.stays_until = now + RETRY_S
                yield stream

    def _begin(self, stream: Stream, chain: Chain, now: float) -> None:
        stream.move = Move(chain)
        self._chains.load.update(_fresh(stream))
        self._prepare(stream, stream.move, now)

    def _prepare(self, stream: Stream, move: Move, now: float) -> None:
        """Let the new replicas compute what they lack."""
        chain, fresh = move.chain.replicas, set(_fresh(stream))
        stages = tuple(n for n, name in enumerate(chain) if name in fresh)
        prepared, move.attempt = move.attempt, stream.next_attempt()
        move.tokens, move.told_at = len(stream.tokens), now
        move.waits_for = sum(stage + 1 not in stages for stage in stages)
        opening = Opening(
            (self._name, stream.number, move.attempt),
            tuple(stream.tokens),
            stream.prompt,
            chain,
            stream.sampling,
            stream.share,
            stream.attempt,
            prepared=prepared,
        )
        for stage in stages:
            self._tell(chain[stage], Prepare(opening, stages))

    def prepared(self, stream: Stream, attempt: int, now: float) -> bool:
        """Record that a replica is prepared.

        Args:
            stream: The stream.
            attempt: The attempt that it was prepared for.
            now: Monotonic time in seconds.

        Returns:
            True if the stream can be moved now.
        """
        move = stream.move
        if move is None or move.attempt != attempt:
            return False
        move.waits_for -= 1
        if move.waits_for:
            return False
        if not self._chains.is_there(move.chain):
            self.give_up(stream, now)
            return False
        if len(stream.tokens) - move.tokens > LAG:
            self._prepare(stream, move, now)
            return False
        return True

    def finish(self, stream: Stream) -> Move:
        """End the preparation of a stream, which goes on with what was prepared."""
        assert stream.move is not None
        self._chains.release(_fresh(stream))  # it enters its whole chain
        move, stream.move = stream.move, None
        return move

    def drop(self, stream: Stream) -> None:
        """Drop what is prepared for a stream, if anything is."""
        if stream.move is not None:
            fresh = _fresh(stream)
            self._chains.release(fresh)
            self._end_at(fresh, (self._name, stream.number, stream.move.attempt))
            stream.move = None

    def not_filled(self, stream: Stream, replica: str, now: float) -> None:
        """Go round a replica that cannot prepare its neighbour; else give up.

        Its log was dropped. If another one takes its place as well, that one is filled
        from further up, and fills the neighbour.

        Args:
            stream: The stream.
            replica: The replica, of the chain that goes on.
            now: Monotonic time in seconds.
        """
        assert stream.move is not None
        before, chain = stream.move.chain, None
        if replica in before.replicas and self._chains.is_leaving(stream):
            chain = self._chains.around(stream, before, replica)
        if chain is None:
            self.give_up(stream, now)
            return
        self.drop(stream)
        self._begin(stream, chain, now)

    def give_up(self, stream: Stream, now: float) -> None:
        """Drop what is prepared for a stream, and move it later."""
        logger.info("%s is not moved yet", stream.name)
        self._counts["given_up"] += 1
        self.drop(stream)
        pause_s = RETRY_S * 2.0 ** min(stream.given_up, 5)
        stream.given_up += 1
        stream.stays_until = now + pause_s


def _fresh(stream: Stream) -> list[str]:
    """Return the replicas that a stream moves to."""
    chain = () if stream.move is None else stream.move.chain.replicas
    return [name for name in chain if name not in stream.chain]


def _is_free(stream: Stream, now: float) -> bool:
    """Tell whether a stream may be moved."""
    is_settled = bool(stream.chain) and not stream.via and not stream.losses.counted
    is_idle = stream.move is None and stream.stays_until <= now
    return is_settled and is_idle and not stream.has_ended


def _left(stream: Stream) -> int:
    """Return how many tokens of a stream may still come."""
    return stream.sampling.max_tokens - (len(stream.tokens) - stream.prompt)
