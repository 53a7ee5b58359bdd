"""The store: the registry and the values, behind sessions. Shell.

A session is anything that can take a message: a TCP connection (``StoreServer``) or a
member of the same process (``LocalSession`` in ``session.py``). One service serves any
number of worlds.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from multiworld.rendezvous import registry
from multiworld.rendezvous.reform import ReformClaim
from multiworld.rendezvous.registry import Registry
from multiworld.rendezvous.values import Answer, Values

logger = logging.getLogger("multiworld.store")

MAX_SIZE = 65_536
"""Largest world size that is believed."""

MAX_WAIT_S = 30 * 86_400.0
MAX_EPOCH = 1 << 53

Message = dict[str, Any]
Deliver = Callable[[Message], None]


class EpochMemory(Protocol):
    """What outlasts a restart of the store."""

    def epochs(self) -> dict[str, int]:
        """Return the highest epoch of every name."""

    def remember(self, world: str, epoch: int) -> None:
        """Keep the highest epoch of a name."""


class StoreService:
    """Carries out what the registry decides. Runs on one event loop.

    Args:
        memory: Where the highest epochs are kept, if anywhere.
        settle_s: For so long after the start nobody is admitted: members of worlds
            that are older than this service say first what they hold.
    """

    def __init__(
        self, *, memory: EpochMemory | None = None, settle_s: float = 0.0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._registry = Registry(None if memory is None else memory.epochs())
        self._settled_at = self._loop.time() + settle_s
        self._deferred: dict[tuple[int, int], asyncio.TimerHandle] = {}
        self._values = Values()
        self._sessions: dict[int, Deliver] = {}
        self._opened = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def session_count(self) -> int:
        """How many sessions are open."""
        return len(self._sessions)

    @property
    def waiting_count(self) -> int:
        """How many claims wait for other members."""
        return self._registry.waiting_count()

    def is_on_this_loop(self) -> bool:
        """False for a store left over from an event loop that has ended."""
        return self._loop is asyncio.get_running_loop()

    def open_session(self, deliver: Deliver) -> int:
        """Start a session whose messages go to ``deliver``."""
        self._opened += 1
        self._sessions[self._opened] = deliver
        return self._opened

    def close_session(self, session: int) -> None:
        """End a session: what it waits for is dropped, what it holds is unguarded."""
        if self._sessions.pop(session, None) is not None:
            self._values.drop_session(session)
            self._handle(registry.SessionEnded(session))

    def refuse(self, world: str, error: Message) -> None:
        """Tell those who wait for ``world`` that a stranger could not be admitted."""
        self._handle(registry.Refused(world, error))

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for deferred in self._deferred.values():
            deferred.cancel()

    def receive(self, session: int, message: Message) -> None:
        """Take one message of a session.

        Raises:
            KeyError, TypeError, ValueError: The message is not one of ours.
        """
        match message["op"]:
            case "claim":
                self._when_settled(session, self._claim(session, message))
            case "reform":
                self._when_settled(session, self._reform_claim(session, message))
            case "announce":
                self._handle(
                    registry.Announced(
                        session=session,
                        world=str(message["world"]),
                        epoch=int(message["epoch"]),
                        rank=int(message["rank"]),
                        uid=str(message["uid"]),
                    )
                )
            case "left":
                self._handle(
                    registry.Left(
                        session,
                        str(message["world"]),
                        int(message["epoch"]),
                        int(message["rank"]),
                        frozenset(map(int, message.get("lost", ()))),
                    )
                )
            case "withdraw":
                request = int(message["request"])
                deferred = self._deferred.pop((session, request), None)
                if deferred is not None:
                    deferred.cancel()
                self._handle(registry.Withdrawn(session, request))
            case "answer":
                self._handle(
                    registry.Answered(int(message["ask"]), bool(message["holds"]))
                )
            case _:
                self._value(session, message)

    def _claim(self, session: int, message: Message) -> registry.Claimed:
        _check_claim(message)
        return registry.Claimed(
            session=session,
            request=int(message["request"]),
            world=str(message["world"]),
            rank=int(message["rank"]),
            size=int(message["size"]),
            terms=str(message["terms"]),
            uid=str(message["uid"]),
            seen=int(message["seen"]),
            deadline=self._loop.time() + float(message["deadline_s"]),
            member=dict(message["member"]),
            fresh_nonce=secrets.randbits(63) | 1,
            place=_place(message),
        )

    def _reform_claim(self, session: int, message: Message) -> ReformClaim:
        _check_claim(message)
        return ReformClaim(
            session=session,
            request=int(message["request"]),
            world=str(message["world"]),
            epoch=int(message["epoch"]),
            rank=int(message["rank"]),
            size=int(message["size"]),
            lost=frozenset(map(int, message["lost"])),
            terms=str(message["terms"]),
            uid=str(message["uid"]),
            deadline=self._loop.time() + float(message["deadline_s"]),
            member=dict(message["member"]),
            fresh_nonce=secrets.randbits(63) | 1,
            place=_place(message),
        )

    def _when_settled(
        self, session: int, claim: registry.Claimed | ReformClaim
    ) -> None:
        """Take a claim, and say at once that it has arrived."""
        self._send(session, {"op": "taken", "request": claim.request})
        wait_s = self._settled_at - self._loop.time()
        if wait_s <= 0:
            self._handle(claim)
            return

        key = session, claim.request

        def go_on() -> None:
            self._deferred.pop(key, None)
            if session in self._sessions:
                self._handle(claim)

        self._deferred[key] = self._loop.call_later(wait_s, go_on)

    def _handle(self, happening: registry.Happening) -> None:
        for action in self._registry.handle(happening, self._loop.time()):
            match action:
                case registry.Reply(session, request, body):
                    self._send(session, {"op": "reply", "request": request, **body})
                case registry.AskHolder(session, ask, world, epoch, rank):
                    question = {"world": world, "epoch": epoch, "rank": rank}
                    self._send(session, {"op": "ask", "ask": ask, **question})
                case registry.Notify():
                    self._notify(action)
                case registry.Remember(world, epoch):
                    self._remember(world, epoch)
                case registry.Abandoned(session, world, epoch, rank):
                    where = {"world": world, "epoch": epoch, "rank": rank}
                    self._send(session, {"op": "abandoned", **where})
                case registry.Forget(prefix):
                    self._values.delete_prefix(prefix)
        self._arm()

    def _remember(self, world: str, epoch: int) -> None:
        if self._memory is None:
            return
        try:
            self._memory.remember(world, epoch)
        except OSError as error:  # those who wait to be admitted are not to blame
            logger.error("epoch %d of %r is not remembered: %s", epoch, world, error)

    def _notify(self, note: registry.Notify) -> None:
        who = {"world": note.world, "epoch": note.epoch, "rank": note.rank}
        waiting = {"op": "waiting", "size": note.size, "is_gone": note.is_gone}
        self._send(note.session, {**waiting, **who})

    # Values.

    def _value(self, session: int, message: Message) -> None:
        request = int(message["request"])
        values, answers = self._values, list[Answer]()
        result: object = None
        match message["op"]:
            case "set":
                answers = values.set(str(message["key"]), str(message["value"]))
            case "get":
                deadline = self._loop.time() + float(message["deadline_s"])
                keys = [str(key) for key in message["keys"]]
                self._answer(values.get((session, request), keys, deadline))
                self._arm()
                return
            case "check":
                result = values.check([str(key) for key in message["keys"]])
            case "add":
                result, answers = values.add(
                    str(message["key"]), int(message["amount"])
                )
            case "compare_set":
                result, answers = values.compare_set(
                    str(message["key"]),
                    str(message["expected"]),
                    str(message["desired"]),
                )
            case "delete":
                result = values.delete(str(message["key"]))
            case "count":
                result = values.count()
            case op:
                raise ValueError(f"the store knows no operation {op!r}")
        self._reply(session, request, result)
        self._answer(answers)

    def _answer(self, answers: list[Answer]) -> None:
        for answer in answers:
            session, request = answer.waiter
            if answer.values is None:
                body = {"op": "reply", "request": request, "ok": False}
                self._send(session, {**body, "error": "timeout"})
            else:
                self._reply(session, request, answer.values)

    def _reply(self, session: int, request: int, result: object) -> None:
        body = {"op": "reply", "request": request, "ok": True, "result": result}
        self._send(session, body)

    def _send(self, session: int, message: Message) -> None:
        deliver = self._sessions.get(session)
        if deliver is not None:
            deliver(message)

    # Time.

    def _arm(self) -> None:
        deadlines = (self._registry.next_deadline(), self._values.next_deadline())
        wanted = min((d for d in deadlines if d is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wanted is not None:
            self._timer = self._loop.call_at(wanted, self._tick)

    def _tick(self) -> None:
        self._answer(self._values.expire(self._loop.time()))
        self._handle(registry.Ticked())


def _check_claim(message: Message) -> None:
    """Check what a claim says of itself, before anything is made of it.

    Raises:
        ValueError: It cannot be.
    """
    rank, size = int(message["rank"]), int(message["size"])
    if not 0 <= rank < size <= MAX_SIZE:
        raise ValueError(f"rank {rank} of {size}")
    if not 0 <= float(message["deadline_s"]) <= MAX_WAIT_S:
        raise ValueError("a deadline that cannot be")
    if (
        not 0
        <= int(message["seen"] if "seen" in message else message["epoch"])
        < MAX_EPOCH
    ):
        raise ValueError("an epoch that cannot be")
    if any(not 0 <= int(lost) < size for lost in message.get("lost", ())):
        raise ValueError("a lost rank that cannot be")


def _place(message: Message) -> tuple[int, int]:
    number, count = message.get("place", (0, 1))
    if not 0 <= int(number) < int(count):
        raise ValueError("a place that cannot be")
    return int(number), int(count)
