"""The store: the registry and the values, behind sessions. A session is a TCP
connection (``StoreServer``) or a connection inside this process (``Joiner``)."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Protocol

import msgspec

from multiworld.net.rare_log import RareLog
from multiworld.rendezvous import claims, store_messages
from multiworld.rendezvous.admission import Registry
from multiworld.rendezvous.reform import ReformClaim
from multiworld.rendezvous.store_messages import (
    ClaimOutcome,
    StoreMessage,
    StoreRequest,
)
from multiworld.rendezvous.values import MAX_HELD, Answer, FullError, Values

logger = logging.getLogger("multiworld.store")
rare_log = RareLog(logger)

Deliver = Callable[[StoreMessage], None]


class EpochMemory(Protocol):
    """Epochs that survive a restart of the store."""

    def epochs(self) -> dict[str, int]:
        """Return the highest epoch of every name."""

    def remember(self, world: str, epoch: int) -> None:
        """Store the highest epoch of a name."""


class StoreService:
    """Carries out the decisions of the registry, on one event loop."""

    def __init__(
        self, *, memory: EpochMemory | None = None, settle_s: float = 0.0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._registry = Registry(None if memory is None else memory.epochs())
        # Until this time, claims wait: the members of existing worlds report their
        # ranks first.
        self._settled_at = self._loop.time() + settle_s
        self._deferred: dict[tuple[int, int], asyncio.TimerHandle] = {}
        self._values = Values()
        self._sessions: dict[int, Deliver] = {}
        self._opened = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    def is_on_this_loop(self) -> bool:
        """Return whether the store runs on the current event loop, not on another."""
        return self._loop is asyncio.get_running_loop()

    @property
    def is_elsewhere(self) -> bool:
        """True if it runs on another event loop, in another thread."""
        return not self.is_on_this_loop() and self._loop.is_running()

    def open_session(self, deliver: Deliver) -> int:
        """Open a session whose messages go to ``deliver``; return its number."""
        self._opened += 1
        self._sessions[self._opened] = deliver
        return self._opened

    def close_session(self, session: int) -> None:
        """End a session: drop its claims, and release its ranks."""
        if self._sessions.pop(session, None) is not None:
            self._values.drop_session(session)
            self._handle(claims.SessionEnded(session))

    def refuse(self, world: str, outcome: ClaimOutcome) -> None:
        self._handle(claims.Refused(world, outcome))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for deferred in self._deferred.values():
            deferred.cancel()

    def receive(self, session: int, message: StoreRequest) -> None:
        if session not in self._sessions:
            return
        match message:
            case store_messages.Claim() | store_messages.SurvivorClaim():
                if problem := _problem(message):
                    self._refuse_claim(session, message, problem)
                else:
                    self._when_settled(session, self._claim(session, message))
            case store_messages.Withdraw(request):
                deferred = self._deferred.pop((session, request), None)
                if deferred is not None:
                    deferred.cancel()
                self._handle(claims.Received(session, message))
            case (
                store_messages.Announce()
                | store_messages.Leave()
                | store_messages.HoldsAnswer()
            ):
                self._handle(claims.Received(session, message))
            case _:
                self._value(session, message)

    def _claim(
        self, session: int, claim: store_messages.Claim | store_messages.SurvivorClaim
    ) -> claims.Claimed | ReformClaim:
        is_newcomer = isinstance(claim, store_messages.Claim)
        kind = claims.Claimed if is_newcomer else ReformClaim
        return kind(
            **msgspec.structs.asdict(claim),
            session=session,
            deadline=self._loop.time() + claim.deadline_s,
            fresh_nonce=secrets.randbits(63) | 1,
        )

    def _refuse_claim(
        self,
        session: int,
        claim: store_messages.Claim | store_messages.SurvivorClaim,
        problem: str,
    ) -> None:
        """Refuse an invalid claim, and all claims that wait for its world."""
        detail = f"rank {claim.rank} of {claim.size} was refused: {problem}"
        outcome = store_messages.TermsDiffer(detail)
        self._send(session, store_messages.Reply(claim.request, outcome))
        self.refuse(claim.world, outcome)

    def _when_settled(self, session: int, claim: claims.Claimed | ReformClaim) -> None:
        """Acknowledge a claim at once; handle it after the settling time."""
        self._send(session, store_messages.ClaimReceived(claim.request))
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

    def _handle(self, happening: claims.Happening) -> None:
        for action in self._registry.handle(happening, self._loop.time()):
            match action:
                case claims.Send(session, message):
                    self._send(session, message)
                case claims.Remember(world, epoch):
                    self._remember(world, epoch)
                case claims.Forget(prefix):
                    self._values.delete_prefix(prefix)
        self._arm()

    def _remember(self, world: str, epoch: int) -> None:
        if self._memory is None:
            return
        try:
            self._memory.remember(world, epoch)
        except OSError as error:
            # The waiting members are admitted even if the epoch cannot be stored.
            rare_log.error("the store cannot record the epochs of worlds", error)

    # Values.

    def _value(self, session: int, message: store_messages.ValueRequest) -> None:
        try:
            self._carry_out(session, message)
        except FullError:
            full = store_messages.Full(MAX_HELD)
            self._send(session, store_messages.Reply(message.request, full))

    def _carry_out(self, session: int, message: store_messages.ValueRequest) -> None:
        request = message.request
        values, answers = self._values, list[Answer]()
        result: bool | int | str | None = None
        match message:
            case store_messages.GetValues(_, keys, deadline_s):
                deadline = self._loop.time() + deadline_s
                self._answer(values.get((session, request), list(keys), deadline))
                self._arm()
                return
            case store_messages.SetValue(_, key, value):
                answers = values.set(key, value)
            case store_messages.CheckKeys(_, keys):
                result = values.check(list(keys))
            case store_messages.AddAmount(_, key, amount):
                result, answers = values.add(key, amount)
            case store_messages.CompareSet(_, key, expected, desired):
                result, answers = values.compare_set(key, expected, desired)
        self._send(
            session, store_messages.Reply(request, store_messages.Result(result))
        )
        self._answer(answers)

    def _answer(self, answers: list[Answer]) -> None:
        for answer in answers:
            session, request = answer.waiter
            outcome: store_messages.Result | store_messages.NoValue = (
                store_messages.NoValue()
            )
            if answer.values is not None:
                outcome = store_messages.Result(answer.values)
            self._send(session, store_messages.Reply(request, outcome))

    def _send(self, session: int, message: StoreMessage) -> None:
        deliver = self._sessions.get(session)
        if deliver is not None:
            deliver(message)

    # Time.

    def _arm(self) -> None:
        deadlines = (self._registry.next_deadline(), self._values.next_deadline())
        wanted = min((d for d in deadlines if d is not None), default=None)
        if self._timer is not None:
            if self._timer.when() == wanted:
                return
            self._timer.cancel()
            self._timer = None
        if wanted is not None:
            self._timer = self._loop.call_at(wanted, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._answer(self._values.expire(self._loop.time()))
        self._handle(claims.Ticked())


def _problem(claim: store_messages.Claim | store_messages.SurvivorClaim) -> str:
    """Return why the fields of a claim are inconsistent, or ""."""
    if claim.rank >= claim.size:
        return "the rank is out of range"
    if isinstance(claim, store_messages.SurvivorClaim) and any(
        lost >= claim.size for lost in claim.lost
    ):
        return "a lost rank is out of range"
    number, count = claim.place
    if not 0 <= number < count:
        return "the store's position in the list is out of range"
    return ""
