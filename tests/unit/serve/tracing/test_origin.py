"""W3C's Trace Context, as requests bring it and messages carry it."""

from __future__ import annotations

import msgspec
import pytest

from multiworld.serve.wire.generation_messages import Sampling, SequenceStart
from multiworld.serve.wire.origin import NOWHERE, Origin, Parent, parent_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # a flag that version 00 does not know
        (f" 00-{TRACE}-{SPAN}-01 ", True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
    ],
)
def test_parent_is_read(header: str, is_sampled: bool) -> None:
    assert parent_of(header) == Parent(TRACE, SPAN, is_sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
    ],
)
def test_invalid_parent_is_ignored(header: str) -> None:
    assert parent_of(header) is None


def test_header_of_a_parent_is_read_as_that_parent() -> None:
    for is_sampled in (True, False):
        parent = Parent(TRACE, SPAN, is_sampled)
        assert parent_of(parent.header) == parent
    assert Origin("id", parent).headers == {"traceparent": parent.header}
    assert NOWHERE.headers == {}


def test_further_attempts_are_sampled() -> None:
    origin = Origin("id", Parent(TRACE, SPAN, is_sampled=False))
    assert origin.recovered() == Origin("id", Parent(TRACE, SPAN, is_sampled=True))
    assert NOWHERE.recovered() is NOWHERE


def test_message_of_a_release_without_origins_is_read() -> None:
    start = SequenceStart(("g", 1, 2), (1,), 1, ("r",), Sampling())
    whole = msgspec.to_builtins(start)
    assert msgspec.convert(whole[:-1], SequenceStart) == start
    more = [*whole, "of a later release"]
    assert msgspec.convert(more, SequenceStart) == start
