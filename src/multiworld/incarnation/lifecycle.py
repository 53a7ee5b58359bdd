"""State machine of one incarnation of a world. Pure.

A broken or closed world never becomes ready again. The first breakage gives the reason;
later ones only add lost members. Once a member has left gracefully, nothing that
happens to it breaks the world.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from multiworld.errors import MemberLostError, StaleEpochError, WorldBrokenError
from multiworld.incarnation import events


class Phase(enum.Enum):
    JOINING = "joining"
    READY = "ready"
    BROKEN = "broken"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakage:
    """Cause of a broken world."""

    reason: str
    evidence: str = ""  # the observation that led to the verdict
    # The first member that was lost; None if no member is known to be lost.
    rank: int | None = None
    silent_s: float = 0.0  # since the lost member's last sign of life
    has_ended: bool = False  # True if the lost member's connection has ended
    lost: frozenset[int] = frozenset()
    is_stale: bool = False  # True if the other members declared this process lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """State of an incarnation, as one member sees it."""

    world: str
    epoch: int
    rank: int
    size: int
    phase: Phase = Phase.JOINING
    # Includes members that closed the world because it was broken.
    left: frozenset[int] = frozenset()
    # Ranks whose data connection ended gracefully; their ``Left`` message may still be
    # on its way.
    finished: frozenset[int] = frozenset()
    # Ranks that closed the world as broken before this member knew of the breakage.
    closed_as_broken: frozenset[int] = frozenset()
    breakage: Breakage | None = None

    @property
    def is_over(self) -> bool:
        """True once the incarnation can carry no more traffic."""
        return self.phase in (Phase.BROKEN, Phase.CLOSED)

    @property
    def gone(self) -> frozenset[int]:
        """Ranks whose departure an operation may already have noticed."""
        lost = frozenset() if self.breakage is None else self.breakage.lost
        return self.left | (self.finished - lost)

    def error(self, cause: Breakage) -> WorldBrokenError:
        """Return a new error each time: a shared one would mix up tracebacks."""
        if cause.is_stale:
            return StaleEpochError(
                self.world,
                cause.reason,
                evidence=cause.evidence,
                seen=self.epoch,
                expected=self.epoch + 1,
                lost=cause.lost,
            )
        if cause.rank is None:
            return WorldBrokenError(
                self.world,
                cause.reason,
                epoch=self.epoch,
                evidence=cause.evidence,
                lost=cause.lost,
            )
        return MemberLostError(
            self.world,
            cause.reason,
            rank=cause.rank,
            silent_s=cause.silent_s,
            has_ended=cause.has_ended,
            epoch=self.epoch,
            evidence=cause.evidence,
            lost=cause.lost,
        )


# Happenings: the inputs of the state machine.


@dataclass(frozen=True, slots=True)
class Opened:
    """Every member is connected to every other."""


@dataclass(frozen=True, slots=True)
class SaidLeft:
    """A member announced that it leaves; ``is_broken`` if its world is broken."""

    rank: int
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A member's data connection delivered its last message: the member is leaving."""

    # From now on, operations that need this member fail, so ``Life.gone`` must include
    # it. Everything else waits for the member's ``Left``, which arrives after its
    # earlier control messages.
    rank: int


@dataclass(frozen=True, slots=True)
class WasLost:
    """A member was declared lost."""

    rank: int
    reason: str
    evidence: str = ""
    silent_s: float = 0.0
    # None: this process's watchdog declared the member lost.
    reported_by: int | None = None
    has_ended: bool = False  # True if the member's connection has ended


@dataclass(frozen=True, slots=True)
class WasAccused:
    """Member ``by`` declared this living process lost, and the others continue."""

    by: int
    reason: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The world failed, but no member is known to be lost."""

    reason: str
    evidence: str = ""
    reported_by: int | None = None  # None: this process noticed the failure


@dataclass(frozen=True, slots=True)
class CloseAsked:
    """The program asked to leave the world."""


Happening = Opened | SaidLeft | Finished | WasLost | WasAccused | Failed | CloseAsked


# Actions: the outputs of the state machine.


@dataclass(frozen=True, slots=True)
class FailOperations:
    """Fail every pending operation and free the incarnation's resources."""


@dataclass(frozen=True, slots=True)
class FailMember:
    """Fail the pending operations that need this member."""

    rank: int


@dataclass(frozen=True, slots=True)
class EndMember:
    """Fail receives from a member that left, because nothing more arrives from it."""

    rank: int


@dataclass(frozen=True, slots=True)
class TellBroken:
    """Send the verdict to the other members."""

    breakage: Breakage


@dataclass(frozen=True, slots=True)
class TellLeft:
    """Notify the other members that this one leaves."""

    is_broken: bool = False  # whether this member's world is broken


@dataclass(frozen=True, slots=True)
class Publish:
    event: events.Event


Action = FailOperations | FailMember | EndMember | TellBroken | TellLeft | Publish


def handle(life: Life, happening: Happening) -> tuple[Life, tuple[Action, ...]]:
    """Return the next state and the actions, in the order to carry them out."""
    match happening:
        case Opened():
            return _opened(life)
        case SaidLeft(rank, is_broken):
            return (
                _closed_as_broken(life, rank) if is_broken else _said_left(life, rank)
            )
        case Finished(rank):
            return _finished(life, rank), ()
        case WasLost():
            return _was_lost(life, happening)
        case WasAccused():
            return _was_accused(life, happening)
        case Failed():
            return _failed(life, happening)
        case CloseAsked():
            return _close_asked(life)


