"""The multiworld store as a c10d ``Store``, whose calls block. Closing the connection
fails a blocked call, and the group's constructor raises that error."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import NoneType

from torch.distributed import Store

from multiworld.config import MAX_WAIT_S
from multiworld.rendezvous import store_messages as messages
from multiworld.rendezvous.blocking_values import BlockingValues

# Called with each key and value that is read or written.
Recorder = Callable[[str, bytes], None]


class C10dStore(Store):
    """Keys of one incarnation, under a prefix of the store; it owns ``values``."""

    def __init__(
        self, values: BlockingValues, prefix: str, timeout_s: float, record: Recorder
    ) -> None:
        super().__init__()
        self._values, self._prefix = values, prefix
        self._timeout_s = timeout_s
        self._record = record

    def fileno(self) -> int:
        return self._values.fileno()

    def close(self) -> None:
        """Close the connection; every waiting call raises an error."""
        self._values.close()

    def _key(self, key: str) -> str:
        return self._prefix + key

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._record(key, data)
        request = messages.SetValue(0, self._key(key), data.decode("latin-1"))
        self._values.request(request, NoneType)

    def get(self, key: str) -> bytes:
        data = self._get([key], self._timeout_s)[0]
        self._record(key, data)
        return data

    def _get(self, keys: list[str], timeout_s: float) -> list[bytes]:
        wanted = tuple(self._key(key) for key in keys)
        found = self._values.request(
            messages.GetValues(0, wanted, min(timeout_s, MAX_WAIT_S)), list
        )
        return [str(value).encode("latin-1") for value in found]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._get(keys, self._timeout_s)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        self._get(keys, limit)

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

    def delete_key(self, key: str) -> bool:
        return self._values.request(messages.DeleteKey(0, self._key(key)), bool)

    def num_keys(self) -> int:
        """Return the number of keys in the whole store, not only under the prefix."""
        return self._values.request(messages.CountKeys(0), int)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
