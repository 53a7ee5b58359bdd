"""Registry of worlds: claims on ranks, admission, epochs. Pure.

A name has at most one *current* incarnation (admitted) and one *forming* (waiting for
members). The registry settles the epoch of an incarnation when its last member arrives:
one more than the highest that the registry or any of the joiners has seen. So epochs
never go back, even if the registry was lost and started empty.

A claim on a held rank makes the registry ask the holder. If the holder answers, the
claim is refused. If the holder is silent or its session has ended, the claim may open
the next epoch.

Members of a living incarnation may claim their own ranks in a larger one (``grow``).
They keep their current ranks until the larger one is complete, and are told of every
newcomer that waits. Survivors of a broken incarnation may go on without the lost
members; see ``reform``.

Several registries can serve the same names if each has a *place*: its number, and the
count of registries. Each gives out epochs of its own residue class modulo the count, so
that no two ever give out the same epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from multiworld.rendezvous.claims import (
    Abandoned,
    Action,
    Announced,
    Answered,
    AskHolder,
    Claimed,
    Forget,
    Happening,
    Left,
    Notify,
    Refused,
    Remember,
    Reply,
    RequestKey,
    SessionEnded,
    SessionKey,
    Ticked,
    Withdrawn,
)
from multiworld.rendezvous.messages import (
    Admitted,
    ClaimOutcome,
    JoinTimedOut,
    RankTaken,
    Stale,
    TermsDiffer,
)
from multiworld.rendezvous.reform import Reform, ReformClaim

__all__ = [
    "ASK_S",
    "Abandoned",
    "Announced",
    "Answered",
    "AskHolder",
    "Claimed",
    "Forget",
    "Happening",
    "Left",
    "Notify",
    "Refused",
    "Registry",
    "Remember",
    "Reply",
    "SessionEnded",
    "Ticked",
    "Withdrawn",
    "key_prefix",
    "next_epoch",
]

ASK_S = 1.0
"""Seconds that a holder has to answer before it counts as silent. The registry asks
only holders whose session is open, so an answer takes one round trip and one iteration
of the holder's event loop."""


@dataclass(slots=True)
class _Holder:
    uid: str
    session: SessionKey | None
    request: RequestKey = 0


@dataclass(slots=True)
class _Current:
    epoch: int
    holders: dict[int, _Holder]
    reforms: int | None = None  # epoch of the incarnation whose survivors it is of
    members: int = 0  # those that have not withdrawn their claims


@dataclass(slots=True)
class _World:
    current: _Current | None = None
    forming: dict[int, Claimed] = field(default_factory=dict)
    reforming: Reform | None = None

    @property
    def waits(self) -> bool:
        """True while a claim waits for other members."""
        return bool(self.forming) or self.reforming is not None


@dataclass(slots=True)
class _Asking:
    claims: list[Claimed]
    world: str
    epoch: int
    rank: int
    deadline: float
    holder: SessionKey


def key_prefix(world: str, epoch: int, nonce: int) -> str:
    """Return the prefix of the store keys that belong to one incarnation.

    Args:
        world: The world's name.
        epoch: The incarnation's epoch.
        nonce: The incarnation's nonce.
    """
    return f"{world}/{epoch}-{nonce:016x}/"


def next_epoch(highest: int, place: tuple[int, int]) -> int:
    """Return the lowest epoch above ``highest`` in the residue class of ``place``."""
    number, count = place
    return highest + 1 + (number - highest) % count


