"""The life of one incarnation of a world. Pure.

``handle(life, happening)`` takes what the world is and what happened, and returns what
the world is now and what is to be done about it. Invariants: a world that is broken or
closed never becomes ready again; the first breakage gives the reason, later ones only
add to who is lost; nothing that concerns a member that left politely breaks a world.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from multiworld.errors import MemberLostError, StaleEpochError, WorldBrokenError
from multiworld.incarnation.events import (
    Event,
    MemberLeft,
    MemberLost,
    MemberResumed,
    MemberStalled,
    WorldBroken,
    WorldClosed,
    WorldReady,
)


class Phase(enum.Enum):
    """Where an incarnation stands."""

    JOINING = "joining"
    READY = "ready"
    BROKEN = "broken"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakage:
    """Why a world is broken; makes a fresh error for each operation that fails."""

    world: str
    epoch: int
    reason: str
    evidence: str = ""
    rank: int | None = None
    silent_s: float = 0.0
    lost: frozenset[int] = frozenset()
    is_stale: bool = False

    def error(self) -> WorldBrokenError:
        """Return a new error; sharing one would mix up tracebacks."""
        if self.is_stale:
            return StaleEpochError(
                self.world,
                self.reason,
                evidence=self.evidence,
                seen=self.epoch,
                expected=self.epoch + 1,
                lost=self.lost,
            )
        if self.rank is None:
            return WorldBrokenError(
                self.world,
                self.reason,
                epoch=self.epoch,
                evidence=self.evidence,
                lost=self.lost,
            )
        return MemberLostError(
            self.world,
            self.reason,
            rank=self.rank,
            silent_s=self.silent_s,
            epoch=self.epoch,
            evidence=self.evidence,
            lost=self.lost,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What an incarnation is, as one member sees it."""

    world: str
    epoch: int
    rank: int
    size: int
    phase: Phase = Phase.JOINING
    left: frozenset[int] = frozenset()
    finished: frozenset[int] = frozenset()
    """Whose last message came before the word that they leave."""
    deserted: frozenset[int] = frozenset()
    """Who closed it as broken before this member knew that it is."""
    breakage: Breakage | None = None

    @property
    def is_over(self) -> bool:
        """True once the incarnation can carry no more traffic."""
        return self.phase in (Phase.BROKEN, Phase.CLOSED)

    @property
    def gone(self) -> frozenset[int]:
        """Who has left politely, as far as an operation could have found out."""
        lost = frozenset() if self.breakage is None else self.breakage.lost
        return self.left | (self.finished - lost)


# What can happen.


@dataclass(frozen=True, slots=True)
class Opened:
    """Every member is connected to every other."""


@dataclass(frozen=True, slots=True)
class SaidLeft:
    """A member told that it leaves; ``is_broken``: a world that is broken to it."""

    rank: int
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A data connection brought a member's last message: it is about to leave.

    Operations fail for it from here on, so ``Life.gone`` must name it. What else its
    leaving asks for waits for its word, which what it told before comes ahead of.
    """

    rank: int


@dataclass(frozen=True, slots=True)
class WasLost:
    """The own watchdog, or a member that was first to know, gave a verdict."""

    rank: int
    reason: str
    evidence: str = ""
    silent_s: float = 0.0
    told_by: int | None = None


@dataclass(frozen=True, slots=True)
class WasAccused:
    """A member declared this process lost. It lives, and must not go on here: the
    others go on without it."""

    by: int
    reason: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Stalls:
    """The event loop of a member gives no sign, though its process runs."""

    rank: int
    stalled_s: float
    evidence: str


@dataclass(frozen=True, slots=True)
class Resumes:
    """The event loop of a stalled member turns again."""

    rank: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The world failed without a member to blame."""

    reason: str
    evidence: str = ""
    told_by: int | None = None


@dataclass(frozen=True, slots=True)
class CloseAsked:
    """This process wants to leave."""


Happening = (
    Opened
    | SaidLeft
    | Finished
    | WasLost
    | WasAccused
    | Stalls
    | Resumes
    | Failed
    | CloseAsked
)


# What is to be done.


@dataclass(frozen=True, slots=True)
class FailOperations:
    """Fail everything pending, and free what the incarnation holds."""

    breakage: Breakage


@dataclass(frozen=True, slots=True)
class FailMember:
    """Fail what only this member could have completed."""

    rank: int


@dataclass(frozen=True, slots=True)
class TellBroken:
    """Tell the other members the verdict."""

    breakage: Breakage


@dataclass(frozen=True, slots=True)
class TellLeft:
    """Tell the other members that this one leaves; ``is_broken``: a broken world."""

    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Publish:
    """Report to whoever reads the manager's events."""

    event: Event


Action = FailOperations | FailMember | TellBroken | TellLeft | Publish


def handle(life: Life, happening: Happening) -> tuple[Life, tuple[Action, ...]]:
    """Return the next state and the actions, in the order to carry them out."""
    match happening:
        case Opened():
            return _opened(life)
        case SaidLeft(rank, is_broken):
            return _deserted(life, rank) if is_broken else _said_left(life, rank)
        case Finished(rank):
            return _finished(life, rank), ()
        case WasLost():
            return _was_lost(life, happening)
        case WasAccused():
            return _was_accused(life, happening)
        case Stalls(rank, stalled_s, evidence):
            return _noticed(
                life, MemberStalled, rank, stalled_s=stalled_s, evidence=evidence
            )
        case Resumes(rank):
            return _noticed(life, MemberResumed, rank)
        case Failed():
            return _failed(life, happening)
        case CloseAsked():
            return _close_asked(life)


