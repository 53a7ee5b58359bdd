"""The frame header: round trips, and damage at every bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.backends import header as wire
from multiworld.backends.header import Header, HeaderError

u8, u32 = st.integers(0, 255), st.integers(0, 2**32 - 1)
u64, i64 = st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)


@given(
    shape=st.lists(u64, max_size=6).map(tuple),
    fields=st.tuples(u8, u8, u8, u8, u64, u64, i64, u32, u32, u64, u32, u32),
)
def test_header_when_decoded_then_equal(
    shape: tuple[int, ...], fields: tuple[int, ...]
) -> None:
    kind, flags, dtype, *rest = fields
    header = Header(kind, flags, dtype, len(shape), *rest)
    data = memoryview(wire.encode(header, shape))
    assert wire.decode(data, 0, len(data)) == (header, shape)
    apart = memoryview(b"xx" + bytes(data) + b"yyy")
    assert wire.decode(apart, 2, 2 + len(data)) == (header, shape)
    assert wire.decode(apart, 2, 1 + len(data)) is None


def test_header_when_any_bit_is_flipped_then_refused() -> None:
    good = wire.encode(Header(0, 1, 2, 2, 0, 3, 4, 5, 0, 24, 24, 0, 0), (2, 3))
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(HeaderError):
            _decode(bytes(bad))


def _decode(data: bytes) -> None:
    # A damaged header may announce a wrong length, so offer it more bytes.
    if wire.decode(memoryview(data + bytes(1000)), 0, len(data) + 1000) is None:
        raise HeaderError("its length is wrong")
