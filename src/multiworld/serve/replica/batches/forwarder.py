"""Forwarding of finished work to the next stage, with backpressure. Pure.

A replica may send another replica only a limited number of pieces of work that the
receiver has not begun: its *credit*. Other work waits in the forwarder, and a replica
with too much waiting work begins no new batch. So a slow stage slows the stages before
it, back to the gateway.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence

from multiworld.serve.queueing.fair_queue import FairQueue
from multiworld.serve.replica.batches.batch_queue import Work
from multiworld.serve.routing.load_balancer import Chance, HashRing, choose
from multiworld.serve.wire.protocol import Key
from multiworld.serve.wire.routing_table import Replica, ReplicaState

# Seconds during which work of a gateway is not sent to a replica that refused such
# work.
REFUSED_S = 0.5

# Prefer a session's home replica unless it has this many more pieces of work (sent, not
# begun) than the least loaded replica. ``WorkerReport.handed`` includes these pieces.
SESSION_LEAD = 4

# For each receiver, remember the latest REMEMBERED x credit pieces of work that it has
# begun.
REMEMBERED = 4


class Forwarder:
    def __init__(self, stage: int, credit: int, chance: Chance) -> None:
        self._stage, self._credit, self._chance = stage, credit, chance
        self._waiting: OrderedDict[Key, Work] = OrderedDict()
        self._fair: FairQueue[Key] = FairQueue()
        self._numbers = itertools.count()
        self._handed: dict[str, dict[Key, None]] = {}
        self._begun: dict[str, deque[Key]] = {}
        # By receiver: sequence number of its latest message that work was begun.
        self._begun_at: dict[str, int] = {}
        self._begins = itertools.count(1)
        self._replicas: dict[str, Replica] = {}
        self._silent: set[str] = set()
        self._refusals: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def handed_count(self) -> int:
        """Number of pieces of work that were sent and not begun yet."""
        return sum(map(len, self._handed.values()))

    def table_changed(self, replicas: list[Replica]) -> None:
        self._replicas = {replica.name: replica for replica in replicas}

    def return_waiting(self) -> list[Key]:
        """Remove and return all waiting work if the next stage has no replicas."""
        # The work cannot wait: during a rolling update, that stage may never get a
        # replica again.
        if self._replicas:
            return []
        returned = list(self._waiting)
        for key in returned:
            self.cancel(key)
        return returned

    def connected(self, name: str) -> None:
        self._handed[name] = {}
        self._begun[name] = deque(maxlen=REMEMBERED * self._credit)

    def lost(self, name: str) -> list[Key]:
        """Record that the edge to a replica ended; return work that may be lost."""
        self._silent.discard(name)
        for refusal in [r for r in self._refusals if r[0] == name]:
            del self._refusals[refusal]
        # Return begun work, too: the replica notifies this process and the gateways
        # separately, and may have died before it notified the gateways. A gateway
        # ignores the work that it knows was begun.
        self._begun_at.pop(name, None)
        return [*self._begun.pop(name, ()), *self._handed.pop(name, ())]

    def left(self, name: str) -> list[Key]:
        """Record that a replica left; return the work that it did not begin."""
        begun = self._begun.get(name, ())
        return self.lost(name)[len(begun) :]

    def silent(self, name: str, *, is_silent: bool) -> list[Key]:
        """Record that a replica fell silent or resumed; return newly stuck work."""
        if not is_silent:
            self._silent.discard(name)
            return []
        if name in self._silent or name not in self._handed:
            return []
        self._silent.add(name)
        return list(self._handed[name])

    def begun(self, name: str, keys: Sequence[Key]) -> None:
        if name not in self._handed:
            return
        for key in keys:
            self._handed[name].pop(key, None)
        self._begun[name].extend(keys)
        self._begun_at[name] = next(self._begins)

    def refused(self, name: str, keys: Sequence[Key], now: float) -> None:
        """Record that a replica refused work whose gateway it is not connected to."""
        held = self._handed.get(name, {})
        for key in keys:
            # Ignore work that was not sent there: otherwise, a faulty replica could
            # exhaust memory.
            if key in held:
                del held[key]
                self._refusals[name, key[0]] = now + REFUSED_S

    def holder(self, key: Key) -> str | None:
        """Return the replica that holds a piece of work, or held it recently."""
        for name, keys in self._handed.items():
            if key in keys or key in self._begun[name]:
                return name
        return None

    def cancel(self, key: Key) -> None:
        self._waiting.pop(key, None)
        self._fair.drop(key)

    def cancel_of(self, gateway: str) -> None:
        for key in [key for key in self._waiting if key[0] == gateway]:
            self.cancel(key)

    def hand(self, finished: list[Work], now: float) -> dict[str, list[Work]]:
        """Queue finished work; return the work to send now, by replica."""
        for piece in finished:
            self._waiting[piece.key] = piece
            number = next(self._numbers)
            self._fair.put(piece.key, piece.share, piece.rows, number)
        sent: dict[str, list[Work]] = {}
        for key in list(self._fair.order()):
            piece = self._waiting[key]
            if piece.deadline_at <= now:
                self.cancel(key)  # its gateway has answered the client already
                continue
            name = self._target(piece, now)
            if name is not None:
                del self._waiting[key]
                self._fair.take(key)
                self._handed[name][key] = None
                sent.setdefault(name, []).append(piece)
        return sent

    def _target(self, piece: Work, now: float) -> str | None:
        if piece.via is not None and (probed := piece.via.get(str(self._stage))):
            return probed if probed in self._handed else None
        load = {name: len(keys) for name, keys in self._handed.items()}
        open_ = [
            name
            for name, count in load.items()
            if (count < self._credit or piece.via is not None)
            and name in self._replicas
            and name not in self._silent
            and self._refusals.get((name, piece.key[0]), 0.0) <= now
        ]
        by_state = {
            state: [n for n in open_ if self._replicas[n].state is state]
            for state in ReplicaState
        }
        # If no replica is ready, use others: a version that is being replaced ends up
        # with only draining replicas, and when a version starts, a probe finds only
        # starting ones.
        candidates = by_state[ReplicaState.READY]
        is_any_ready = any(
            r.state is ReplicaState.READY and name in self._handed
            for name, r in self._replicas.items()
        )
        if not candidates and not is_any_ready:
            candidates = by_state[ReplicaState.DRAINING]
            if piece.via is not None:
                candidates = candidates or by_state[ReplicaState.STARTING]
        chosen: str | None = None
        if piece.session is not None:
            chosen = HashRing(candidates).home(piece.session) or None
            most = min((load[name] for name in candidates), default=0) + SESSION_LEAD
            if piece.via is None and chosen is not None and load[chosen] >= most:
                # This limit keeps one session from using up the replica's credit.
                chosen = None
        if chosen is None:
            # Of two equally loaded replicas, prefer the one that began a batch longer
            # ago, because it is likelier to be done (replicas do not report the end).
            chosen = choose(
                candidates,
                lambda name: (load[name], self._begun_at.get(name, 0)),
                self._chance,
            )
        if piece.via is not None:
            # Send a probe even without credit: other work may be waiting for it.
            return chosen
        return chosen if load.get(chosen or "", 0) < self._credit else None
