"""Admission to worlds: joining them and changing their size. The store alone decides.
Once the store has admitted an incarnation, the name belongs to this incarnation even if
it cannot be opened. So members never disagree about which incarnation is current."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

from multiworld import errors
from multiworld.config import is_int
from multiworld.incarnation.lifecycle import Phase, WasLost
from multiworld.liveness.watchdog import WatchDog
from multiworld.rendezvous import store_messages as messages
from multiworld.rendezvous.joiner import Joiner, meet
from multiworld.rendezvous.membership import Incarnation, Member, MemberUnreachableError
from multiworld.rendezvous.store_address import StoreAddresses
from multiworld.rendezvous.store_session import StoreSession
from multiworld.world.join_request import JoinRequest
from multiworld.world.local_member import LocalMember, ManagerServices
from multiworld.world.world import Changes, World

Notice = messages.MemberGaveUp | messages.NewcomerWaits

# Maximum number of notices kept for a world that this process has not yet entered.
MAX_EARLY = 256

# A join that times out declares members lost only if the admission was at least this
# many seconds ago: the deadline may already have been near then.
CONNECT_S = 2.0

LATE = "it was admitted and did not connect in time"


@dataclass(slots=True)
class Admittance:
    """The store's admission of this process, known even if the caller was cancelled."""

    session: StoreSession | None = None
    incarnation: Incarnation | None = None


