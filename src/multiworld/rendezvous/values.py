"""Keys and values of the store, as c10d needs them. Pure. The bytes of c10d travel as
Latin-1; counters are stored as decimal text. A ``get`` of a missing key waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Maximum number of characters of all keys, values and awaited keys together. A member
# of a c10d group stores a few hundred.
MAX_HELD = 64 * 1024 * 1024
# Approximate overhead of a text, in characters; counted in addition to its length.
COST = 128

Waiter = tuple[int, int]  # session number and request number


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome for one waiter; ``values`` is None if its deadline passed."""

    waiter: Waiter
    values: list[str] | None


@dataclass(slots=True)
class _Waiting:
    keys: list[str]
    deadline: float


class FullError(Exception):
    """The store is full."""


class Values:
    def __init__(self, max_held: int = MAX_HELD) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[Waiter, _Waiting] = {}
        self._held, self._max_held = 0, max_held

    def _hold(self, cost: int) -> None:
        if cost > 0 and self._held + cost > self._max_held:
            raise FullError
        self._held += cost

    def set(self, key: str, value: str) -> list[Answer]:
        """Set ``key``; return the answers that this completes.

        Raises:
            FullError: There is no room; nothing was set. Other methods raise it, too.
        """
        before = self._values.get(key)
        freed = 0 if before is None else _cost((key, before))
        self._hold(_cost((key, value)) - freed)
        self._values[key] = value
        done = [
            waiter
            for waiter, waiting in self._waiting.items()
            if key in waiting.keys and self.check(waiting.keys)
        ]
        return [self._finish(waiter) for waiter in done]

    def _finish(self, waiter: Waiter) -> Answer:
        waiting = self._forget(waiter)
        return Answer(waiter, [self._values[key] for key in waiting.keys])

    def _forget(self, waiter: Waiter) -> _Waiting:
        waiting = self._waiting.pop(waiter)
        self._hold(-_cost(waiting.keys))
        return waiting

    def get(self, waiter: Waiter, keys: list[str], deadline: float) -> list[Answer]:
        """Return the answer if every key has a value; otherwise register the waiter."""
        if waiter in self._waiting:
            self._forget(waiter)  # the same request may have been sent before
        if self.check(keys):
            return [Answer(waiter, [self._values[key] for key in keys])]
        self._hold(_cost(keys))
        self._waiting[waiter] = _Waiting(keys, deadline)
        return []

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> tuple[int, list[Answer]]:
        """Add to a decimal counter that starts at 0; return the sum and new answers."""
        total = int(self._values.get(key, "0")) + amount
        return total, self.set(key, str(total))

    def compare_set(
        self, key: str, expected: str, desired: str
    ) -> tuple[str, list[Answer]]:
        """Set ``key`` if it is ``expected``; return its value now, and new answers."""
        held = self._values.get(key)
        if held == expected or (held is None and expected == ""):
            return desired, self.set(key, desired)
        return held if held is not None else expected, []

    def delete(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is not None:
            self._hold(-_cost((key, value)))
        return value is not None

    def delete_prefix(self, prefix: str) -> None:
        for key in [key for key in self._values if key.startswith(prefix)]:
            self.delete(key)

    def drop_session(self, session: int) -> None:
        for waiter in [waiter for waiter in self._waiting if waiter[0] == session]:
            self._forget(waiter)

    def expire(self, now: float) -> list[Answer]:
        """Drop the requests whose deadline has passed; return their answers."""
        late = [w for w, waiting in self._waiting.items() if waiting.deadline <= now]
        for waiter in late:
            self._forget(waiter)
        return [Answer(waiter, None) for waiter in late]

    def next_deadline(self) -> float | None:
        return min((w.deadline for w in self._waiting.values()), default=None)


def _cost(texts: Iterable[str]) -> int:
    return sum(COST + len(text) * (1 if text.isascii() else 4) for text in texts)
