"""Registry of worlds: claims on ranks, admission, epochs. Pure.

A name has at most one *current* incarnation (admitted) and one *forming* (waiting for
members). When the last member arrives, the incarnation gets its epoch: higher than any
that the registry or a member has seen. So epochs never go back.

If a claimed rank is held, the store asks the holder. The claim may open the next epoch
if the holder is silent or its session has ended. Members of a living incarnation keep
their ranks until a larger incarnation (``grow``) is complete. For survivors of a broken
incarnation, see ``reform``.
"""

from __future__ import annotations

from collections.abc import Sequence

from multiworld.rendezvous.claims import (
    Action,
    Claimed,
    Forget,
    Happening,
    Received,
    Refused,
    Remember,
    RequestKey,
    Send,
    SessionEnded,
    SessionKey,
    Ticked,
)
from multiworld.rendezvous.deadline_heap import Deadlines
from multiworld.rendezvous.reform import Reform, ReformClaim
from multiworld.rendezvous.session_index import SessionIndex
from multiworld.rendezvous.store_messages import (
    MAX_EPOCH,
    Admitted,
    Announce,
    AskHolds,
    ClaimOutcome,
    Crowded,
    HoldsAnswer,
    Leave,
    MemberGaveUp,
    NewcomerWaits,
    Reply,
    TermsDiffer,
    Withdraw,
)
from multiworld.rendezvous.world_claims import (
    Current,
    Holder,
    Question,
    WaitKey,
    WorldClaims,
    expired_survivors,
    mismatch,
    reply,
    stale,
    taken,
    timed_out,
    wait_key,
)

# Seconds after which a holder that was asked and has not answered counts as silent. Its
# session is open, so an answer takes one round trip and one iteration of its event
# loop.
ASK_S = 1.0

# Number of epochs below ``MAX_EPOCH`` that no member can claim to have seen. If a
# member claims a false epoch, this many remain for later joins.
RESERVE = 1 << 40
MAX_CLAIMS = 4096  # maximum number of waiting claims of one session


def key_prefix(world: str, epoch: int, nonce: int) -> str:
    return f"{world}/{epoch}-{nonce:016x}/"


def next_epoch(highest: int, place: tuple[int, int]) -> int:
    """Return the lowest epoch above ``highest`` in the residue class of ``place``."""
    # Each store assigns epochs of one residue class, so that no two stores assign the
    # same epoch.
    number, count = place
    return highest + 1 + (number - highest) % count


