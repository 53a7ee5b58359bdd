"""Memory and time that the bodies of all requests of a gateway may take. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.errors import InvalidRequestError, OverloadedError

FIRST_S = 30.0
"""Seconds that a client has for a body, besides what its size adds."""

BYTES_PER_S = 100_000
"""Least rate at which a body must arrive, in bytes a second, after ``FIRST_S``."""

WHOLE_S = 300.0
"""Most seconds that a body may take, whatever its size."""

RETRY_S = 1.0
"""Seconds after which a client should try again when the memory is used up."""


class NoMemoryError(OverloadedError):
    """The bodies of requests under way fill the memory that they may have."""

    status = 503


class TooLargeError(InvalidRequestError):
    """The body is larger than the gateway accepts."""

    status = 413


class TooSlowError(InvalidRequestError):
    """The client sends its body too slowly."""

    status = 408


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Most bytes of a body, as sent and decompressed.

    Attributes:
        json_bytes: Most bytes of a body in JSON, or of the JSON part of another one; at
            most ``body_bytes``.
        body_bytes: Most bytes of a body with binary tensors.
    """

    json_bytes: int
    body_bytes: int

    def check(self, size: int, *, is_binary: bool) -> None:
        """Check the size of a body, or of the part of it that has arrived.

        Args:
            size: Bytes.
            is_binary: Whether it has binary tensors.

        Raises:
            TooLargeError: It is too large.
        """
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
    """Return the seconds from its start until a body of ``size`` bytes must be here."""
    return min(FIRST_S + size / BYTES_PER_S, WHOLE_S)


@dataclass(slots=True, eq=False)
class BodyBudget:
    """Bytes that the bodies of all requests under way may occupy together.

    Attributes:
        limit: Most bytes.
        used: Bytes in use.
    """

    limit: int
    used: int = 0

    def reserve(self, size: int) -> None:
        """Take ``size`` bytes, until ``release``.

        Raises:
            NoMemoryError: They do not fit.
        """
        if self.used + size > self.limit:
            raise NoMemoryError(
                f"bodies of requests under way fill the {self.limit / 2**20:g} MiB of "
                "this gateway (gateway.max_bodies_mb); retry later",
                retry_after_s=RETRY_S,
            )
        self.used += size

    def release(self, size: int) -> None:
        """Give ``size`` bytes back."""
        self.used -= size


@dataclass(slots=True, eq=False)
class Reservation:
    """Bytes that one request has taken from the budget.

    Attributes:
        budget: The budget.
        size: Bytes taken so far.
    """

    budget: BodyBudget
    size: int = 0

    def add(self, size: int) -> None:
        """Take more bytes.

        Raises:
            NoMemoryError: They do not fit.
        """
        self.budget.reserve(size)
        self.size += size

    def give_back(self, size: int) -> None:
        """Give some of the bytes back."""
        self.budget.release(size)
        self.size -= size

    def release(self) -> None:
        """Give all bytes back; safe to repeat."""
        self.give_back(self.size)
