"""Which worlds there are, who claims which rank, and who is admitted. Pure.

A name has at most one *current* incarnation (admitted) and one *forming* (waiting for
members). The epoch of an incarnation is settled when its last member arrives: one more
than the highest that this registry, or any of the joiners, has seen; so numbers never
go back even if the registry was lost and started afresh.

A claim on a rank that is held makes the registry ask the holder. An answer refuses the
claim; silence, or a holder whose session is gone, lets the claim open the next epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SessionKey = int
RequestKey = int
Record = dict[str, Any]

ASK_S = 1.0
"""Seconds a holder has to answer before it counts as silent. Asked are only members
whose session is up, so this is one round trip and one turn of the holder's loop."""


# What can happen.


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A session claims a rank and waits for the other members."""

    session: SessionKey
    request: RequestKey
    world: str
    rank: int
    size: int
    terms: str
    uid: str
    seen: int
    deadline: float
    member: Record
    fresh_nonce: int


@dataclass(frozen=True, slots=True)
class Left:
    """A session no longer holds its rank in an incarnation."""

    session: SessionKey
    world: str
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A session gave up a claim that was still waiting."""

    session: SessionKey
    request: RequestKey


@dataclass(frozen=True, slots=True)
class Answered:
    """A holder answered whether it still holds its rank."""

    ask: int
    holds: bool


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session's connection is gone."""

    session: SessionKey


@dataclass(frozen=True, slots=True)
class Refused:
    """A stranger wanted into a world and could not be spoken with."""

    world: str
    error: Record


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time may have run out for someone."""


Happening = Claimed | Left | Withdrawn | Answered | SessionEnded | Refused | Ticked


# What is to be done.


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a claim."""

    session: SessionKey
    request: RequestKey
    body: Record


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a holder whether it holds its rank."""

    session: SessionKey
    ask: int
    world: str
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop every key of an incarnation that is no more."""

    prefix: str


Action = Reply | Ask | Forget


@dataclass(slots=True)
class _Holder:
    uid: str
    session: SessionKey | None


@dataclass(slots=True)
class _Current:
    epoch: int
    holders: dict[int, _Holder]


@dataclass(slots=True)
class _World:
    current: _Current | None = None
    forming: dict[int, Claimed] = field(default_factory=dict)


@dataclass(slots=True)
class _Asking:
    claims: list[Claimed]
    world: str
    epoch: int
    rank: int
    deadline: float


def key_prefix(world: str, epoch: int, nonce: int) -> str:
    """Return the prefix of the keys that belong to one incarnation."""
    return f"{world}/{epoch}-{nonce:016x}/"