class Registry:
    """State of every name of one store.

    Args:
        highest: The highest epoch of each name, stored before a restart.
    """

    def __init__(self, highest: dict[str, int] | None = None) -> None:
        self._worlds: dict[str, _World] = {}
        self._highest: dict[str, int] = dict(highest or {})
        self._void: dict[str, int] = {}
        self._forming: set[str] = set()
        self._asking: dict[int, _Asking] = {}
        self._prefixes: dict[str, str] = {}
        self._asks = 0

    def handle(self, happening: Happening, now: float) -> list[Action]:
        """Apply one input and return the actions to carry out, in order.

        Args:
            happening: The input.
            now: Current time, in seconds on a monotonic clock.
        """
        match happening:
            case Claimed():
                return self._claim(happening, now)
            case ReformClaim():
                return self._reform(happening)
            case Announced():
                return self._announced(happening)
            case Left():
                return self._leave(happening)
            case Withdrawn():
                return self._withdraw(happening)
            case Answered():
                return self._answered(happening, now)
            case SessionEnded(session):
                return self._session_ended(session, now)
            case Refused(world, outcome):
                return self._dissolve(world, outcome)
            case Ticked():
                return self._tick(now)

    def waiting_count(self) -> int:
        """Return the number of claims that wait for other members."""
        return sum(len(_claims_of(world)) for _, world in self._waiting_worlds())

    def next_deadline(self) -> float | None:
        """Return the time at which ``Ticked`` is due, or None if nothing waits."""
        deadlines = [
            claim.deadline
            for _, world in self._waiting_worlds()
            for claim in _claims_of(world)
        ]
        deadlines += [asking.deadline for asking in self._asking.values()]
        return min(deadlines, default=None)

    def _waiting_worlds(self) -> list[tuple[str, _World]]:
        live = self._worlds
        self._forming = {n for n in self._forming if n in live and live[n].waits}
        return [(name, self._worlds[name]) for name in self._forming]

    # Claims.

    def _claim(self, claim: Claimed, now: float) -> list[Action]:
        world = self._worlds.setdefault(claim.world, _World())
        current = world.current
        holder = current.holders.get(claim.rank) if current else None
        if current is None or holder is None:
            return self._admit(world, claim)
        if holder.uid == claim.uid:  # it keeps its rank until the next is complete
            return self._admit(world, claim)
        if holder.session is None:
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
            holder,
        )
        return [AskHolder(holder, self._asks, claim.world, current.epoch, claim.rank)]

    def _answered(self, answer: Answered, now: float) -> list[Action]:
        asking = self._asking.get(answer.ask)
        if asking is None or asking.holder != answer.session:
            return []  # too late, or of one that was not asked
        del self._asking[answer.ask]
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
        terms = {(c.size, c.terms, c.place) for c in world.forming.values()}
        if len(terms) > 1:
            return self._dissolve(claim.world, _mismatch(world.forming))
        if len(world.forming) < claim.size:
            return self._notify(claim, is_gone=False)
        claims = [world.forming[rank] for rank in sorted(world.forming)]
        world.forming = {}
        seen = max(claim.seen for claim in claims)
        return self._complete(world, claims, claim.fresh_nonce, seen)

    def _complete(
        self,
        world: _World,
        claims: Sequence[Claimed | ReformClaim],
        nonce: int,
        seen: int,
    ) -> list[Action]:
        name, place = claims[0].world, claims[0].place
        epoch = next_epoch(max(self._highest.get(name, 0), seen), place)
        self._highest[name] = epoch
        ranks = enumerate(claims)
        holders = {
            rank: _Holder(claim.uid, claim.session, claim.request)
            for rank, claim in ranks
        }
        first = claims[0]
        reforms = first.epoch if isinstance(first, ReformClaim) else None
        world.current = _Current(epoch, holders, reforms, len(claims))
        self._void.pop(name, None)
        members = tuple(claim.member.at(rank) for rank, claim in enumerate(claims))
        outcome = Admitted(epoch, nonce, members)
        actions = [*self._forget(name), Remember(name, epoch)]
        if world.reforming is not None:  # a newer incarnation exists without them
            late = world.reforming.claims.values()
            actions += [_stale(claim, epoch) for claim in late]
            world.reforming = None
        self._prefixes[name] = key_prefix(name, epoch, nonce)
        return [*actions, *(Reply(c.session, c.request, outcome) for c in claims)]

    def _notify(self, claim: Claimed, *, is_gone: bool) -> list[Action]:
        """Tell the holders of the living incarnation about a claim that waits."""
        world = self._worlds.get(claim.world)
        current = None if world is None else world.current
        if current is None or world is None:
            return []
        waiting = {waiting.uid for waiting in world.forming.values()}
        if any(holder.uid == claim.uid for holder in current.holders.values()):
            return []  # not a newcomer, but a member in a ``grow``
        return [
            Notify(
                session=holder.session,
                world=claim.world,
                epoch=current.epoch,
                rank=claim.rank,
                size=claim.size,
                is_gone=is_gone,
            )
            for holder in current.holders.values()
            if holder.session is not None and holder.uid not in waiting
        ]

    # Reforming, and recovery after a restart of the store.

    def _reform(self, claim: ReformClaim) -> list[Action]:
        world = self._worlds.setdefault(claim.world, _World())
        current = self._highest.get(claim.world, 0)
        if current > claim.epoch and self._void.get(claim.world) != claim.epoch:
            return [*self._tidy(claim.world), _stale(claim, current)]
        actions: list[Action] = []
        reform = world.reforming
        if reform is None or reform.epoch < claim.epoch:
            # A store that has lost its state learns the epoch from the survivors.
            self._highest[claim.world] = max(current, claim.epoch)
            if reform is not None:
                late = reform.claims.values()
                actions += [_stale(claim_, claim.epoch) for claim_ in late]
            reform = world.reforming = Reform(claim.epoch, claim.size)
        return [*actions, *self._add_survivor(world, reform, claim)]

    def _add_survivor(
        self, world: _World, reform: Reform, claim: ReformClaim
    ) -> list[Action]:
        if reform.accuses(claim):
            return [_stale(claim, claim.epoch)]
        if any(other.terms != claim.terms for other in reform.claims.values()):
            return [Reply(claim.session, claim.request, TermsDiffer(claim.terms))]
        reform.accept(claim)
        self._forming.add(claim.world)
        return self._settle(world)

    def _settle(self, world: _World) -> list[Action]:
        reform = world.reforming
        if reform is None or not reform.is_settled:
            return []
        world.reforming = None
        claims = reform.members()
        nonce = claims[-1].fresh_nonce
        return self._complete(world, claims, nonce, reform.epoch)

    def _announced(self, announced: Announced) -> list[Action]:
        name, epoch = announced.world, announced.epoch
        self._highest[name] = max(self._highest.get(name, 0), epoch)
        world = self._worlds.setdefault(name, _World())
        if world.current is None or world.current.epoch < epoch:
            world.current = _Current(epoch, {})
        if world.current.epoch > epoch:
            return []
        holder = world.current.holders.get(announced.rank)
        if holder is None or holder.session is None or holder.uid == announced.uid:
            world.current.holders[announced.rank] = _Holder(
                announced.uid, announced.session
            )
        actions: list[Action] = [Remember(name, self._highest[name])]
        for claim in world.forming.values():
            notes = self._notify(claim, is_gone=False)
            actions += [
                note
                for note in notes
                if isinstance(note, Notify) and note.session == announced.session
            ]
        return actions

    def _forget(self, name: str) -> list[Action]:
        prefix = self._prefixes.pop(name, None)
        return [] if prefix is None else [Forget(prefix)]

    def _dissolve(self, name: str, outcome: ClaimOutcome) -> list[Action]:
        world = self._worlds.get(name)
        if world is None:
            return []
        claims, world.forming = list(world.forming.values()), {}
        actions: list[Action] = []
        for claim in claims:
            actions += self._notify(claim, is_gone=True)
            actions.append(Reply(claim.session, claim.request, outcome))
        return actions

    # Departures.

    def _leave(self, left: Left) -> list[Action]:
        world = self._worlds.get(left.world)
        if world is None or world.current is None or world.current.epoch != left.epoch:
            return []
        holder = world.current.holders.get(left.rank)
        if holder is not None and holder.session == left.session:
            del world.current.holders[left.rank]
            for rank in left.lost:
                world.current.holders.pop(rank, None)
        return self._tidy(left.world)

    def _tidy(self, name: str) -> list[Action]:
        """Drop an incarnation that no session holds any more, but keep its epoch."""
        world = self._worlds.get(name)
        if world is None or world.waits:
            return []
        holders = [] if world.current is None else list(world.current.holders.values())
        if any(holder.session is not None for holder in holders):
            return []
        if any(asking.world == name for asking in self._asking.values()):
            return []
        del self._worlds[name]
        return self._forget(name)

    def _withdraw(self, withdrawn: Withdrawn) -> list[Action]:
        session, request = withdrawn.session, withdrawn.request
        for asking in self._asking.values():
            asking.claims = [
                c for c in asking.claims if (c.session, c.request) != (session, request)
            ]
        actions = self._drop_claims(session, request)
        for name in list(self._worlds):
            actions += self._abandon(name, session, request)
            actions += self._tidy(name)
        return actions

    def _abandon(
        self, name: str, session: SessionKey, request: RequestKey
    ) -> list[Action]:
        """Tell the holders that a member withdrew its claim while it was admitted.

        If all have, nobody was ever in that incarnation: the survivors of the one
        before may reform again.
        """
        current = self._worlds[name].current
        holders = {} if current is None else current.holders
        for rank, holder in list(holders.items()):
            if current is not None and (holder.session, holder.request) == (
                session,
                request,
            ):
                del holders[rank]
                current.members -= 1
                if not current.members and current.reforms is not None:
                    self._void[name] = current.reforms
                return [
                    Abandoned(other.session, name, current.epoch, rank)
                    for other in holders.values()
                    if other.session is not None
                ]
        return []

    def _drop_claims(
        self, session: SessionKey, request: RequestKey | None
    ) -> list[Action]:
        """Remove the claims of a session; ``request`` selects one of them."""
        actions: list[Action] = []
        for _, world in self._waiting_worlds():
            for rank, claim in list(world.forming.items()):
                if claim.session == session and request in (None, claim.request):
                    del world.forming[rank]
                    actions += self._notify(claim, is_gone=True)
            if world.reforming is not None:
                world.reforming.drop(session, request)
                if not world.reforming.claims:
                    world.reforming = None
                actions += self._settle(world)
        return actions

    def _session_ended(self, session: SessionKey, now: float) -> list[Action]:
        actions = self._drop_claims(session, None)
        for world in self._worlds.values():
            if world.current is not None:
                for holder in world.current.holders.values():
                    if holder.session == session:
                        holder.session = None
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
        for name, world in self._waiting_worlds():
            actions += self._expire(world, now)
            actions += _expire_reforming(world, now)
            actions += self._tidy(name)
        return actions

    def _expire(self, world: _World, now: float) -> list[Action]:
        late = [claim for claim in world.forming.values() if claim.deadline <= now]
        present = sorted(world.forming)
        actions: list[Action] = []
        for claim in late:
            del world.forming[claim.rank]
            actions += self._notify(claim, is_gone=True)
            missing = [rank for rank in range(claim.size) if rank not in present]
            actions.append(_timeout(claim, present, missing))
        return actions


