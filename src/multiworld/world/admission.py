"""Admission to worlds: joining them and changing their size. Shell.

``Admission`` keeps the incarnations of one manager, meets the other members at the
store, and opens each incarnation that it was admitted to. The store alone decides about
admission. From then on the name belongs to the new incarnation, even if it cannot be
opened, so that members never disagree about which incarnation is current.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from multiworld.errors import (
    ConfigError,
    JoinTimeoutError,
    WorldBrokenError,
    WorldClosedError,
)
from multiworld.incarnation.lifecycle import Phase, WasLost
from multiworld.liveness.watchdog import WatchDog
from multiworld.rendezvous.joiner import Claim, Joiner, Survivor, meet
from multiworld.rendezvous.membership import Incarnation, Member, MemberUnreachableError
from multiworld.rendezvous.store_address import StoreAddresses
from multiworld.rendezvous.store_service import MAX_SIZE
from multiworld.rendezvous.store_session import StoreSession
from multiworld.world.local_member import JoinRequest, LocalMember, ManagerServices
from multiworld.world.world import Changes, World


class Admission:
    """The newest incarnation of every world of one manager.

    Args:
        uid: Random name of the manager.
        watchdog: The manager's watchdog.
        around: Services that the manager gives its worlds.
        changes: Implementation of ``World.reform`` and ``World.grow``.
    """

    def __init__(
        self, uid: str, watchdog: WatchDog, around: ManagerServices, changes: Changes
    ) -> None:
        self._uid, self._watchdog, self._around = uid, watchdog, around
        self._changes = changes
        self._loop = asyncio.get_running_loop()
        self.meeting = Joiner(self, watchdog.security)
        self._worlds: dict[str, World] = {}
        self._lives: dict[str, LocalMember] = {}
        self._met: set[LocalMember] = set()  # those that count as users of a session
        self._seen: dict[str, int] = {}
        around.over = self._over

    @property
    def worlds(self) -> dict[str, World]:
        """The newest incarnation of every name, broken ones included."""
        return dict(self._worlds)

    def lives(self) -> list[LocalMember]:
        """Return every incarnation that has not been released."""
        return list(self._met)

    # Joining.

    async def join(self, wish: JoinRequest) -> World:
        """Claim a rank, wait for the other members and open the incarnation.

        Raises:
            MultiWorldError: As for ``WorldManager.join``.

        Cancellation:
            Withdraws the claim; nothing stays behind.
        """
        name, where = wish.name, wish.where
        deadline = self._loop.time() + wish.config.join_s
        may_host = wish.rank == 0 and wish.config.embed_store
        session = await self.meeting.enter(
            where, may_host=may_host, world=name, deadline=deadline
        )
        life: LocalMember | None = None
        try:
            if name in self._lives:  # broken or left: its next epoch replaces it
                await self.end(self._lives[name])
            claim = Claim(
                world=name,
                rank=wish.rank,
                size=wish.size,
                terms=wish.terms(),
                seen=self._seen.get(name, 0),
            )
            member = self._member(session, wish.rank)
            session, incarnation = await meet(
                self.meeting, where, session, claim, member, deadline, may_host=may_host
            )
            life = self._begin(wish, session, incarnation)
            await self._open(life, deadline)
        except BaseException:
            if life is None:
                self.meeting.leave(where)
            else:
                life.close_nowait()
                self.release(life)
            raise
        return self._adopt(life)

    def _member(self, session: StoreSession, rank: int) -> Member:
        address = self._watchdog.listen(session.local_host)
        return Member(rank=rank, uid=self._uid, pid=os.getpid(), address=address)

    def _begin(
        self, wish: JoinRequest, session: StoreSession, incarnation: Incarnation
    ) -> LocalMember:
        """Create this member's side of an incarnation that the store has admitted."""
        name = incarnation.world
        self._seen[name] = incarnation.epoch
        (rank,) = (m.rank for m in incarnation.members if m.uid == self._uid)
        wish = wish.replace(rank=rank, size=incarnation.size)
        life = LocalMember(incarnation, wish, session.address, self._around)
        self._lives[name] = life
        self._met.add(life)
        return life

    def _adopt(self, life: LocalMember) -> World:
        world = self._worlds[life.incarnation.world] = World(life, self._changes)
        return world

    async def _open(self, life: LocalMember, deadline: float) -> None:
        name, epoch = life.incarnation.world, life.incarnation.epoch
        try:
            async with asyncio.timeout_at(deadline):
                await life.open()
        except TimeoutError as error:
            raise _not_connected(life) from error
        except MemberUnreachableError as error:
            # Report it to the others too: none of them can go on without it.
            life.report(WasLost(error.rank, "it was lost while joining", str(error)))
            raise life.broken_error() from error
        except OSError as error:
            raise WorldBrokenError(
                name,
                "this member could not open it",
                epoch=epoch,
                evidence=str(error),
            ) from error

    # Changing size.

    async def reform(self, name: str) -> World:
        """Go on without the members that are lost or have left; see ``World.reform``.

        Raises:
            MultiWorldError: As for ``World.reform``.

        Cancellation:
            Withdraws the claim; the world stays as it is. If the store has already
            admitted the next incarnation, the old one is closed, and the new one is
            closed or kept as broken.
        """
        life = self._reformable(name)
        deadline = self._loop.time() + life.wish.config.join_s
        while True:
            await self._enter_again(life, deadline)
            try:
                session, incarnation = await self._gather_survivors(life, deadline)
            except BaseException:
                self.meeting.leave(life.wish.where)
                raise
            life = await self._replace(life, session, incarnation)
            try:
                await self._open(life, deadline)
            except WorldBrokenError:
                # Another member was lost meanwhile: go on without that one too.
                if life.phase is not Phase.BROKEN or not life.lost or life.is_stale:
                    self._give_up(life)
                    raise
                continue
            except BaseException:
                self._give_up(life)
                raise
            return self._adopt(life)

    def _reformable(self, name: str) -> LocalMember:
        life = self._lives.get(name)
        if life is None or life.phase is Phase.CLOSED:
            raise WorldClosedError(
                f"world {name!r} was closed by this process; join it again", world=name
            )
        if life.is_stale:
            raise life.broken_error()
        if life.phase is not Phase.BROKEN and not life.left:
            rule = "reform() needs a world that is broken or that a member has left"
            raise ConfigError("world", name, rule)
        return life

    async def _gather_survivors(
        self, life: LocalMember, deadline: float
    ) -> tuple[StoreSession, Incarnation]:
        """Wait for the other survivors, while more members may be lost."""
        claims: list[asyncio.Task[tuple[StoreSession, Incarnation]]] = []
        try:
            while True:
                lost = life.lost | life.left
                # A claim with more lost members replaces the previous one. That one is
                # not withdrawn, because it may already have been granted.
                claims.append(self._loop.create_task(self._survive(life, deadline)))
                grows = self._loop.create_task(life.wait_more_lost(lost))
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

    async def _survive(
        self, life: LocalMember, deadline: float
    ) -> tuple[StoreSession, Incarnation]:
        wish, name = life.wish, life.incarnation.world
        session = await self.meeting.reopen(
            wish.where, may_host=False, world=name, deadline=deadline
        )
        wanted = Survivor(
            world=name,
            epoch=life.incarnation.epoch,
            rank=life.rank,
            size=life.incarnation.size,
            terms=wish.terms(),
            lost=life.lost | life.left,
        )
        member = self._member(session, life.rank)
        return await meet(
            self.meeting, wish.where, session, wanted, member, deadline, may_host=False
        )

    async def grow(self, name: str, to: int) -> World:
        """Let newcomers into a living world; see ``World.grow``.

        Raises:
            MultiWorldError: As for ``World.grow``.

        Cancellation:
            Withdraws the claim; the world stays as it is. If the store has already
            admitted the next incarnation, the old one is closed, and the new one is
            closed or kept as broken.
        """
        life = self._lives.get(name)
        if life is None:
            raise WorldClosedError(
                f"world {name!r} was closed by this process; join it again", world=name
            )
        life.check()
        size = life.incarnation.size
        if not isinstance(to, int) or not size < to <= MAX_SIZE:
            rule = f"an int from {size + 1} to {MAX_SIZE}; the present size is {size}"
            raise ConfigError("to", to, rule)
        deadline = self._loop.time() + life.wish.config.join_s
        await self._enter_again(life, deadline)
        try:
            session, incarnation = await life.until_over(
                self._claim_again(life, to, deadline)
            )
        except BaseException:
            self.meeting.leave(life.wish.where)
            raise
        grown = await self._replace(life, session, incarnation)
        try:
            await self._open(grown, deadline)
        except BaseException:
            self._give_up(grown)
            raise
        return self._adopt(grown)

    async def _claim_again(
        self, life: LocalMember, to: int, deadline: float
    ) -> tuple[StoreSession, Incarnation]:
        wish, name = life.wish, life.incarnation.world
        session = await self.meeting.reopen(
            wish.where, may_host=False, world=name, deadline=deadline
        )
        claim = Claim(
            world=name,
            rank=life.rank,
            size=to,
            terms=wish.terms(),
            seen=life.incarnation.epoch,
        )
        member = self._member(session, life.rank)
        return await meet(
            self.meeting, wish.where, session, claim, member, deadline, may_host=False
        )

    async def _enter_again(self, life: LocalMember, deadline: float) -> None:
        """Count the next incarnation as a user of the session."""
        await self.meeting.enter(
            life.wish.where,
            may_host=False,
            world=life.incarnation.world,
            deadline=deadline,
        )

    async def _replace(
        self, old: LocalMember, session: StoreSession, incarnation: Incarnation
    ) -> LocalMember:
        """Enter the next incarnation and close the old one in the background."""
        new = self._begin(old.wish, session, incarnation)
        old.supersede()
        # In the background, because the others may be waiting in the new incarnation.
        ending = self._loop.create_task(
            self.end(old), name=f"multiworld leave {incarnation.world}"
        )
        self._around.closing.add(ending)
        ending.add_done_callback(self._around.closing.discard)
        return new

    def _give_up(self, life: LocalMember) -> None:
        """Settle an incarnation that could not be opened.

        Close it if it is still joining; otherwise keep it for ``reform`` and ``join``.
        """
        for rank in life.unlinked if life.phase is Phase.JOINING else ():
            life.report(WasLost(rank, "it was admitted and did not connect in time"))
        if life.phase is Phase.JOINING:
            life.close_nowait()
            self.release(life)
        else:
            self._adopt(life)

    # The end.

    async def end(self, life: LocalMember) -> None:
        """Close an incarnation politely and release it.

        Cancellation:
            The incarnation is closed at once and released.
        """
        try:
            await life.close()
        finally:
            self.release(life)

    def take_out(self, name: str) -> LocalMember:
        """Remove a name and return its incarnation, which the caller must ``end``."""
        self._worlds.pop(name, None)
        return self._lives.pop(name)

    def life(self, name: str) -> LocalMember:
        """Return the newest incarnation of a name."""
        return self._lives[name]

    def release(self, life: LocalMember) -> None:
        """Remove a closed incarnation and its use of a session; safe to repeat."""
        name = life.incarnation.world
        if self._lives.get(name) is life:
            del self._lives[name]
            self._worlds.pop(name, None)
        if life in self._met:
            self._met.discard(life)
            self.meeting.leave(life.wish.where)

    def _over(self, life: LocalMember) -> None:
        """Tell the store that an incarnation has ended; release it if it is closed."""
        session = self.meeting.session(life.wish.where)
        if session is not None:
            where = life.incarnation
            session.left(where.world, where.epoch, life.rank, life.lost - {life.rank})
        if life.phase is Phase.CLOSED:
            self.release(life)

    def close_nowait(self) -> None:
        """Close every incarnation and every session, without waiting."""
        for life in self.lives():
            life.close_nowait()
        self._worlds.clear()
        self._lives.clear()
        self.meeting.close_nowait()

    # SessionOwner: questions and notices of a store.

    def holds(self, world: str, epoch: int, rank: int) -> bool:
        """Tell whether this process holds a rank.

        Args:
            world: The world's name.
            epoch: The incarnation's epoch.
            rank: The rank.
        """
        life = self._lives.get(world)
        if life is None or life.phase in (Phase.BROKEN, Phase.CLOSED):
            return False
        return (life.incarnation.epoch, life.rank) == (epoch, rank)

    def holdings(self, where: StoreAddresses) -> list[dict[str, Any]]:
        """Return world, epoch, rank and uid of each rank held in worlds of a store."""
        return [
            {
                "world": life.incarnation.world,
                "epoch": life.incarnation.epoch,
                "rank": life.rank,
                "uid": self._uid,
            }
            for life in self._lives.values()
            if life.wish.where == where and life.phase in (Phase.JOINING, Phase.READY)
        ]

    def member_gave_up(self, note: dict[str, Any]) -> None:
        """Break an incarnation whose admitted member has withdrawn its claim."""
        life = self._lives.get(note["world"])
        if life is not None and life.incarnation.epoch == note["epoch"]:
            why = "it gave up while it was being admitted"
            life.report(WasLost(int(note["rank"]), why, "the store reports it"))

    def member_waits(self, note: dict[str, Any]) -> None:
        """Tell a world that a newcomer waits, or has stopped waiting."""
        life = self._lives.get(note["world"])
        if life is not None and life.incarnation.epoch == note["epoch"]:
            life.member_waits(note["rank"], note["size"], is_gone=note["is_gone"])


def _not_connected(life: LocalMember) -> JoinTimeoutError:
    missing, size = life.missing, life.incarnation.size
    present = tuple(rank for rank in range(size) if rank not in missing)
    name = life.incarnation.world
    return JoinTimeoutError(
        f"world {name!r}: rank {', '.join(map(str, missing))} was admitted but did not "
        "connect in time; check that its process runs, and the firewall",
        world=name,
        epoch=life.incarnation.epoch,
        present=present,
        missing=missing,
    )
