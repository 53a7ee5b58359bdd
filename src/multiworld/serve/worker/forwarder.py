"""Handing finished work to the next stage: to whom, how much, what if it is lost. Pure.

A replica may have so many pieces of work that a replica of the next stage has not begun
(its *credit* there). What cannot be handed on waits here, and a replica with much that
waits begins no new batch: so a slow stage slows the ones before it, up to the gateway.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from multiworld.serve.routing.load_balancer import Chance, choose
from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, FairQueue, Share
from multiworld.serve.transport.routing_table import Replica, ReplicaState
from multiworld.serve.worker.batch_queue import Key

REFUSED_S = 0.5
"""How long a router's work is not handed to a replica that refused it."""

REMEMBERED = 4
"""Of what a receiver has begun, so many times its credit are remembered."""


@dataclass(frozen=True, slots=True, eq=False)
class FinishedWork:
    """What one stage made of one request.

    Attributes:
        content: The outputs; not looked at here.
        share: Whose it is.
        rows: How much it takes of that share.
    """

    key: Key
    deadline_at: float
    is_solo: bool
    session: str | None
    via: dict[str, str] | None
    content: Any
    share: Share = DEFAULT_SHARE
    rows: int = 1


class Forwarder:
    """What a replica has for the next stage.

    Args:
        stage: Number of the next stage.
        credit: Pieces of work that one of its replicas may have and not have begun.
        chance: Where choices are drawn from.
    """

    def __init__(self, stage: int, credit: int, chance: Chance) -> None:
        self._stage, self._credit, self._chance = stage, credit, chance
        self._waiting: OrderedDict[Key, FinishedWork] = OrderedDict()
        self._fair: FairQueue[Key] = FairQueue()
        self._numbers = itertools.count()
        self._handed: dict[str, dict[Key, None]] = {}
        self._begun: dict[str, deque[Key]] = {}
        self._replicas: dict[str, Replica] = {}
        self._silent: set[str] = set()
        self._refusals: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def handed_count(self) -> int:
        """How many pieces of work are on their way to be begun."""
        return sum(map(len, self._handed.values()))

    def table_changed(self, replicas: list[Replica]) -> None:
        """Take note of the next stage's replicas."""
        self._replicas = {replica.name: replica for replica in replicas}

    def give_back(self) -> list[Key]:
        """Return what waits and goes back to its routers, if the next stage has nobody.

        This version may be on its way out, and nobody ever come for it.
        """
        if self._replicas:
            return []
        returned = list(self._waiting)
        for key in returned:
            self.cancel(key)
        return returned

    def connected(self, name: str) -> None:
        """Take note of an edge."""
        self._handed[name] = {}
        self._begun[name] = deque(maxlen=REMEMBERED * self._credit)

    def lost(self, name: str) -> list[Key]:
        """Take note of its end; return what may have been lost with it.

        Also what it had begun not long ago: it told this process and the routers, and
        may have been lost between the two. A router knows better which of these got
        there, and which were answered.
        """
        self._silent.discard(name)
        for refusal in [r for r in self._refusals if r[0] == name]:
            del self._refusals[refusal]
        return [*self._begun.pop(name, ()), *self._handed.pop(name, ())]

    def silent(self, name: str, *, is_silent: bool) -> list[Key]:
        """Take note of silence, or its end; return what is newly stuck."""
        if not is_silent:
            self._silent.discard(name)
            return []
        if name in self._silent or name not in self._handed:
            return []
        self._silent.add(name)
        return list(self._handed[name])

    def begun(self, name: str, keys: list[Key]) -> None:
        """Take note that a replica began these."""
        if name not in self._handed:
            return
        for key in keys:
            self._handed[name].pop(key, None)
        self._begun[name].extend(keys)

    def refused(self, name: str, keys: list[Key], now: float) -> None:
        """Take note that a replica does not know a router yet, or any more."""
        for key in keys:
            self._handed.get(name, {}).pop(key, None)
            self._refusals[name, key[0]] = now + REFUSED_S

    def holder(self, key: Key) -> str | None:
        """Return who was given a piece of work and has it, or had it not long ago."""
        for name, keys in self._handed.items():
            if key in keys or key in self._begun[name]:
                return name
        return None

    def cancel(self, key: Key) -> None:
        """Forget what nobody wants any more."""
        self._waiting.pop(key, None)
        self._fair.drop(key)

    def cancel_of(self, router: str) -> None:
        """Forget all of one router."""
        for key in [key for key in self._waiting if key[0] == router]:
            self.cancel(key)

    def hand(
        self, finished: list[FinishedWork], now: float
    ) -> dict[str, list[FinishedWork]]:
        """Return what to send to whom now; the rest waits."""
        for piece in finished:
            self._waiting[piece.key] = piece
            number = next(self._numbers)
            self._fair.put(piece.key, piece.share, piece.rows, number)
        sent: dict[str, list[FinishedWork]] = {}
        for key in list(self._fair.order()):
            piece = self._waiting[key]
            if piece.deadline_at <= now:
                self.cancel(key)  # its router has told the client
                continue
            name = self._target(piece, now)
            if name is not None:
                del self._waiting[key]
                self._fair.take(key)
                self._handed[name][key] = None
                sent.setdefault(name, []).append(piece)
        return sent

    def _target(self, piece: FinishedWork, now: float) -> str | None:
        if piece.via is not None and (probed := piece.via.get(str(self._stage))):
            return probed if probed in self._handed else None
        load = {name: len(keys) for name, keys in self._handed.items()}
        open_ = [
            name
            for name, count in load.items()
            if (count < self._credit or piece.session is not None)
            and name in self._replicas
            and name not in self._silent
            and self._refusals.get((name, piece.key[0]), 0.0) <= now
        ]
        by_state = {
            state: [n for n in open_ if self._replicas[n].state is state]
            for state in ReplicaState
        }
        # A version that is being replaced has draining ones only, at the end; and a
        # probe of the first replicas finds none that is ready.
        candidates = by_state[ReplicaState.READY]
        is_any_ready = any(
            r.state is ReplicaState.READY and name in self._handed
            for name, r in self._replicas.items()
        )
        if not candidates and not is_any_ready:
            candidates = by_state[ReplicaState.DRAINING]
            if piece.via is not None:
                candidates = candidates or by_state[ReplicaState.STARTING]
        chosen = choose(candidates, load, self._chance, piece.session)
        return chosen if load.get(chosen or "", 0) < self._credit else None