def _expire_reforming(world: _World, now: float) -> list[Action]:
    reform = world.reforming
    if reform is None:
        return []
    late = [claim for claim in reform.claims.values() if claim.deadline <= now]
    present, missing = sorted(reform.claims), reform.missing()
    for claim in late:
        reform.drop(claim.session, claim.request)
    if not reform.claims:
        world.reforming = None
    return [_timeout(claim, present, missing) for claim in late]


def _claims_of(world: _World) -> list[Claimed | ReformClaim]:
    reforming = world.reforming
    survivors = [] if reforming is None else list(reforming.claims.values())
    return [*world.forming.values(), *survivors]


def _timeout(
    claim: Claimed | ReformClaim, present: list[int], missing: list[int]
) -> Reply:
    outcome = JoinTimedOut(tuple(present), tuple(missing))
    return Reply(claim.session, claim.request, outcome)


def _stale(claim: ReformClaim, current: int) -> Reply:
    return Reply(claim.session, claim.request, Stale(current))


def _taken(claim: Claimed) -> Reply:
    return Reply(claim.session, claim.request, RankTaken())


def _mismatch(forming: dict[int, Claimed]) -> TermsDiffer:
    asked = "; ".join(
        f"rank {rank} asked for size {claim.size}, {claim.terms}"
        for rank, claim in sorted(forming.items())
    )
    return TermsDiffer(asked)