class Registry:
    """State of every name of one store."""

    def __init__(self, highest: dict[str, int] | None = None) -> None:
        self._worlds: dict[str, WorldClaims] = {}
        self._highest: dict[str, int] = dict(highest or {})
        self._void: dict[str, int] = {}
        self._sessions = SessionIndex()
        self._deadlines = Deadlines[WaitKey]()
        self._ask_deadlines = Deadlines[int]()
        self._asking: dict[int, Question] = {}
        self._prefixes: dict[str, str] = {}
        self._asks = 0

    def handle(self, happening: Happening, now: float) -> list[Action]:
        """Apply one input and return the actions to carry out, in order."""
        name = self._world_of(happening)
        actions = self._apply(happening, now)
        if name is not None:
            actions += self._tidy(name)
        for action in actions:
            match action:
                case Send(session, Reply(request, outcome)):
                    is_admitted = isinstance(outcome, Admitted)
                    self._sessions.answer(session, request, is_admitted=is_admitted)
        return actions

    def _world_of(self, happening: Happening) -> str | None:
        message = happening.message if isinstance(happening, Received) else happening
        if isinstance(message, HoldsAnswer):
            asking = self._asking.get(message.ask)
            return None if asking is None else asking.world
        return getattr(message, "world", None)

    def _apply(self, happening: Happening, now: float) -> list[Action]:
        match happening:
            case Claimed() | ReformClaim():
                return self._received(happening, now)
            case Received(session, message):
                return self._heard(session, message, now)
            case SessionEnded(session):
                return self._session_ended(session, now)
            case Refused(world, outcome):
                return self._dissolve(world, outcome)
            case Ticked():
                return self._tick(now)

    def _heard(
        self,
        session: SessionKey,
        message: Announce | HoldsAnswer | Leave | Withdraw,
        now: float,
    ) -> list[Action]:
        match message:
            case Announce():
                return self._announced(session, message)
            case Leave():
                return self._leave(session, message)
            case Withdraw(request):
                return self._withdraw(session, request)
            case HoldsAnswer():
                return self._answered(session, message, now)

    def next_deadline(self) -> float | None:
        """Return the time at which ``Ticked`` is due, or None if nothing waits."""
        deadlines = (self._deadlines.next(), self._ask_deadlines.next())
        return min((at for at in deadlines if at is not None), default=None)

    # Sessions.

    def _received(self, claim: Claimed | ReformClaim, now: float) -> list[Action]:
        if self._sessions.waiting_count(claim.session) >= MAX_CLAIMS:
            return [reply(claim, Crowded(MAX_CLAIMS))]
        self._sessions.wait(claim.session, claim.request, claim.world)
        seen = claim.epoch if isinstance(claim, ReformClaim) else claim.seen
        if not self._is_credible(claim.world, seen):
            why = f"epoch {seen} exceeds the maximum"
            return [reply(claim, TermsDiffer(why))]
        if isinstance(claim, ReformClaim):
            return self._reform(claim)
        return self._claim(claim, now)

    def _is_credible(self, name: str, epoch: int) -> bool:
        """Return whether an epoch that a member has seen leaves room for more."""
        return epoch <= self._highest.get(name, 0) or epoch < MAX_EPOCH - RESERVE

    def _add_rank(self, session: SessionKey, name: str, rank: int) -> None:
        self._sessions.add_rank(session, name, rank)
        self._worlds[name].sessions.add(session)

    def _drop_holder(self, current: Current | None, rank: int) -> None:
        holder = None if current is None else current.holders.pop(rank, None)
        if holder is not None:
            self._sessions.forget(holder.session, holder.request)

    def _drop_holders(self, world: WorldClaims) -> None:
        for rank in list(world.current.holders) if world.current else ():
            self._drop_holder(world.current, rank)

    def _wait(
        self, claim: Claimed | ReformClaim, rival: Claimed | ReformClaim | None
    ) -> None:
        """Record a waiting claim in place of ``rival``, the member's earlier claim."""
        if rival is not None:
            self._sessions.forget(rival.session, rival.request)
        self._deadlines.set(wait_key(claim), claim.deadline)
        self._add_rank(claim.session, claim.world, claim.rank)

    # Claims.

    def _claim(self, claim: Claimed, now: float) -> list[Action]:
        world = self._worlds.setdefault(claim.world, WorldClaims())
        current = world.current
        holder = current.holders.get(claim.rank) if current else None
        if current is None or holder is None:
            return self._admit(world, claim)
        if holder.uid == claim.uid:
            # The holder itself claims, for a ``grow``, and keeps its rank.
            return self._admit(world, claim)
        return self._ask(world, current, holder.session, claim, now)

    def _ask(
        self,
        world: WorldClaims,
        current: Current,
        holder: SessionKey,
        claim: Claimed,
        now: float,
    ) -> list[Action]:
        self._add_rank(claim.session, claim.world, claim.rank)
        if claim.rank in world.asking:
            self._asking[world.asking[claim.rank]].claims.append(claim)
            return []
        self._asks += 1
        self._asking[self._asks] = Question(
            [claim],
            claim.world,
            current.epoch,
            claim.rank,
            min(now + ASK_S, claim.deadline),
            holder,
        )
        world.asking[claim.rank] = self._asks
        self._ask_deadlines.set(self._asks, self._asking[self._asks].deadline)
        asks = AskHolds(self._asks, claim.world, current.epoch, claim.rank)
        return [Send(holder, asks)]

    def _asked(self, ask: int) -> Question:
        """Remove a question that was answered or that can no longer be answered."""
        asking = self._asking.pop(ask)
        self._ask_deadlines.drop(ask)
        self._worlds[asking.world].asking.pop(asking.rank, None)
        return asking

    def _answered(
        self, session: SessionKey, answer: HoldsAnswer, now: float
    ) -> list[Action]:
        asking = self._asking.get(answer.ask)
        if asking is None or asking.holder != session:
            return []  # the answer is too late, or from a session that was not asked
        self._asked(answer.ask)
        if answer.holds:
            return [taken(claim) for claim in asking.claims]
        return self._vacate(asking, now)

    def _vacate(self, asking: Question, now: float) -> list[Action]:
        world = self._worlds.get(asking.world)
        current = None if world is None else world.current
        if current is not None and current.epoch == asking.epoch:
            self._drop_holder(current, asking.rank)
        actions: list[Action] = []
        for claim in asking.claims:
            actions += self._claim(claim, now)
        return actions

    def _admit(self, world: WorldClaims, claim: Claimed) -> list[Action]:
        rival = world.forming.get(claim.rank)
        if rival is not None and rival.uid != claim.uid:
            return [taken(claim)]
        world.forming[claim.rank] = claim
        self._wait(claim, rival)
        others = (c for rank, c in world.forming.items() if rank != claim.rank)
        # Comparing with one other claim suffices, because the others agree.
        other = next(others, claim)
        terms = other.size, other.terms, other.place
        if terms != (claim.size, claim.terms, claim.place):
            return self._dissolve(claim.world, mismatch(world.forming))
        if len(world.forming) < claim.size:
            return [*self._notify(claim, is_gone=False)]
        claims = [world.forming[rank] for rank in sorted(world.forming)]
        for each in claims:
            self._deadlines.drop(wait_key(each))
        world.forming = {}
        seen = max(claim.seen for claim in claims)
        return self._complete(world, claims, claim.fresh_nonce, seen)

    def _complete(
        self,
        world: WorldClaims,
        claims: Sequence[Claimed | ReformClaim],
        nonce: int,
        seen: int,
    ) -> list[Action]:
        name, place = claims[0].world, claims[0].place
        epoch = next_epoch(max(self._highest.get(name, 0), seen), place)
        self._highest[name] = epoch
        ranks = enumerate(claims)
        holders = {
            rank: Holder(claim.uid, claim.session, claim.request)
            for rank, claim in ranks
        }
        first = claims[0]
        reforms = first.epoch if isinstance(first, ReformClaim) else None
        self._drop_holders(world)
        world.current = Current(epoch, holders, reforms, len(claims))
        for rank, claim in enumerate(claims):
            self._add_rank(claim.session, name, rank)
        self._void.pop(name, None)
        members = tuple(claim.member.at(rank) for rank, claim in enumerate(claims))
        outcome = Admitted(epoch, nonce, members)
        actions = [*self._forget(name), Remember(name, epoch)]
        if world.reforming is not None:
            # The survivors that wait to reform are not in this incarnation.
            actions += self._outdated(world.reforming, epoch)
            world.reforming = None
        self._prefixes[name] = key_prefix(name, epoch, nonce)
        actions += (reply(claim, outcome) for claim in claims)
        # The new members do not know yet which claims wait.
        for waiting in world.forming.values():
            actions += self._notify(waiting, is_gone=False)
        return actions

    def _notify(self, claim: Claimed, *, is_gone: bool) -> list[Send]:
        """Notify the holders of the living incarnation that a claim waits."""
        world = self._worlds.get(claim.world)
        current = None if world is None else world.current
        if current is None or world is None:
            return []
        if any(holder.uid == claim.uid for holder in current.holders.values()):
            # The claim is from a member that grows the world, not from a newcomer.
            return []
        note = NewcomerWaits(
            claim.world, current.epoch, claim.rank, claim.size, is_gone
        )
        waiting = {each.uid for each in world.forming.values()}
        return [
            Send(holder.session, note)
            for holder in current.holders.values()
            if holder.uid not in waiting
        ]

    # Reforming, and recovery after a restart of the store.

    def _reform(self, claim: ReformClaim) -> list[Action]:
        world = self._worlds.setdefault(claim.world, WorldClaims())
        current = self._highest.get(claim.world, 0)
        if current > claim.epoch and self._void.get(claim.world) != claim.epoch:
            return [*self._tidy(claim.world), stale(claim, current)]
        actions: list[Action] = []
        reform = world.reforming
        if reform is None or reform.epoch < claim.epoch:
            # A store that has lost its state learns the epoch from the survivors'
            # claims.
            self._highest[claim.world] = max(current, claim.epoch)
            if reform is not None:
                actions += self._outdated(reform, claim.epoch)
            reform = world.reforming = Reform(claim.epoch, claim.size)
        return [*actions, *self._add_survivor(world, reform, claim)]

    def _outdated(self, reform: Reform, epoch: int) -> list[Action]:
        late = list(reform.claims.values())
        for claim in late:
            self._deadlines.drop(wait_key(claim))
        return [stale(claim, epoch) for claim in late]

    def _add_survivor(
        self, world: WorldClaims, reform: Reform, claim: ReformClaim
    ) -> list[Action]:
        if claim.rank in reform.lost:
            return [stale(claim, claim.epoch)]
        other = next(iter(reform.claims.values()), claim)
        if other.terms != claim.terms:
            return [reply(claim, TermsDiffer(claim.terms))]
        self._wait(claim, reform.claims.get(claim.rank))
        reform.claims[claim.rank] = claim
        return self._settle(world)

    def _settle(self, world: WorldClaims) -> list[Action]:
        reform = world.reforming
        if reform is None or not reform.is_settled:
            return []
        world.reforming = None
        claims = reform.members()
        for claim in claims:
            self._deadlines.drop(wait_key(claim))
        nonce = claims[-1].fresh_nonce
        return self._complete(world, claims, nonce, reform.epoch)

    def _announced(self, session: SessionKey, announced: Announce) -> list[Action]:
        name, epoch = announced.world, announced.epoch
        if not self._is_credible(name, epoch):
            return []
        self._highest[name] = max(self._highest.get(name, 0), epoch)
        world = self._worlds.setdefault(name, WorldClaims())
        if world.current is None or world.current.epoch < epoch:
            self._drop_holders(world)
            world.current = Current(epoch, {})
        if world.current.epoch > epoch:
            return []
        holder = world.current.holders.get(announced.rank)
        if holder is None or holder.uid == announced.uid:
            self._drop_holder(world.current, announced.rank)
            world.current.holders[announced.rank] = Holder(announced.uid, session)
            self._add_rank(session, name, announced.rank)
        actions: list[Action] = [Remember(name, self._highest[name])]
        for claim in world.forming.values():
            notes = self._notify(claim, is_gone=False)
            actions += (note for note in notes if note.session == session)
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
            self._deadlines.drop(wait_key(claim))
            actions += self._notify(claim, is_gone=True)
            actions.append(reply(claim, outcome))
        return actions

    # Departures.

    def _leave(self, session: SessionKey, left: Leave) -> list[Action]:
        world = self._worlds.get(left.world)
        if world is None or world.current is None or world.current.epoch != left.epoch:
            return []
        holder = world.current.holders.get(left.rank)
        if holder is not None and holder.session == session:
            for rank in (left.rank, *left.lost):
                self._drop_holder(world.current, rank)
        return self._tidy(left.world)

    def _tidy(self, name: str) -> list[Action]:
        """Drop an incarnation that no session holds any more, but keep its epoch."""
        world = self._worlds.get(name)
        if world is None or world.waits:
            return []
        if world.asking or (world.current is not None and world.current.holders):
            return []
        del self._worlds[name]
        self._sessions.forget_world(name, world.sessions)
        return self._forget(name)

    def _withdraw(self, key: SessionKey, request: RequestKey) -> list[Action]:
        name = self._sessions.forget(key, request)
        world = None if name is None else self._worlds.get(name)
        if name is None or world is None:
            return []
        actions: list[Action] = []
        for rank in self._sessions.ranks(key, name):
            actions += self._drop_claims(world, rank, key, request)
        actions += self._settle(world)
        actions += self._abandon(name, key, request)
        return [*actions, *self._tidy(name)]

    def _abandon(
        self, name: str, session: SessionKey, request: RequestKey
    ) -> list[Action]:
        """Notify the holders that a member withdrew its claim during its admission."""
        current = self._worlds[name].current
        holders = {} if current is None else current.holders
        for rank, holder in list(holders.items()):
            if current is not None and (holder.session, holder.request) == (
                session,
                request,
            ):
                self._drop_holder(current, rank)
                current.members -= 1
                # If no member stayed in that incarnation, the previous one may reform.
                if not current.members and current.reforms is not None:
                    self._void[name] = current.reforms
                note = MemberGaveUp(name, current.epoch, rank)
                others = current.holders.values()
                return [Send(other.session, note) for other in others]
        return []

    def _drop_claims(
        self,
        world: WorldClaims,
        rank: int,
        session: SessionKey,
        request: RequestKey | None,
    ) -> list[Action]:
        """Remove a session's claims on a rank; ``request`` selects one of them."""

        def is_dropped(claim: Claimed | ReformClaim | None) -> bool:
            if claim is None or claim.session != session:
                return False
            return request in (None, claim.request)

        if rank in world.asking:
            asking = self._asking[world.asking[rank]]
            asking.claims = [c for c in asking.claims if not is_dropped(c)]
        actions: list[Action] = []
        claim = world.forming.get(rank)
        if claim is not None and is_dropped(claim):
            del world.forming[rank]
            self._deadlines.drop(wait_key(claim))
            actions += self._notify(claim, is_gone=True)
        reform = world.reforming
        survivor = None if reform is None else reform.claims.get(rank)
        if reform is not None and survivor is not None and is_dropped(survivor):
            del reform.claims[rank]
            self._deadlines.drop(wait_key(survivor))
            if not reform.claims:
                world.reforming = None
        return actions

    def _session_ended(self, key: SessionKey, now: float) -> list[Action]:
        actions: list[Action] = []
        for name, ranks in self._sessions.end(key).items():
            world = self._worlds[name]
            world.sessions.discard(key)
            for rank in ranks:
                actions += self._drop_claims(world, rank, key, None)
            actions += self._settle(world)
            holders = {} if world.current is None else world.current.holders
            for rank in ranks:
                if rank in holders and holders[rank].session == key:
                    del holders[rank]
            for ask in list(world.asking.values()):
                if self._holder_is_gone(self._asking[ask]):
                    actions += self._vacate(self._asked(ask), now)
            actions += self._tidy(name)
        return actions

    def _holder_is_gone(self, asking: Question) -> bool:
        world = self._worlds.get(asking.world)
        current = None if world is None else world.current
        if current is None or current.epoch != asking.epoch:
            return True
        return asking.rank not in current.holders

    def _tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for ask in self._ask_deadlines.take_due(now):
            actions += self._vacate(self._asked(ask), now)
        due = self._deadlines.take_due(now)
        for name in dict.fromkeys(name for name, _, _ in due):
            world = self._worlds[name]
            actions += self._expire(world, now)
            actions += expired_survivors(world, now)
            actions += self._tidy(name)
        return actions

    def _expire(self, world: WorldClaims, now: float) -> list[Action]:
        late = [claim for claim in world.forming.values() if claim.deadline <= now]
        present = sorted(world.forming)
        actions: list[Action] = []
        for claim in late:
            del world.forming[claim.rank]
            actions += self._notify(claim, is_gone=True)
            missing = [rank for rank in range(claim.size) if rank not in present]
            actions.append(timed_out(claim, present, missing))
        return actions
