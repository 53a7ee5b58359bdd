"""Origin of work: a request's id and its span. Pure."""

from __future__ import annotations

import re
from contextvars import ContextVar

import msgspec

TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
"""The header of W3C's Trace Context: version, trace id, parent id and flags."""

SAMPLED = 1  # the only flag of version 00 of Trace Context


class Parent(msgspec.Struct, frozen=True, array_like=True):
    """A span that has child spans; its ids are hexadecimal digits."""

    trace: str
    span: str
    is_sampled: bool

    @property
    def header(self) -> str:
        """Value of the header ``traceparent``."""
        return f"00-{self.trace}-{self.span}-{SAMPLED * self.is_sampled:02x}"


def parent_of(header: str) -> Parent | None:
    """Return the span that a ``traceparent`` header names; None if it is invalid."""
    found = TRACEPARENT.match(header.strip())
    if found is None:
        return None
    version, trace, span, flags = found.groups()
    rest = header.strip()[found.end() :]
    # Later versions may add parts after a hyphen.
    is_later = version not in ("00", "ff") and rest.startswith("-")
    is_valid = version != "ff" and (not rest or is_later)
    if not is_valid or not int(trace, 16) or not int(span, 16):
        return None
    return Parent(trace, span, bool(int(flags, 16) & SAMPLED))


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Request that a message is about."""

    request: str = ""  # id of the request, for logs; empty: none
    parent: Parent | None = None  # the request's span at its gateway; None: not traced

    @property
    def is_sampled(self) -> bool:
        return self.parent is not None and self.parent.is_sampled

    @property
    def headers(self) -> dict[str, str]:
        """Headers with which an external engine's server joins the trace."""
        return {} if self.parent is None else {"traceparent": self.parent.header}

    def recovered(self) -> Origin:
        """Return the origin of a further attempt, which is always sampled."""
        if self.parent is None or self.parent.is_sampled:
            return self
        parent = msgspec.structs.replace(self.parent, is_sampled=True)
        return Origin(self.request, parent)


NOWHERE = Origin()

ORIGIN: ContextVar[Origin] = ContextVar("origin", default=NOWHERE)
"""The request that the current task works for."""