def _opened(life: Life) -> tuple[Life, tuple[Action, ...]]:
    if life.phase is not Phase.JOINING:
        return life, ()
    ready = events.WorldReady(
        world=life.world, epoch=life.epoch, rank=life.rank, size=life.size
    )
    return replace(life, phase=Phase.READY), (Publish(ready),)


def _closed_as_broken(life: Life, rank: int) -> tuple[Life, tuple[Action, ...]]:
    """Record that a member closed a broken world: ``reform`` need not wait for it."""
    # This is neither a graceful leave nor a verdict. The reason comes from the member
    # that broke the world.
    if life.phase is Phase.CLOSED or not _is_other(life, rank):
        return life, ()
    if life.phase is Phase.BROKEN:
        return replace(life, left=life.left | {rank}), ()
    return replace(life, closed_as_broken=life.closed_as_broken | {rank}), ()


def _said_left(life: Life, rank: int) -> tuple[Life, tuple[Action, ...]]:
    if life.is_over or rank in life.left or not _is_other(life, rank):
        return life, ()
    event = events.MemberLeft(world=life.world, epoch=life.epoch, rank=rank)
    life = replace(life, left=life.left | {rank})
    return life, (FailMember(rank), Publish(event))


def _finished(life: Life, rank: int) -> Life:
    if life.is_over or not _is_other(life, rank):
        return life
    return replace(life, finished=life.finished | {rank})


def _was_lost(life: Life, loss: WasLost) -> tuple[Life, tuple[Action, ...]]:
    is_silent = loss.reported_by is None and not loss.has_ended
    if loss.rank in life.left and is_silent and not life.is_over:
        # The member's last messages may never arrive.
        return life, (EndMember(loss.rank),)
    is_closed = life.phase is Phase.CLOSED
    if is_closed or loss.rank in life.left or not _is_other(life, loss.rank):
        return life, ()
    if life.breakage is not None:
        return _lost_too(life, life.breakage, loss)
    breakage = _breakage_of(loss)
    life, actions = _break(life, breakage)
    return life, (*actions[:-1], Publish(_lost_event(life, loss)), actions[-1])


def _lost_too(
    life: Life, first: Breakage, loss: WasLost
) -> tuple[Life, tuple[Action, ...]]:
    if loss.rank in first.lost:
        return life, ()
    life = replace(life, breakage=replace(first, lost=first.lost | {loss.rank}))
    event = Publish(_lost_event(life, loss))
    if loss.reported_by is not None:
        return life, (event,)
    return life, (TellBroken(_breakage_of(loss)), event)


def _breakage_of(loss: WasLost) -> Breakage:
    return Breakage(
        reason=f"rank {loss.rank} was lost: {loss.reason}",
        evidence=loss.evidence,
        rank=loss.rank,
        silent_s=loss.silent_s,
        has_ended=loss.has_ended,
        lost=frozenset({loss.rank}),
    )


def _lost_event(life: Life, loss: WasLost) -> events.MemberLost:
    return events.MemberLost(
        world=life.world,
        epoch=life.epoch,
        rank=loss.rank,
        reason=loss.reason,
        evidence=loss.evidence,
        silent_s=loss.silent_s,
    )


def _was_accused(life: Life, accusation: WasAccused) -> tuple[Life, tuple[Action, ...]]:
    if life.is_over or not _is_other(life, accusation.by):
        return life, ()
    breakage = Breakage(
        reason=f"rank {accusation.by} declared this process lost: {accusation.reason}",
        evidence=accusation.evidence,
        lost=frozenset({life.rank}),
        is_stale=True,
    )
    life, actions = _break(life, breakage)
    # Do not send ``TellBroken``: the accuser has already notified the others, and a
    # message from this process would contradict it.
    return life, actions[1:]


def _failed(life: Life, failure: Failed) -> tuple[Life, tuple[Action, ...]]:
    if life.is_over:
        return life, ()
    return _break(life, Breakage(reason=failure.reason, evidence=failure.evidence))


def _break(life: Life, breakage: Breakage) -> tuple[Life, tuple[Action, ...]]:
    event = events.WorldBroken(
        world=life.world,
        epoch=life.epoch,
        reason=breakage.reason,
        evidence=breakage.evidence,
        lost=breakage.lost,
    )
    left = life.left | life.closed_as_broken
    life = replace(life, phase=Phase.BROKEN, breakage=breakage, left=left)
    # Notify the others before closing anything: a member that sees a connection end
    # without a reason would declare this process lost.
    return life, (TellBroken(breakage), FailOperations(), Publish(event))


def _close_asked(life: Life) -> tuple[Life, tuple[Action, ...]]:
    if life.phase is Phase.CLOSED:
        return life, ()
    event = Publish(events.WorldClosed(world=life.world, epoch=life.epoch))
    closed = replace(life, phase=Phase.CLOSED)
    if life.phase is Phase.JOINING:
        # Report a failure, not a graceful leave, because the other members still wait
        # for this one.
        reason = f"rank {life.rank} gave up while joining"
        breakage = Breakage(reason=reason)
        return closed, (TellBroken(breakage), event)
    return closed, (TellLeft(is_broken=life.phase is Phase.BROKEN), event)


def _is_other(life: Life, rank: int) -> bool:
    return 0 <= rank < life.size and rank != life.rank