class Registry:
    """The account of every name. One instance, one store."""

    def __init__(self) -> None:
        self._worlds: dict[str, _World] = {}
        self._highest: dict[str, int] = {}
        self._forming: set[str] = set()
        self._asking: dict[int, _Asking] = {}
        self._prefixes: dict[str, str] = {}
        self._asks = 0

    def handle(self, happening: Happening, now: float) -> list[Action]:
        """Take note of ``happening`` at ``now`` (monotonic seconds)."""
        match happening:
            case Claimed():
                return self._claim(happening, now)
            case Left():
                return self._leave(happening)
            case Withdrawn():
                self._withdraw(happening)
            case Answered():
                return self._answered(happening, now)
            case SessionEnded(session):
                return self._session_ended(session, now)
            case Refused(world, error):
                return self._dissolve(world, error)
            case Ticked():
                return self._tick(now)
        return []

    def waiting_count(self) -> int:
        """Return how many claims wait for other members."""
        return sum(len(world.forming) for _, world in self._waiting_worlds())

    def next_deadline(self) -> float | None:
        """Return when ``Ticked`` is wanted next, or None."""
        deadlines = [
            claim.deadline
            for _, world in self._waiting_worlds()
            for claim in world.forming.values()
        ]
        deadlines += [asking.deadline for asking in self._asking.values()]
        return min(deadlines, default=None)

    def _waiting_worlds(self) -> list[tuple[str, _World]]:
        live = self._worlds
        self._forming = {n for n in self._forming if n in live and live[n].forming}
        return [(name, self._worlds[name]) for name in self._forming]

    # Claims.

    def _claim(self, claim: Claimed, now: float) -> list[Action]:
        world = self._worlds.setdefault(claim.world, _World())
        current = world.current
        holder = current.holders.get(claim.rank) if current else None
        if current is None or holder is None:
            return self._admit(world, claim)
        if holder.uid == claim.uid or holder.session is None:
            del current.holders[claim.rank]
            return self._admit(world, claim)
        return self._ask(current, holder.session, claim, now)

    def _ask(
        self, current: _Current, holder: SessionKey, claim: Claimed, now: float
    ) -> list[Action]:
        for asking in self._asking.values():
            if (asking.world, asking.rank) == (claim.world, claim.rank):
                asking.claims.append(claim)
                return []
        self._asks += 1
        self._asking[self._asks] = _Asking(
            [claim],
            claim.world,
            current.epoch,
            claim.rank,
            min(now + ASK_S, claim.deadline),
        )
        return [Ask(holder, self._asks, claim.world, current.epoch, claim.rank)]

    def _answered(self, answer: Answered, now: float) -> list[Action]:
        asking = self._asking.pop(answer.ask, None)
        if asking is None:
            return []
        if answer.holds:
            return [_taken(claim) for claim in asking.claims]
        return self._vacate(asking, now)

    def _vacate(self, asking: _Asking, now: float) -> list[Action]:
        world = self._worlds.get(asking.world)
        current = None if world is None else world.current
        if current is not None and current.epoch == asking.epoch:
            current.holders.pop(asking.rank, None)
        actions: list[Action] = []
        for claim in asking.claims:
            actions += self._claim(claim, now)
        return actions

    def _admit(self, world: _World, claim: Claimed) -> list[Action]:
        rival = world.forming.get(claim.rank)
        if rival is not None and rival.uid != claim.uid:
            return [_taken(claim)]
        world.forming[claim.rank] = claim
        self._forming.add(claim.world)
        terms = {(c.size, c.terms) for c in world.forming.values()}
        if len(terms) > 1:
            return self._dissolve(claim.world, _mismatch(world.forming))
        if len(world.forming) < claim.size:
            return []
        return self._complete(claim.world, world, claim.fresh_nonce)

    def _complete(self, name: str, world: _World, nonce: int) -> list[Action]:
        claims = [world.forming[rank] for rank in sorted(world.forming)]
        world.forming = {}
        highest = self._highest.get(name, 0)
        epoch = max([highest, *(claim.seen for claim in claims)]) + 1
        self._highest[name] = epoch
        holders = {claim.rank: _Holder(claim.uid, claim.session) for claim in claims}
        world.current = _Current(epoch, holders)
        members = [claim.member for claim in claims]
        body = {"ok": True, "epoch": epoch, "nonce": nonce, "members": members}
        actions = self._forget(name)
        self._prefixes[name] = key_prefix(name, epoch, nonce)
        return [*actions, *(Reply(c.session, c.request, body) for c in claims)]

    def _forget(self, name: str) -> list[Action]:
        prefix = self._prefixes.pop(name, None)
        return [] if prefix is None else [Forget(prefix)]

    def _dissolve(self, name: str, error: Record) -> list[Action]:
        world = self._worlds.get(name)
        if world is None:
            return []
        claims, world.forming = list(world.forming.values()), {}
        body = {"ok": False, **error}
        return [Reply(claim.session, claim.request, body) for claim in claims]

    # Departures.

    def _leave(self, left: Left) -> list[Action]:
        world = self._worlds.get(left.world)
        if world is None or world.current is None or world.current.epoch != left.epoch:
            return []
        holder = world.current.holders.get(left.rank)
        if holder is not None and holder.session == left.session:
            del world.current.holders[left.rank]
        return self._tidy(left.world)

    def _tidy(self, name: str) -> list[Action]:
        """Forget an incarnation that nobody holds any more, but not its number."""
        world = self._worlds.get(name)
        if world is None or world.forming:
            return []
        holders = [] if world.current is None else list(world.current.holders.values())
        if any(holder.session is not None for holder in holders):
            return []
        if any(asking.world == name for asking in self._asking.values()):
            return []
        del self._worlds[name]
        return self._forget(name)

    def _withdraw(self, withdrawn: Withdrawn) -> None:
        wanted = (withdrawn.session, withdrawn.request)
        for _, world in self._waiting_worlds():
            for rank, claim in list(world.forming.items()):
                if (claim.session, claim.request) == wanted:
                    del world.forming[rank]
        for asking in self._asking.values():
            asking.claims = [
                c for c in asking.claims if (c.session, c.request) != wanted
            ]

    def _session_ended(self, session: SessionKey, now: float) -> list[Action]:
        for world in self._worlds.values():
            for rank, claim in list(world.forming.items()):
                if claim.session == session:
                    del world.forming[rank]
            if world.current is not None:
                for holder in world.current.holders.values():
                    if holder.session == session:
                        holder.session = None
        actions: list[Action] = []
        for ask, asking in list(self._asking.items()):
            asking.claims = [c for c in asking.claims if c.session != session]
            if self._holder_is_gone(asking):
                del self._asking[ask]
                actions += self._vacate(asking, now)
        for name in list(self._worlds):
            actions += self._tidy(name)
        return actions

    def _holder_is_gone(self, asking: _Asking) -> bool:
        world = self._worlds.get(asking.world)
        current = None if world is None else world.current
        if current is None or current.epoch != asking.epoch:
            return True
        holder = current.holders.get(asking.rank)
        return holder is None or holder.session is None

    def _tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for ask, asking in list(self._asking.items()):
            if asking.deadline <= now:
                del self._asking[ask]
                actions += self._vacate(asking, now)
        for _, world in self._waiting_worlds():
            actions += _expire(world, now)
        return actions


def _expire(world: _World, now: float) -> list[Action]:
    late = [claim for claim in world.forming.values() if claim.deadline <= now]
    present = sorted(world.forming)
    actions: list[Action] = []
    for claim in late:
        del world.forming[claim.rank]
        missing = [rank for rank in range(claim.size) if rank not in present]
        body = {
            "ok": False,
            "error": "timeout",
            "present": present,
            "missing": missing,
        }
        actions.append(Reply(claim.session, claim.request, body))
    return actions


def _taken(claim: Claimed) -> Reply:
    return Reply(claim.session, claim.request, {"ok": False, "error": "taken"})


def _mismatch(forming: dict[int, Claimed]) -> Record:
    asked = "; ".join(
        f"rank {rank} asked for size {claim.size}, {claim.terms}"
        for rank, claim in sorted(forming.items())
    )
    return {"error": "mismatch", "detail": asked}
