"""The store: the registry and the values, behind sessions. Shell.

A session is anything that can take a message: a TCP connection (``StoreServer``) or a
member of the same process (``LocalSession`` in ``session.py``). One service serves any
number of worlds.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from multiworld.rendezvous import registry
from multiworld.rendezvous.registry import Registry
from multiworld.rendezvous.values import Answer, Values

Message = dict[str, Any]
Deliver = Callable[[Message], None]


class StoreService:
    """Carries out what the registry decides. Runs on one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._registry = Registry()
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

    def receive(self, session: int, message: Message) -> None:
        """Take one message of a session.

        Raises:
            KeyError, TypeError, ValueError: The message is not one of ours.
        """
        match message["op"]:
            case "claim":
                self._handle(self._claim(session, message))
            case "left":
                self._handle(
                    registry.Left(
                        session,
                        str(message["world"]),
                        int(message["epoch"]),
                        int(message["rank"]),
                    )
                )
            case "withdraw":
                self._handle(registry.Withdrawn(session, int(message["request"])))
            case "answer":
                self._handle(
                    registry.Answered(int(message["ask"]), bool(message["holds"]))
                )
            case _:
                self._value(session, message)

    def _claim(self, session: int, message: Message) -> registry.Claimed:
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
        )

    def _handle(self, happening: registry.Happening) -> None:
        for action in self._registry.handle(happening, self._loop.time()):
            match action:
                case registry.Reply(session, request, body):
                    self._send(session, {"op": "reply", "request": request, **body})
                case registry.Ask(session, ask, world, epoch, rank):
                    question = {"world": world, "epoch": epoch, "rank": rank}
                    self._send(session, {"op": "ask", "ask": ask, **question})
                case registry.Forget(prefix):
                    self._values.delete_prefix(prefix)
        self._arm()

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