def _opened(life: Life) -> tuple[Life, tuple[Action, ...]]:
    if life.phase is not Phase.JOINING:
        return life, ()
    ready = WorldReady(
        world=life.world, epoch=life.epoch, rank=life.rank, size=life.size
    )
    return replace(life, phase=Phase.READY), (Publish(ready),)


def _deserted(life: Life, rank: int) -> tuple[Life, tuple[Action, ...]]:
    """It will not go on from here: whoever reforms need not wait for it.

    No polite leave, and no verdict: whoever broke the world tells why.
    """
    if life.phase is Phase.CLOSED or not _is_other(life, rank):
        return life, ()
    if life.phase is Phase.BROKEN:
        return replace(life, left=life.left | {rank}), ()
    return replace(life, deserted=life.deserted | {rank}), ()


def _said_left(life: Life, rank: int) -> tuple[Life, tuple[Action, ...]]:
    if life.is_over or rank in life.left or not _is_other(life, rank):
        return life, ()
    event = MemberLeft(world=life.world, epoch=life.epoch, rank=rank)
    life = replace(life, left=life.left | {rank})
    return life, (FailMember(rank), Publish(event))


def _finished(life: Life, rank: int) -> Life:
    if life.is_over or not _is_other(life, rank):
        return life
    return replace(life, finished=life.finished | {rank})


def _was_lost(life: Life, loss: WasLost) -> tuple[Life, tuple[Action, ...]]:
    if rank_is_irrelevant(life, loss.rank):
        return life, ()
    if life.breakage is not None:
        return _lost_too(life, life.breakage, loss)
    breakage = _breakage_of(life, loss)
    life, actions = _break(life, breakage)
    return life, (*actions[:-1], Publish(_lost_event(life, loss)), actions[-1])


def _lost_too(
    life: Life, first: Breakage, loss: WasLost
) -> tuple[Life, tuple[Action, ...]]:
    """Add to the lost of a world that is broken already."""
    if loss.rank in first.lost:
        return life, ()
    life = replace(life, breakage=replace(first, lost=first.lost | {loss.rank}))
    event = Publish(_lost_event(life, loss))
    if loss.told_by is not None:
        return life, (event,)
    return life, (TellBroken(_breakage_of(life, loss)), event)


def _breakage_of(life: Life, loss: WasLost) -> Breakage:
    return Breakage(
        world=life.world,
        epoch=life.epoch,
        reason=f"rank {loss.rank} was lost: {loss.reason}",
        evidence=loss.evidence,
        rank=loss.rank,
        silent_s=loss.silent_s,
        lost=frozenset({loss.rank}),
    )


def _lost_event(life: Life, loss: WasLost) -> MemberLost:
    return MemberLost(
        world=life.world,
        epoch=life.epoch,
        rank=loss.rank,
        reason=loss.reason,
        evidence=loss.evidence,
        silent_s=loss.silent_s,
    )


def rank_is_irrelevant(life: Life, rank: int) -> bool:
    """Tell whether losing ``rank`` now changes nothing for this incarnation."""
    return life.phase is Phase.CLOSED or rank in life.left or not _is_other(life, rank)


def _was_accused(life: Life, accusation: WasAccused) -> tuple[Life, tuple[Action, ...]]:
    if life.is_over or not _is_other(life, accusation.by):
        return life, ()
    breakage = Breakage(
        world=life.world,
        epoch=life.epoch,
        reason=f"rank {accusation.by} declared this process lost: {accusation.reason}",
        evidence=accusation.evidence,
        lost=frozenset({life.rank}),
        is_stale=True,
    )
    life, actions = _break(life, breakage)
    # The accuser has told the others; a word from the accused would only confuse them.
    return life, actions[1:]


def _noticed(
    life: Life, event: type[MemberStalled | MemberResumed], rank: int, **fields: Any
) -> tuple[Life, tuple[Action, ...]]:
    if life.phase is not Phase.READY or rank in life.left:
        return life, ()
    return life, (
        Publish(event(world=life.world, epoch=life.epoch, rank=rank, **fields)),
    )


def _failed(life: Life, failure: Failed) -> tuple[Life, tuple[Action, ...]]:
    if life.is_over:
        return life, ()
    return _break(
        life,
        Breakage(
            world=life.world,
            epoch=life.epoch,
            reason=failure.reason,
            evidence=failure.evidence,
        ),
    )


def _break(life: Life, breakage: Breakage) -> tuple[Life, tuple[Action, ...]]:
    event = WorldBroken(
        world=life.world,
        epoch=life.epoch,
        reason=breakage.reason,
        evidence=breakage.evidence,
        lost=breakage.lost,
    )
    left = life.left | life.deserted
    life = replace(life, phase=Phase.BROKEN, breakage=breakage, left=left)
    # The others are told before anything is closed: a member that sees a connection
    # end without a word would accuse this one.
    return life, (TellBroken(breakage), FailOperations(breakage), Publish(event))


def _close_asked(life: Life) -> tuple[Life, tuple[Action, ...]]:
    if life.phase is Phase.CLOSED:
        return life, ()
    event = Publish(WorldClosed(world=life.world, epoch=life.epoch))
    closed = replace(life, phase=Phase.CLOSED)
    if life.phase is Phase.JOINING:
        # The others wait for this member: to them it is no leave.
        reason = f"rank {life.rank} gave up while joining"
        breakage = Breakage(world=life.world, epoch=life.epoch, reason=reason)
        return closed, (TellBroken(breakage), event)
    return closed, (TellLeft(is_broken=life.phase is Phase.BROKEN), event)


def _is_other(life: Life, rank: int) -> bool:
    return 0 <= rank < life.size and rank != life.rank
