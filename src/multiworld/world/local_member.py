"""One member's side of one incarnation: joining, health, the end. Shell.

``LocalMember`` carries out what ``lifecycle`` decides. To the watchdog it is where
control messages and verdicts go (``WorldPort``), to the backend it is the world
(``WorldView``); ``World`` puts the operations on top.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from multiworld.backends import make_backend
from multiworld.backends.base import Lingering
from multiworld.config import WorldConfig
from multiworld.errors import MemberLeftError, UsedAfterForkError, WorldClosedError
from multiworld.incarnation.events import Event, MemberWaiting
from multiworld.incarnation.lifecycle import (
    CloseAsked,
    Failed,
    FailMember,
    FailOperations,
    Happening,
    Life,
    Opened,
    Phase,
    Publish,
    Resumes,
    SaidLeft,
    Stalls,
    TellBroken,
    TellLeft,
    WasAccused,
    WasLost,
    handle,
)
from multiworld.liveness.failure_detector import (
    DetectionLimits,
    Finding,
    Resumed,
    Stalled,
    Verdict,
    doing,
)
from multiworld.liveness.watchdog import WatchDog
from multiworld.net.streams import Stream
from multiworld.rendezvous.membership import Incarnation
from multiworld.rendezvous.store_address import StoreAddress, StoreAddresses

T = TypeVar("T")

LINK_GRACE_S = 1.0
"""How long a world waits, when a data connection has ended, for the control link to
tell why. Both end together when a process dies; the link's word only has to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What a member asks for when it joins; kept for when the world changes size."""

    name: str
    rank: int
    size: int
    where: StoreAddresses
    backend: str
    config: WorldConfig
    device: torch.device

    def terms(self) -> str:
        """Return what all members must agree on, in words."""
        terms = f"backend {self.backend}, host_p2p {self.config.host_p2p}"
        # In another order, two stores could give out the same numbers.
        several = len(self.where.stores) > 1
        return f"{terms}, stores {self.where}" if several else terms

    def replace(self, **changes: Any) -> JoinRequest:
        """Return a copy with ``changes`` applied."""
        return dataclasses.replace(self, **changes)


def _nothing(_: LocalMember) -> None:
    """Do nothing at the end of an incarnation."""


@dataclass(slots=True, kw_only=True)
class ManagerServices:
    """What a manager gives each of its worlds."""

    watchdog: WatchDog
    publish: Callable[[Event], None]
    linger: Callable[[Lingering], None]
    closing: set[asyncio.Task[None]]
    over: Callable[[LocalMember], None] = _nothing


