"""Claims and ranks by session, so that no message has to search the worlds. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from multiworld.rendezvous.claims import RequestKey, SessionKey


@dataclass(slots=True)
class _Session:
    """Ranks by world (some may be outdated), and worlds by request, of one session."""

    ranks: dict[str, set[int]] = field(default_factory=dict)
    waiting: dict[RequestKey, str] = field(default_factory=dict)
    admitted: dict[RequestKey, str] = field(default_factory=dict)


class SessionIndex:
    def __init__(self) -> None:
        self._sessions: dict[SessionKey, _Session] = {}

    def _of(self, session: SessionKey) -> _Session:
        return self._sessions.get(session, _Session())

    def waiting_count(self, session: SessionKey) -> int:
        return len(self._of(session).waiting)

    def wait(self, session: SessionKey, request: RequestKey, world: str) -> None:
        found = self._sessions.setdefault(session, _Session())
        found.waiting[request] = world

    def answer(
        self, session: SessionKey, request: RequestKey, *, is_admitted: bool
    ) -> None:
        found = self._of(session)
        world = found.waiting.pop(request, None)
        if world is not None and is_admitted:
            found.admitted[request] = world

    def forget(self, session: SessionKey, request: RequestKey) -> str | None:
        """Remove a request; return its world, or None if there was no such request."""
        found = self._of(session)
        world = found.waiting.pop(request, None)
        return found.admitted.pop(request, None) if world is None else world

    def add_rank(self, session: SessionKey, world: str, rank: int) -> None:
        found = self._sessions.setdefault(session, _Session())
        found.ranks.setdefault(world, set()).add(rank)

    def ranks(self, session: SessionKey, world: str) -> list[int]:
        """Return the ranks of a world that a session may have claimed or held."""
        return list(self._of(session).ranks.get(world, ()))

    def forget_world(self, world: str, sessions: Iterable[SessionKey]) -> None:
        for session in sessions:
            self._of(session).ranks.pop(world, None)

    def end(self, session: SessionKey) -> dict[str, set[int]]:
        """Remove a session; return the ranks by world that it may have claimed."""
        return self._sessions.pop(session, _Session()).ranks