class Admission:
    """The newest incarnation of every world of one manager."""

    def __init__(
        self, uid: str, watchdog: WatchDog, services: ManagerServices, changes: Changes
    ) -> None:
        self._uid, self._watchdog, self._services = uid, watchdog, services
        self._changes = changes
        self._loop = asyncio.get_running_loop()
        self.joiner = Joiner(self, watchdog.security)
        self._worlds: dict[str, World] = {}
        self._local_members: dict[str, LocalMember] = {}
        # Members that count as users of their session.
        self._met: set[LocalMember] = set()
        self._seen: dict[str, int] = {}
        # Notices about incarnations that this process has not entered yet: they may
        # arrive right after the admission, before the joining task runs again.
        self._early: dict[str, list[Notice]] = {}
        # Number of claims in progress, by world.
        self._claiming: Counter[str] = Counter()
        # Worlds whose next incarnation could not be opened.
        self._failed: set[str] = set()
        services.over, services.closed = self._over, self.release

    @property
    def worlds(self) -> dict[str, World]:
        """The newest incarnation of every name, including broken ones."""
        return dict(self._worlds)

    def local_members(self) -> list[LocalMember]:
        """Return every incarnation that has not been released."""
        return list(self._met)

    # Joining.

    async def join(self, request: JoinRequest) -> World:
        """Claim a rank, wait for the other members and open the incarnation."""
        name, where = request.name, request.where
        deadline = self._loop.time() + request.config.join_s
        may_host = request.rank == 0 and request.config.embed_store
        session = await self.joiner.enter(
            where, may_host=may_host, world=name, deadline=deadline
        )
        with self._claims(name):
            return await self._join(request, session, deadline, may_host=may_host)

    @contextlib.contextmanager
    def _claims(self, name: str) -> Iterator[None]:
        """Keep notices of a world until this process has entered it."""
        self._claiming[name] += 1
        try:
            yield
        finally:
            self._claiming[name] -= 1
            if not self._claiming[name]:
                del self._claiming[name]
                self._early.pop(name, None)

    async def _join(
        self,
        request: JoinRequest,
        session: StoreSession,
        deadline: float,
        *,
        may_host: bool,
    ) -> World:
        name, where = request.name, request.where
        local: LocalMember | None = None
        try:
            # Joining replaces a broken world of this name, or one that a member has
            # left.
            if name in self._local_members:
                await self.end(self._local_members[name])
            claim = messages.Newcomer(
                world=name,
                rank=request.rank,
                size=request.size,
                terms=request.terms(),
                seen=self._seen.get(name, 0),
            )
            member = self._member(name, session, request.rank)
            session, incarnation = await meet(
                self.joiner, where, session, claim, member, deadline, may_host=may_host
            )
            local = self._begin(request, session, incarnation)
            await self._open(local, deadline)
        except BaseException:
            if local is None:
                self.joiner.leave(where)
            else:
                session.withdraw(name)  # the others then stop waiting for this process
                local.close_nowait()
                self.release(local)
            raise
        return self._adopt(local)

    def _member(self, name: str, session: StoreSession, rank: int) -> Member:
        try:
            address = self._watchdog.listen(session.local_host)
        except OSError as error:
            raise errors.WorldBrokenError(
                name, "this process cannot listen for its members", evidence=str(error)
            ) from error
        return Member(rank=rank, uid=self._uid, pid=os.getpid(), address=address)

    def _begin(
        self, request: JoinRequest, session: StoreSession, incarnation: Incarnation
    ) -> LocalMember:
        """Create this member's side of an incarnation that the store has admitted."""
        name = incarnation.world
        self._seen[name] = incarnation.epoch
        own = [m.rank for m in incarnation.members if m.uid == self._uid]
        if len(own) != 1:
            raise errors.WorldBrokenError(
                name,
                "its members do not have distinct identities",
                evidence=f"ranks {own} have the identity of this process",
            )
        (rank,) = own
        request = replace(request, rank=rank, size=incarnation.size)
        local = LocalMember(incarnation, request, session.address, self._services)
        self._local_members[name] = local
        self._met.add(local)
        self._failed.discard(name)
        for notice in self._early.pop(name, ()):
            if notice.epoch == incarnation.epoch:
                _noted(local, notice)
        return local

    def _adopt(self, local: LocalMember) -> World:
        world = self._worlds[local.incarnation.world] = World(local, self._changes)
        return world

    async def _open(self, local: LocalMember, deadline: float) -> None:
        name, epoch = local.incarnation.world, local.incarnation.epoch
        try:
            async with asyncio.timeout_at(deadline):
                await local.open()
        except TimeoutError as error:
            late = _not_connected(local)
            # Some members have connected, so the missing ones had time to connect, too:
            # report their loss.
            some = 0 < len(local.unlinked) < local.incarnation.size - 1
            if some and local.age_s >= CONNECT_S:
                for rank in local.unlinked:
                    local.report(WasLost(rank, LATE))
            raise late from error
        except MemberUnreachableError as error:
            # Report the loss to the other members, too: none can continue without the
            # lost member.
            local.report(WasLost(error.rank, "it was lost while joining", str(error)))
            raise local.broken_error() from error
        except OSError as error:
            raise errors.WorldBrokenError(
                name,
                "this process could not connect to the members",
                epoch=epoch,
                evidence=str(error),
            ) from error

    # Changing size.

    async def reform(self, name: str) -> World:
        """Continue without the members that are lost or have left."""
        local = self._reformable(name)
        deadline = self._loop.time() + local.request.config.join_s
        while True:
            await self._enter_again(local, deadline)
            admitted = Admittance()
            gathering = self._gather_survivors(local, deadline, admitted)
            with self._claims(name):
                local = await self._next(local, admitted, gathering)
            try:
                await self._open(local, deadline)
            except errors.WorldBrokenError as error:
                # If another member was lost meanwhile, try again without it. Otherwise
                # give up.
                if local.phase is not Phase.BROKEN or not local.lost or local.is_stale:
                    self._give_up(local, error)
                    raise
                continue
            except BaseException as error:
                self._give_up(local, error)
                raise
            return self._adopt(local)

    def _reformable(self, name: str) -> LocalMember:
        local = self._local_members.get(name)
        if local is None or local.phase is Phase.CLOSED:
            raise errors.WorldClosedError(
                f"world {name!r} was closed by this process; join it again", world=name
            )
        if local.is_stale:
            raise local.broken_error()
        if local.phase is not Phase.BROKEN and not local.left:
            rule = "reform() needs a world that is broken or that a member has left"
            raise errors.ConfigError("world", name, rule)
        return local

    async def _next(
        self,
        old: LocalMember,
        admitted: Admittance,
        claiming: Coroutine[Any, Any, None],
    ) -> LocalMember:
        """Wait for the next incarnation, and enter it in place of the old one."""
        try:
            await claiming
        except BaseException:
            # The other survivors wait for this member in that session's store.
            if admitted.session is not None:
                admitted.session.withdraw(old.incarnation.world)
            self.joiner.leave(old.request.where)
            raise
        return self._replace(old, admitted)

    async def _gather_survivors(
        self, local: LocalMember, deadline: float, admitted: Admittance
    ) -> None:
        """Wait for the other survivors; claim again when more members are lost."""
        claims: list[asyncio.Task[None]] = []
        try:
            while True:
                lost = local.lost | local.left
                # A claim that names more lost members replaces the previous claim. The
                # previous one is not withdrawn, because it may already have been
                # granted.
                wanted = messages.Survivor(
                    world=local.incarnation.world,
                    epoch=local.incarnation.epoch,
                    rank=local.rank,
                    size=local.incarnation.size,
                    terms=local.request.terms(),
                    lost=lost,
                )
                claiming = self._claim_next(local, wanted, deadline, admitted)
                claims.append(self._loop.create_task(claiming))
                grows = self._loop.create_task(local.wait_more_lost(lost))
                try:
                    await asyncio.wait(
                        (*claims, grows), return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    grows.cancel()
                done = [claim for claim in claims if claim.done()]
                if done:
                    return done[0].result()
        finally:
            for claim in claims:
                claim.cancel()
            await asyncio.gather(*claims, return_exceptions=True)

    async def _claim_next(
        self,
        local: LocalMember,
        claim: messages.Newcomer | messages.Survivor,
        deadline: float,
        admitted: Admittance,
    ) -> None:
        """Claim this member's rank of the next incarnation."""
        where, name = local.request.where, local.incarnation.world
        session = await self.joiner.reopen(
            where, may_host=False, world=name, deadline=deadline
        )
        member = self._member(name, session, local.rank)
        admitted.session, admitted.incarnation = await meet(
            self.joiner, where, session, claim, member, deadline, may_host=False
        )

    async def grow(self, name: str, to: int) -> World:
        """Admit newcomers to a living world."""
        local = self._local_members.get(name)
        if local is None:
            raise errors.WorldClosedError(
                f"world {name!r} was closed by this process; join it again", world=name
            )
        local.check()
        size = local.incarnation.size
        if not is_int(to) or not size < to <= messages.MAX_SIZE:
            most = messages.MAX_SIZE
            rule = f"give an int from {size + 1} to {most}: the size is {size} now"
            raise errors.ConfigError("to", to, rule)
        deadline = self._loop.time() + local.request.config.join_s
        await self._enter_again(local, deadline)
        admitted = Admittance()
        claim = messages.Newcomer(
            world=name,
            rank=local.rank,
            size=to,
            terms=local.request.terms(),
            seen=local.incarnation.epoch,
        )
        claiming = self._claim_next(local, claim, deadline, admitted)
        with self._claims(name):
            grown = await self._next(local, admitted, local.until_over(claiming))
        try:
            await self._open(grown, deadline)
        except BaseException as error:
            self._give_up(grown, error)
            raise
        return self._adopt(grown)

    async def _enter_again(self, local: LocalMember, deadline: float) -> None:
        """Enter the session once more, on behalf of the next incarnation."""
        await self.joiner.enter(
            local.request.where,
            may_host=False,
            world=local.incarnation.world,
            deadline=deadline,
        )

    def _replace(self, old: LocalMember, admitted: Admittance) -> LocalMember:
        """Enter the next incarnation and close the old one in the background."""
        session, incarnation = admitted.session, admitted.incarnation
        assert session is not None
        assert incarnation is not None
        new = self._begin(old.request, session, incarnation)
        old.supersede()
        # Do not wait until the old incarnation is closed, because the other members may
        # be waiting in the new one.
        ending = self._loop.create_task(
            self.end(old), name=f"multiworld leave {incarnation.world}"
        )
        self._services.closing.add(ending)
        ending.add_done_callback(self._services.closing.discard)
        return new

    def has_failed(self, name: str) -> bool:
        """Return whether ``grow`` or ``reform`` failed to open a world's next
        incarnation, and this process has not joined the world since."""
        return name in self._failed

    def _give_up(self, local: LocalMember, error: BaseException) -> None:
        """Close or release an unopened incarnation, or keep it for ``reform``."""
        name = local.incarnation.world
        self._failed.add(name)
        is_late = isinstance(error, errors.JoinTimeoutError)
        for rank in local.unlinked if is_late and local.phase is Phase.JOINING else ():
            local.report(WasLost(rank, LATE))
        if local.phase is Phase.JOINING:
            session = self.joiner.session(local.request.where)
            if session is not None:
                session.withdraw(name)  # the others are then notified
            local.close_nowait()
        if local.phase is Phase.CLOSED:
            self.release(local)
        else:
            self._adopt(local)

    # The end.

    async def end(self, local: LocalMember) -> None:
        """Close an incarnation gracefully and release it; if cancelled, at once."""
        try:
            await local.close()
        finally:
            self.release(local)

    def take_out(self, name: str) -> LocalMember:
        """Remove a name and return its incarnation, which the caller must ``end``."""
        self._worlds.pop(name, None)
        return self._local_members.pop(name)

    def local_member(self, name: str) -> LocalMember:
        return self._local_members[name]

    def release(self, local: LocalMember) -> None:
        """Remove a closed incarnation and its use of a session; safe to repeat."""
        name = local.incarnation.world
        if self._local_members.get(name) is local:
            del self._local_members[name]
            self._worlds.pop(name, None)
        if local in self._met:
            self._met.discard(local)
            self.joiner.leave(local.request.where)

    def _over(self, local: LocalMember) -> None:
        """Report to the store that an incarnation has ended; release it if closed."""
        session = self.joiner.session(local.request.where)
        if session is not None:
            where = local.incarnation
            session.left(
                where.world, where.epoch, local.rank, local.lost - {local.rank}
            )
        if local.phase is Phase.CLOSED:
            self.release(local)

    def close_nowait(self) -> None:
        for local in self.local_members():
            local.close_nowait()
        self._worlds.clear()
        self._local_members.clear()
        self.joiner.close_nowait()

    # SessionOwner: questions and notices of a store.

    def holds(self, world: str, epoch: int, rank: int) -> bool:
        local = self._local_members.get(world)
        if local is None or local.phase in (Phase.BROKEN, Phase.CLOSED):
            return False
        return (local.incarnation.epoch, local.rank) == (epoch, rank)

    def holdings(self, where: StoreAddresses) -> list[messages.Announce]:
        return [
            messages.Announce(
                local.incarnation.world, local.incarnation.epoch, local.rank, self._uid
            )
            for local in self._local_members.values()
            if local.request.where == where
            and local.phase in (Phase.JOINING, Phase.READY)
        ]

    def noticed(self, notice: Notice) -> None:
        local = self._local_members.get(notice.world)
        if local is not None and local.incarnation.epoch == notice.epoch:
            _noted(local, notice)
        elif self._claiming[notice.world]:
            early = self._early.setdefault(notice.world, [])
            early.append(notice)
            del early[:-MAX_EARLY]


def _noted(local: LocalMember, notice: Notice) -> None:
    match notice:
        case messages.MemberGaveUp(rank=rank):
            why = "it gave up while it was being admitted"
            local.report(WasLost(rank, why, "the store reports it"))
        case messages.NewcomerWaits(rank=rank, size=size, is_gone=is_gone):
            local.member_waits(rank, size, is_gone=is_gone)
            is_joining = local.phase is Phase.JOINING and not is_gone
            # A newcomer that expects another size is not claiming again: it waits for
            # the next incarnation, after a reform.
            asks_again = size == local.incarnation.size and rank in local.missing
            if is_joining and asks_again:
                why = "it claimed its rank again: it did not receive its admission"
                local.report(WasLost(rank, why, "the store reports it"))


def _not_connected(local: LocalMember) -> errors.JoinTimeoutError:
    missing, size = local.missing, local.incarnation.size
    present = tuple(rank for rank in range(size) if rank not in missing)
    name = local.incarnation.world
    return errors.JoinTimeoutError(
        f"world {name!r}: rank {', '.join(map(str, missing))} was admitted but did not "
        "connect in time; check its process and the firewall",
        world=name,
        epoch=local.incarnation.epoch,
        present=present,
        missing=missing,
    )