class LocalMember:
    """Joins, watches and ends one incarnation."""

    def __init__(
        self,
        incarnation: Incarnation,
        wish: JoinRequest,
        store: StoreAddress,
        around: ManagerServices,
    ) -> None:
        self.incarnation, self.wish, self.rank = incarnation, wish, wish.rank
        self.config, self.device = wish.config, wish.device
        self.store, self.linger = store, around.linger
        self._around, self._watchdog = around, around.watchdog
        self._loop = asyncio.get_running_loop()
        self._life = Life(
            world=incarnation.world,
            epoch=incarnation.epoch,
            rank=self.rank,
            size=incarnation.size,
        )
        self.security = around.watchdog.security
        self._changed = asyncio.Event()
        self._is_superseded = False
        self.waiting: dict[int, int] = {}  # rank -> the size that it expects
        self._over = self._loop.create_future()
        self._ready_ranks = {self.rank}
        self._all_ready = self._loop.create_future()
        self._grace: dict[int | None, asyncio.TimerHandle] = {}
        self._is_forked = False
        self.backend_name = wish.backend
        self.backend = make_backend(wish.backend, self)

    @property
    def phase(self) -> Phase:
        """Where the incarnation stands."""
        return self._life.phase

    @property
    def is_broken(self) -> bool:
        """True once something outside has ended it."""
        return self._life.phase is Phase.BROKEN

    @property
    def left(self) -> frozenset[int]:
        """Ranks that have left politely."""
        return self._life.gone

    def silent_s(self, rank: int) -> float:
        """Return for how long a member has given no sign of life."""
        members = self.incarnation.members
        if rank == self.rank:
            return 0.0
        return self._watchdog.silent_s(members[self.rank], members[rank])

    @property
    def lost(self) -> frozenset[int]:
        """Ranks known to be lost."""
        breakage = self._life.breakage
        return frozenset() if breakage is None else breakage.lost

    @property
    def is_stale(self) -> bool:
        """True if the others declared this member lost."""
        breakage = self._life.breakage
        return breakage is not None and breakage.is_stale

    async def wait_more_lost(self, known: frozenset[int]) -> None:
        """Wait until more members are lost or have left than ``known``."""
        while self.lost | self.left <= known:
            self._changed.clear()
            await self._changed.wait()

    async def wait_incomplete(self) -> None:
        """Wait until this incarnation is over, or a member has left."""
        while not (self._life.is_over or self.left):
            self._changed.clear()
            await self._changed.wait()

    def member_waits(self, rank: int, size: int, *, is_gone: bool) -> None:
        """Take note that a stranger wants into the next incarnation, or no longer."""
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
        """Let what happens to this incarnation from now on interest nobody."""
        self._is_superseded = True

    def _publish(self, event: Event) -> None:
        if not self._is_superseded:
            self._around.publish(event)

    async def wait_over(self) -> None:
        """Wait until the world is broken or closed."""
        await asyncio.shield(self._over)

    def check(self) -> None:
        """Check that traffic may flow.

        Raises:
            WorldBrokenError, WorldClosedError, UsedAfterForkError: It may not.
        """
        if self._is_forked:
            raise self._forked_error()
        if self._life.phase is not Phase.READY:
            raise self.broken_error()

    # Joining.

    async def open(self) -> None:
        """Connect to every member and wait until all have done so.

        Raises:
            WorldBrokenError: A member was lost meanwhile.
            OSError: A member could not be reached.

        Cancellation: the caller closes the world.
        """
        config = self.config
        limits = DetectionLimits(
            config.silence_s, config.stall_s, config.stalled_limit_s
        )
        attaching = self._watchdog.attach(self.incarnation, self.rank, self, limits)
        await self.until_over(attaching)
        await self.until_over(self.backend.open())
        self._tell_all({"op": "ready"})
        self._check_ready()
        await self.until_over(self._wait_ready())
        if self._life.is_over:
            raise self.broken_error()
        self.report(Opened())

    @property
    def unlinked(self) -> tuple[int, ...]:
        """Ranks that there is no link to."""
        linked = self._watchdog.linked(self.incarnation.nonce)
        return tuple(rank for rank in self._others() if rank not in linked)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are waited for: those without a link, or else not ready yet."""
        size = self.incarnation.size
        unready = tuple(r for r in range(size) if r not in self._ready_ranks)
        return self.unlinked or unready

    async def _wait_ready(self) -> None:
        await asyncio.shield(self._all_ready)

    async def until_over(self, step: Coroutine[Any, Any, T]) -> T:
        """Return what ``step`` does, or raise why the world is over, if that is first.

        Cancellation: ``step`` is cancelled.
        """
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

    def _check_ready(self) -> None:
        is_complete = len(self._ready_ranks) == self.incarnation.size
        if is_complete and not self._all_ready.done():
            self._all_ready.set_result(None)

    # The end.

    async def close(self) -> None:
        """Leave politely, waiting at most ``close_s`` for what was sent.

        Cancellation: the world is closed all the same, at once.
        """
        self.report(CloseAsked())
        if self._over.done():
            self._free()
            return
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.close_s):
                    await self.backend.close()
        finally:
            self._free()

    def close_nowait(self) -> None:
        """Leave politely, without waiting for what the network has not taken."""
        self.report(CloseAsked())
        self._free()

    def abandon_after_fork(self) -> None:
        """Make every operation of this copy in a forked child fail."""
        self._is_forked = True

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        return self.backend.filenos()

    def _end_data(self) -> None:
        """Give back what carries data; a broken world hears on who else is lost."""
        if self._over.done():
            return
        self._over.set_result(None)
        for rank in list(self._grace):
            self._cancel_grace(rank)
        self.backend.close_nowait()
        self._around.over(self)

    def _free(self) -> None:
        """Give everything back; safe to repeat."""
        self._end_data()
        self._watchdog.detach(self.incarnation.nonce)

    # WorldPort: what the watchdog tells.

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Take a control message of a member."""
        match message.get("op"):
            case "ready":
                self._ready_ranks.add(rank)
                self._check_ready()
            case "left":
                self.report(SaidLeft(rank, bool(message.get("is_broken"))))
            case "broken":
                self._on_broken(rank, message)
            case "backend":
                if not self._life.is_over:
                    self.backend.on_message(rank, message["body"])

    def _on_broken(self, rank: int, message: dict[str, Any]) -> None:
        if message["rank"] is None:
            told = Failed(message["reason"], message["evidence"], told_by=rank)
        elif message["rank"] == self.rank:
            prefix = f"rank {self.rank} was lost: "
            reason = str(message["reason"]).removeprefix(prefix)
            self.report(WasAccused(rank, reason, message["evidence"]))
            return
        else:
            prefix = f"rank {message['rank']} was lost: "
            self.report(
                WasLost(
                    int(message["rank"]),
                    str(message["reason"]).removeprefix(prefix),
                    f"told by rank {rank}: {message['evidence']}",
                    float(message["silent_s"]),
                    told_by=rank,
                )
            )
            return
        self.report(told)

    def on_finding(self, rank: int, finding: Finding) -> None:
        """Take what the watchdog found out about a member."""
        match finding:
            case Verdict(reason=reason, evidence=evidence, silent_s=silent_s):
                self.report(WasLost(rank, reason, evidence, silent_s))
            case Stalled(stalled_s=stalled_s, is_computing=is_computing):
                self.report(Stalls(rank, stalled_s, doing(is_computing)))
            case Resumed():
                self.report(Resumes(rank))

    # Deciding and acting.

    def report(self, happening: Happening) -> None:
        """Let ``lifecycle`` decide what follows, and carry it out."""
        self._life, actions = handle(self._life, happening)
        self._changed.set()
        for action in actions:
            match action:
                case Publish(event):
                    self._publish(event)
                case FailMember(rank):
                    self._cancel_grace(rank)
                    self._cancel_grace(None)  # what failed may have been its
                    self.backend.member_left(rank)
                case FailOperations():
                    self.backend.abort()
                    self._end_data()
                    self._watchdog.retire(self.incarnation.nonce)
                case TellBroken(breakage):
                    self._tell_all(
                        {
                            "op": "broken",
                            "rank": breakage.rank,
                            "reason": breakage.reason,
                            "evidence": breakage.evidence,
                            "silent_s": breakage.silent_s,
                        }
                    )
                case TellLeft(is_broken):
                    if not is_broken:
                        self.backend.begin_close()
                    self._tell_all({"op": "left", "is_broken": is_broken})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for rank in self._others():
            self._watchdog.tell(self.incarnation.nonce, rank, message)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.incarnation.size) if rank != self.rank]

    def trouble(self, rank: int | None, evidence: str) -> None:
        """Give the control link time to tell whose fault it is."""
        if self._life.is_over or rank in self._life.left or rank in self._grace:
            return
        if rank is None and self._life.left:
            return  # nobody knows whose it was: the one that left is enough to blame
        self._grace[rank] = self._loop.call_later(
            LINK_GRACE_S, self._grace_over, rank, evidence
        )

    def _grace_over(self, rank: int | None, evidence: str) -> None:
        self._grace.pop(rank, None)
        what = "a data connection" if rank is None else f"the connection to rank {rank}"
        self.report(Failed(f"{what} failed, though every member lives", evidence))

    def _cancel_grace(self, rank: int | None) -> None:
        timer = self._grace.pop(rank, None)
        if timer is not None:
            timer.cancel()

    # What the backend may ask.

    async def lane(self, rank: int, channel: str) -> Stream:
        """Return a new connection with a member, for data."""
        return await self._watchdog.lane(self.incarnation, self.rank, rank, channel)

    def has_lane(self, rank: int, channel: str) -> bool:
        """Tell whether a connection that the member opened waits to be taken."""
        return self._watchdog.has_lane(self.incarnation.nonce, rank, channel)

    def dials(self, rank: int) -> bool:
        """Tell whether this member dials the other one, or waits for it."""
        return self._watchdog.dials(self.incarnation.members[rank])

    def has_left(self, rank: int) -> bool:
        """Tell whether a member has left politely."""
        return rank in self._life.left

    def tell(self, rank: int, message: dict[str, Any]) -> None:
        """Send a control message to the member's backend."""
        wrapped = {"op": "backend", "body": message}
        self._watchdog.tell(self.incarnation.nonce, rank, wrapped)

    # Errors, a fresh one each time: sharing one would mix up tracebacks.

    def broken_error(self) -> Exception:
        """Return why no operation is possible any more."""
        breakage = self._life.breakage
        if breakage is not None:
            return breakage.error()
        return WorldClosedError(
            f"world {self._life.world!r} was closed by this process; join it again to "
            "use it",
            world=self._life.world,
            epoch=self._life.epoch,
        )

    def left_error(self, rank: int) -> MemberLeftError:
        """Return an error for an operation that needs ``rank``."""
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
