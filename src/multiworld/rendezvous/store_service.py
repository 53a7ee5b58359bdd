"""The store: the registry and the values, behind sessions. Shell.

A session is anything that can take a message: a TCP connection (``StoreServer``) or a
member of the same process (``LocalConnection`` in ``store_session``). One service
serves any number of worlds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from multiworld.net import frames
from multiworld.rendezvous import registry
from multiworld.rendezvous.reform import ReformClaim
from multiworld.rendezvous.registry import Registry
from multiworld.rendezvous.values import Answer, Values

logger = logging.getLogger("multiworld.store")

MAX_SIZE = 65_536
"""Largest world size that a claim may ask for."""

MAX_WAIT_S = 30 * 86_400.0
"""Seconds that a claim may ask to wait, at most."""

MAX_EPOCH = 1 << 53
"""Upper bound of epochs: the integers below it survive any JSON reader."""

Message = dict[str, Any]
Deliver = Callable[[Message], None]


class EpochMemory(Protocol):
    """Epochs that survive a restart of the store."""

    def epochs(self) -> dict[str, int]:
        """Return the highest epoch of every name."""

    def remember(self, world: str, epoch: int) -> None:
        """Store the highest epoch of a name."""


class StoreService:
    """Carries out the decisions of the registry. Runs on one event loop.

    Args:
        memory: Durable epochs, if any.
        settle_s: Seconds after the start during which claims are deferred, so that
            members of older worlds can first report the ranks that they hold.
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
        """Number of open sessions."""
        return len(self._sessions)

    @property
    def waiting_count(self) -> int:
        """Number of claims that wait for other members."""
        return self._registry.waiting_count()

    def is_on_this_loop(self) -> bool:
        """Tell whether this service belongs to the running event loop.

        A store inside a process may be left over from a loop that has ended.
        """
        return self._loop is asyncio.get_running_loop()

    def open_session(self, deliver: Deliver) -> int:
        """Open a session whose messages go to ``deliver``; return its number."""
        self._opened += 1
        self._sessions[self._opened] = deliver
        return self._opened

    def close_session(self, session: int) -> None:
        """End a session: drop its claims, and let other claims take its ranks."""
        if self._sessions.pop(session, None) is not None:
            self._values.drop_session(session)
            self._handle(registry.SessionEnded(session))

    def refuse(self, world: str, error: Message) -> None:
        """Refuse every claim that waits for ``world``, with ``error``."""
        self._handle(registry.Refused(world, error))

    def close(self) -> None:
        """Stop all timers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for deferred in self._deferred.values():
            deferred.cancel()

    def receive(self, session: int, message: Message) -> None:
        """Handle one message from a session.

        Raises:
            KeyError: The message lacks a field.
            TypeError: A field has the wrong type.
            ValueError: A field has an invalid value, or the operation is unknown.
        """
        with frames.refusing_wrong_fields():
            self._receive(session, message)

    def _receive(self, session: int, message: Message) -> None:
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
        """Acknowledge a claim at once; handle it when the settling time is over."""
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
        except OSError as error:  # no reason to refuse the waiting members
            logger.error("cannot store epoch %d of world %r: %s", epoch, world, error)

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
                seconds = float(message["deadline_s"])
                if math.isnan(seconds):  # a timer at NaN would fire without end
                    raise ValueError("deadline_s is not a number")
                deadline = self._loop.time() + seconds
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
                raise ValueError(f"unknown store operation {op!r}")
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
    """Check the numbers in a claim before anything uses them.

    Raises:
        ValueError: A number is out of range.
    """
    rank, size = int(message["rank"]), int(message["size"])
    if not 0 <= rank < size <= MAX_SIZE:
        raise ValueError(f"rank {rank} of {size} is out of range")
    if not 0 <= float(message["deadline_s"]) <= MAX_WAIT_S:
        raise ValueError("deadline_s is out of range")
    if (
        not 0
        <= int(message["seen"] if "seen" in message else message["epoch"])
        < MAX_EPOCH
    ):
        raise ValueError("the epoch is out of range")
    if any(not 0 <= int(lost) < size for lost in message.get("lost", ())):
        raise ValueError("a lost rank is out of range")


def _place(message: Message) -> tuple[int, int]:
    number, count = message.get("place", (0, 1))
    if not 0 <= int(number) < int(count):
        raise ValueError("the place is out of range")
    return int(number), int(count)
