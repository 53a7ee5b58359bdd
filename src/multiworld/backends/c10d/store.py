"""The multiworld store as a c10d ``Store``, whose calls block. Closing the connection
fails a blocked call, and the group's constructor raises that error."""

from __future__ import annotations

from datetime import timedelta
from types import NoneType

from torch.distributed import Store

from multiworld.config import MAX_WAIT_S
from multiworld.rendezvous import store_messages as messages
from multiworld.rendezvous.blocking_values import BlockingValues


class C10dStore(Store):
    """Keys of one incarnation, under a prefix of the store; it owns ``values``."""

    def __init__(self, values: BlockingValues, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._values, self._prefix = values, prefix
        self.set_timeout(timedelta(seconds=timeout_s))
        self.seen: dict[str, bytes] = {}  # values that were set or read, by key

    def close(self) -> None:
        """Close the connection; every waiting call raises an error."""
        self._values.close()

    def _key(self, key: str) -> str:
        return self._prefix + key

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.seen[key] = data
        request = messages.SetValue(0, self._key(key), data.decode("latin-1"))
        self._values.request(request, NoneType)

    def get(self, key: str) -> bytes:
        self.seen[key] = data = self._get([key])[0]
        return data

    def _get(self, keys: list[str], timeout: timedelta | None = None) -> list[bytes]:
        wanted = tuple(self._key(key) for key in keys)
        if timeout is None:
            timeout = self.timeout  # type: ignore[attr-defined]
        limit_s = min(timeout.total_seconds(), MAX_WAIT_S)
        found = self._values.request(messages.GetValues(0, wanted, limit_s), list)
        return [str(value).encode("latin-1") for value in found]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._get(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        return self._values.request(messages.AddAmount(0, self._key(key), amount), int)

    def compare_set(
        self, key: str, expected: str | bytes, desired: str | bytes
    ) -> bytes:
        request = messages.CompareSet(
            0, self._key(key), _text(expected), _text(desired)
        )
        return self._values.request(request, str).encode("latin-1")

    def check(self, keys: list[str]) -> bool:
        wanted = tuple(self._key(key) for key in keys)
        return self._values.request(messages.CheckKeys(0, wanted), bool)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
