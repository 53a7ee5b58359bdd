"""This process's member of one incarnation: joining, health, closing. As a
``WorldPort`` and a ``WorldView``, it carries out what ``lifecycle`` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from multiworld.backends import make_backend
from multiworld.backends.base import Lingering
from multiworld.errors import MemberLeftError, UsedAfterForkError, WorldClosedError
from multiworld.incarnation import lifecycle
from multiworld.incarnation.events import (
    Event,
    MemberResumed,
    MemberStalled,
    MemberWaiting,
)
from multiworld.incarnation.lifecycle import Phase
from multiworld.liveness import failure_detector as detector
from multiworld.liveness import manager_messages as control
from multiworld.liveness.watchdog import WatchDog
from multiworld.net.streams import Stream
from multiworld.rendezvous.membership import Incarnation
from multiworld.rendezvous.store_address import StoreAddress
from multiworld.world.join_request import JoinRequest

T = TypeVar("T")

# Seconds in which the control link must report why a data connection failed. If the
# peer's process died, both connections ended together, so the report only has to be
# read.
LINK_GRACE_S = 1.0

# Maximum seconds to wait for data that a lost member on another host has sent: the end
# of the control link may overtake it.
ENDING_S = 1.0

logger = logging.getLogger("multiworld")


def _nothing(_: LocalMember) -> None:
    """Do nothing at the end of an incarnation."""


@dataclass(slots=True, kw_only=True)
class ManagerServices:
    """Services that a manager gives each of its worlds."""

    watchdog: WatchDog
    publish: Callable[[Event], None]
    # Keeps a connection that must stay open after its world is closed.
    linger: Callable[[Lingering], None]
    closing: set[asyncio.Task[None]]  # tasks that close incarnations in the background
    # Called when an incarnation can carry no more traffic.
    over: Callable[[LocalMember], None] = _nothing
    # Called when an incarnation is closed after ``over`` was called.
    closed: Callable[[LocalMember], None] = _nothing


class LocalMember:
    """This process's member of one incarnation, which ``store`` admitted."""

    def __init__(
        self,
        incarnation: Incarnation,
        request: JoinRequest,
        store: StoreAddress,
        services: ManagerServices,
    ) -> None:
        self.incarnation, self.request, self.rank = incarnation, request, request.rank
        self.config, self.device = request.config, request.device
        self.store, self.linger = store, services.linger
        self._services, self._watchdog = services, services.watchdog
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._loop.time()
        self._life = lifecycle.Life(
            world=incarnation.world,
            epoch=incarnation.epoch,
            rank=self.rank,
            size=incarnation.size,
        )
        self.security = services.watchdog.security
        self._changed = asyncio.Event()
        self._is_superseded = False
        self.waiting: dict[int, int] = {}  # newcomer's rank -> the size it expects
        self._over = self._loop.create_future()
        self._ready_ranks = {self.rank}
        self._grace: dict[int | None, asyncio.TimerHandle] = {}
        # Lost members, by rank: each loss is reported once the member's last data has
        # arrived.
        self._ending: dict[int, tuple[lifecycle.WasLost, asyncio.TimerHandle]] = {}
        self._is_forked = False
        self.backend_name = request.backend
        self.backend = make_backend(request.backend, self)

    @property
    def phase(self) -> Phase:
        return self._life.phase

    @property
    def age_s(self) -> float:
        """Seconds since its admission."""
        return self._loop.time() - self._begun_at

    @property
    def is_broken(self) -> bool:
        return self._life.phase is Phase.BROKEN

    @property
    def left(self) -> frozenset[int]:
        return self._life.gone

    def silent_s(self, rank: int) -> float:
        """Return the seconds since a member's last sign of life; 0 for this member."""
        members = self.incarnation.members
        if rank == self.rank:
            return 0.0
        return self._watchdog.silent_s(members[self.rank], members[rank])

    @property
    def lost(self) -> frozenset[int]:
        breakage = self._life.breakage
        return frozenset() if breakage is None else breakage.lost

    @property
    def is_stale(self) -> bool:
        """True if the others declared this member lost."""
        breakage = self._life.breakage
        return breakage is not None and breakage.is_stale

    async def wait_more_lost(self, known: frozenset[int]) -> None:
        """Wait until a member outside ``known`` is lost or has left."""
        await self._until(lambda: not self.lost | self.left <= known)

    async def wait_gone(self, rank: int) -> None:
        await self._until(lambda: self._life.is_over or rank in self.left)

    async def wait_incomplete(self) -> None:
        await self._until(lambda: self._life.is_over or bool(self.left))

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def member_waits(self, rank: int, size: int, *, is_gone: bool) -> None:
        """Publish that a newcomer waits for the next incarnation, or has given up."""
        if is_gone:
            self.waiting.pop(rank, None)
        else:
            self.waiting[rank] = size
        where = self.incarnation
        self._publish(
            MemberWaiting(
                world=where.world,
                epoch=where.epoch,
                rank=rank,
                size=size,
                is_gone=is_gone,
            )
        )

    def supersede(self) -> None:
        """Stop publishing events: a newer incarnation has replaced this one."""
        self._is_superseded = True

    def _publish(self, event: Event) -> None:
        if not self._is_superseded:
            self._services.publish(event)

    async def wait_over(self) -> None:
        await asyncio.shield(self._over)

    def has_message(self, src: int | None, tag: int) -> bool:
        return not self._is_forked and self.backend.has_message(src, tag)

    def check(self) -> None:
        """Raise this world's error unless traffic may flow."""
        if self._is_forked:
            raise self._forked_error()
        if self._life.phase is not Phase.READY:
            raise self.broken_error()

    # Joining.

    async def open(self) -> None:
        """Connect to every member and wait for all; if cancelled, call ``close``."""
        config = self.config
        limits = detector.DetectionLimits(
            config.silence_s, config.stall_s, config.stalled_limit_s
        )
        attaching = self._watchdog.attach(self.incarnation, self.rank, self, limits)
        await self.until_over(attaching)
        await self.until_over(self.backend.open())
        self._tell_all(control.Ready(self.incarnation.nonce))
        size = self.incarnation.size
        await self.until_over(self._until(lambda: len(self._ready_ranks) == size))
        if self._life.is_over:
            raise self.broken_error()
        self.report(lifecycle.Opened())

    @property
    def unlinked(self) -> tuple[int, ...]:
        """Ranks that this member has no link to."""
        linked = self._watchdog.linked(self.incarnation.nonce)
        return tuple(rank for rank in self._others() if rank not in linked)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that the join waits for: those without a link, else those not ready."""
        size = self.incarnation.size
        unready = tuple(r for r in range(size) if r not in self._ready_ranks)
        return self.unlinked or unready

    async def until_over(self, step: Coroutine[Any, Any, T]) -> T:
        """Await ``step``; if the world ends first, cancel it and raise the reason."""
        task = self._loop.create_task(step, name=f"multiworld join {self._life.world}")
        try:
            await asyncio.wait((task, self._over), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        raise self.broken_error()

    # The end.

    async def close(self) -> None:
        """Leave gracefully; wait up to ``close_s`` for sent data, unless cancelled."""
        if self._is_forked:
            return
        self.report(lifecycle.CloseAsked())
        if self._over.done():
            self._free()
            self._services.closed(self)
            return
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.close_s):
                    await self.backend.close()
        finally:
            self._free()

    def close_nowait(self) -> None:
        """Leave gracefully, without waiting for data that the network has not taken."""
        if self._is_forked:
            # This is a forked child, and the shared memory belongs to its parent.
            return
        self.report(lifecycle.CloseAsked())
        is_over = self._over.done()
        self._free()
        if is_over:
            self._services.closed(self)

    def abandon_after_fork(self) -> None:
        """Make every operation fail in this forked child's copy."""
        self._is_forked = True

    def _end_data(self) -> None:
        """Close the data connections; safe to repeat."""
        if self._over.done():
            return
        self._over.set_result(None)
        for rank in list(self._grace):
            self._cancel_grace(rank)
        # Keep the control links, by which a broken world learns of further lost
        # members.
        self.backend.close_nowait()
        self._services.over(self)

    def _free(self) -> None:
        """Close the data connections and detach from the links; safe to repeat."""
        self._end_data()
        self.backend.drop_messages()
        self._watchdog.detach(self.incarnation.nonce)

    # WorldPort: calls from the watchdog.

    def on_message(self, rank: int, message: control.WorldMessage) -> None:
        match message:
            case control.Ready():
                self._ready_ranks.add(rank)
                self._changed.set()
            case control.Left(is_broken=is_broken):
                self.report(lifecycle.SaidLeft(rank, is_broken))
            case control.Broken():
                self._on_broken(rank, message)
            case control.OpenLane() | control.EndCollectives():
                if not self._life.is_over:
                    self.backend.on_message(rank, message)

    def _on_broken(self, rank: int, message: control.Broken) -> None:
        if message.rank is None:
            self.report(
                lifecycle.Failed(message.reason, message.evidence, reported_by=rank)
            )
            return
        reason = message.reason.removeprefix(f"rank {message.rank} was lost: ")
        if message.rank == self.rank:
            self.report(lifecycle.WasAccused(rank, reason, message.evidence))
            return
        evidence = f"reported by rank {rank}: {message.evidence}"
        self._report_loss(
            lifecycle.WasLost(
                message.rank,
                reason,
                evidence,
                message.silent_s,
                reported_by=rank,
                has_ended=message.has_ended,
            )
        )

    def on_finding(self, rank: int, finding: detector.Finding) -> None:
        match finding:
            case detector.Verdict():
                self._report_loss(
                    lifecycle.WasLost(
                        rank,
                        finding.reason,
                        finding.evidence,
                        finding.silent_s,
                        has_ended=finding.has_ended,
                    )
                )
            case detector.Stalled() | detector.Resumed():
                if self.phase is Phase.READY and rank not in self._life.left:
                    self._publish(self._stall_event(rank, finding))

    def _stall_event(
        self, rank: int, finding: detector.Stalled | detector.Resumed
    ) -> MemberStalled | MemberResumed:
        world, epoch = self._life.world, self._life.epoch
        if isinstance(finding, detector.Resumed):
            return MemberResumed(world=world, epoch=epoch, rank=rank)
        return MemberStalled(
            world=world,
            epoch=epoch,
            rank=rank,
            stalled_s=finding.stalled_s,
            evidence=detector.describe_thread(finding.is_computing),
        )

    def _report_loss(self, loss: lifecycle.WasLost) -> None:
        """Report a loss once the member's data still in the network has arrived."""
        rank = loss.rank
        if rank in self._ending:
            return
        waits = loss.has_ended and self.phase is Phase.READY and rank not in self.left
        if waits and self.backend.is_arriving(rank):
            timer = self._loop.call_later(ENDING_S, self._ending_over, rank)
            self._ending[rank] = loss, timer
            self._cancel_grace(rank)
        else:
            self.report(loss)

    def _ending_over(self, rank: int) -> None:
        loss, timer = self._ending.pop(rank)
        timer.cancel()
        self.report(loss)

    # Deciding and acting.

    def report(self, happening: lifecycle.Happening) -> None:
        """Pass a happening to ``lifecycle`` and carry out the resulting actions."""
        self._life, actions = lifecycle.handle(self._life, happening)
        self._changed.set()
        for action in actions:
            match action:
                case lifecycle.Publish(event):
                    self._publish(event)
                case lifecycle.FailMember(rank):
                    self._cancel_grace(rank)
                    # A failed connection whose member is unknown may be the connection
                    # to this member.
                    self._cancel_grace(None)
                    self.backend.member_left(rank)
                case lifecycle.EndMember(rank):
                    self.backend.member_ended(rank)
                case lifecycle.FailOperations():
                    self._abort()
                    self._end_data()
                    self._watchdog.retire(self.incarnation.nonce)
                case lifecycle.TellBroken(breakage):
                    self._tell_all(
                        control.Broken(
                            self.incarnation.nonce,
                            breakage.rank,
                            _as_unicode(breakage.reason),
                            _as_unicode(breakage.evidence),
                            breakage.silent_s,
                            breakage.has_ended,
                        )
                    )
                case lifecycle.TellLeft(is_broken):
                    if not is_broken:
                        self.backend.begin_close()
                    self._tell_all(control.Left(self.incarnation.nonce, is_broken))
        if self._life.is_over and self._ending:
            self._ending_over(next(iter(self._ending)))

    def _abort(self) -> None:
        try:
            self.backend.abort()
        except Exception:
            # The connections must still be closed, and the other members notified.
            logger.exception("world %r ends after an error", self._life.world)

    def _tell_all(self, message: control.WorldMessage) -> None:
        for rank in self._others():
            self._watchdog.notify(rank, message)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.incarnation.size) if rank != self.rank]

    def trouble(self, rank: int | None, evidence: str) -> None:
        if rank is not None and rank in self._ending:
            if not self.backend.is_arriving(rank):
                self._ending_over(rank)
            return
        if self._life.is_over or rank in self._life.left or rank in self._grace:
            return
        if rank is None and self._life.left:
            # The connection may be that of a member that has left.
            return
        self._grace[rank] = self._loop.call_later(
            LINK_GRACE_S, self._grace_over, rank, evidence
        )

    def _grace_over(self, rank: int | None, evidence: str) -> None:
        self._grace.pop(rank, None)
        if self._ending:  # the loss of a member caused the failure, here or at the peer
            self._ending_over(next(iter(self._ending)))
            return
        what = "a data connection" if rank is None else f"the connection to rank {rank}"
        self.report(
            lifecycle.Failed(f"{what} failed, though every member is alive", evidence)
        )

    def _cancel_grace(self, rank: int | None) -> None:
        timer = self._grace.pop(rank, None)
        if timer is not None:
            timer.cancel()

    # WorldView: calls from the backend.

    async def lane(self, rank: int, channel: str) -> Stream:
        return await self._watchdog.lane(self.incarnation, self.rank, rank, channel)

    def has_lane(self, rank: int, channel: str) -> bool:
        return self._watchdog.has_lane(self.incarnation.nonce, rank, channel)

    def dials(self, rank: int) -> bool:
        return self._watchdog.dials(self.incarnation.members[rank])

    def has_left(self, rank: int) -> bool:
        return rank in self._life.left

    def notify(self, rank: int, message: control.BackendMessage) -> None:
        self._watchdog.notify(rank, message)

    # Errors: a new one each time, because sharing one would mix up tracebacks.

    def broken_error(self) -> Exception:
        breakage = self._life.breakage
        if breakage is not None:
            return self._life.error(breakage)
        return WorldClosedError(
            f"world {self._life.world!r} was closed by this process; join it again to "
            "use it",
            world=self._life.world,
            epoch=self._life.epoch,
        )

    def left_error(self, rank: int) -> MemberLeftError:
        return MemberLeftError(
            f"rank {rank} has left world {self._life.world!r}; close it, and join "
            "again when the member is back",
            world=self._life.world,
            epoch=self._life.epoch,
            rank=rank,
        )

    def _forked_error(self) -> UsedAfterForkError:
        return UsedAfterForkError(
            f"world {self._life.world!r} belongs to the parent process; make a "
            "WorldManager in the child and join there",
            world=self._life.world,
            epoch=self._life.epoch,
        )


def _as_unicode(text: str) -> str:
    """Escape lone surrogates, such as those in file names."""
    return text.encode(errors="backslashreplace").decode()
