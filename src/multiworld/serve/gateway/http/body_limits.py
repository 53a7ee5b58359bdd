"""Limits on the memory and the transfer time of request bodies. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from multiworld.errors import InvalidRequestError, OverloadedError

FIRST_S = 30.0  # seconds to send a body, in addition to its size / ``BYTES_PER_S``
BYTES_PER_S = 100_000
WHOLE_S = 300.0  # maximum seconds to send a body of any size
RETRY_S = 1.0  # ``Retry-After`` in seconds when the memory is used up


class NoMemoryError(OverloadedError):
    """The bodies of requests in flight fill the memory reserved for bodies."""

    status = 503


class TooLargeError(InvalidRequestError):
    status = 413


class TooSlowError(InvalidRequestError):
    status = 408


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Maximum bytes of a body, as sent and as decompressed."""

    json_bytes: int  # of a JSON body, or of the JSON before binary tensors
    body_bytes: int  # of a whole body with binary tensors

    def check(self, size: int, *, is_binary: bool) -> None:
        if size <= (self.body_bytes if is_binary else self.json_bytes):
            return
        if is_binary or self.json_bytes == self.body_bytes:
            raise TooLargeError(
                f"body is larger than {self.body_bytes / 2**20:g} MiB; send less, or "
                "raise gateway.max_body_mb"
            )
        raise TooLargeError(
            f"JSON is larger than {self.json_bytes / 2**20:g} MiB; send tensors as "
            "binary data, split the request, or raise gateway.max_json_mb"
        )


def limit_s(size: int) -> float:
    """Return the seconds within which a body of ``size`` bytes must arrive."""
    return min(FIRST_S + size / BYTES_PER_S, WHOLE_S)


@dataclass(slots=True, eq=False)
class BodyBudget:
    """Limit on the total bytes of the bodies of all requests in flight.

    A tenant may use half of the limit, so that it cannot lock out other tenants, but at
    least ``largest`` (the maximum size of one body).
    """

    limit: int
    largest: int = 0
    used: int = 0
    has_tenants: bool = False  # False: clients without a key may use the whole limit
    _of: Counter[str] = field(default_factory=Counter)  # reserved bytes, by tenant

    def reserve(self, size: int, tenant: str = "") -> None:
        """Reserve ``size`` bytes; raise ``NoMemoryError`` if they do not fit."""
        most = max(self.limit / 2, self.largest)
        is_shared = bool(tenant) or self.has_tenants
        if is_shared and self._of[tenant] + size > most:
            raise NoMemoryError(
                f"bodies of this tenant's requests fill its share of this gateway's "
                f"memory, {most / 2**20:g} MiB (gateway.max_bodies_mb); retry later",
                retry_after_s=RETRY_S,
            )
        if self.used + size > self.limit:
            raise NoMemoryError(
                f"bodies of requests in flight fill the {self.limit / 2**20:g} MiB of "
                "this gateway (gateway.max_bodies_mb); retry later",
                retry_after_s=RETRY_S,
            )
        self.used += size
        self._of[tenant] += size

    def release(self, size: int, tenant: str = "") -> None:
        self.used -= size
        self._of[tenant] -= size
        if not self._of[tenant]:
            del self._of[tenant]


@dataclass(slots=True, eq=False)
class Reservation:
    budget: BodyBudget
    tenant: str = ""  # empty: an anonymous client
    size: int = 0

    def add(self, size: int) -> None:
        self.budget.reserve(size, self.tenant)
        self.size += size

    def remove(self, size: int) -> None:
        self.budget.release(size, self.tenant)
        self.size -= size

    def release(self) -> None:
        """Release all bytes; safe to repeat."""
        self.remove(self.size)
