"""Request bodies that are too large, too slow, compressed or incomplete."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import threading
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from multiworld.errors import InvalidRequestError
from multiworld.serve.gateway.http import body_limits as budgets
from multiworld.serve.gateway.http.body_limits import (
    BodyBudget,
    BodyLimits,
    NoMemoryError,
    Reservation,
    TooLargeError,
    TooSlowError,
    limit_s,
)
from multiworld.serve.gateway.http.http_request import (
    CONNECTION,
    IS_COMPLETE,
    Connection,
    HttpRequest,
)
from multiworld.serve.gateway.http.request_body import (
    FIRST_BYTES,
    ClientGoneError,
    UnknownEncodingError,
    read_body,
    while_connected,
)
from tests.unit.serve.edges import HANG_S, settle


class FakeClient:
    """Client that sends the given parts, and then waits or hangs up."""

    def __init__(self, *parts: bytes, hangs_up: bool = False, is_whole: bool = True):
        last = len(parts) - 1
        self.messages: list[dict[str, Any]] = [
            {
                "type": "http.request",
                "body": part,
                "more_body": number < last or not is_whole,
            }
            for number, part in enumerate(parts)
        ]
        self._is_gone = asyncio.Event()
        self._connection = Connection()
        if hangs_up:
            self.hang_up()

    def hang_up(self) -> None:
        self._is_gone.set()
        self._connection.lost()

    async def receive(self) -> Any:
        if self.messages:
            return self.messages.pop(0)
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    def request(
        self, headers: Sequence[tuple[str, str]] = (), *, is_complete: bool = False
    ) -> HttpRequest:
        encoded = [(name.encode(), value.encode()) for name, value in headers]
        scope: dict[str, Any] = {"headers": encoded, CONNECTION: self._connection}
        if is_complete:
            scope[IS_COMPLETE] = True
        return HttpRequest(scope, self.receive)


LIMITS = BodyLimits(json_bytes=100, body_bytes=200)


def room(size: int = 1 << 20) -> Reservation:
    return Reservation(BodyBudget(size))


async def read(
    *parts: bytes, limit: int = 100, headers: Sequence[tuple[str, str]] = ()
) -> bytes:
    limits = BodyLimits(limit, limit)
    return bytes(await read_body(FakeClient(*parts).request(headers), limits, room()))


async def test_parts_are_joined_and_each_is_counted_as_it_comes() -> None:
    sizes: list[int] = []
    client = FakeClient(b"ab", b"", b"cde", b"")
    assert await read_body(client.request(), LIMITS, room(), sizes.append) == b"abcde"
    assert sum(sizes) == 5
    assert await read(b"") == b""


@pytest.mark.parametrize("length", ["101", "1" * 19, "1" * 5000])
async def test_declared_length_beyond_the_limit_is_refused_unread(length: str) -> None:
    client = FakeClient(b"x")
    with pytest.raises(TooLargeError, match="max_json_mb"):
        await read_body(client.request([("content-length", length)]), LIMITS, room())
    assert len(client.messages) == 1


async def test_body_beyond_the_limit_is_refused_where_it_exceeds_it() -> None:
    for headers in ([], [("content-length", "3")]):
        client = FakeClient(b"x" * 60, b"x" * 60, b"x" * 60)
        sizes: list[int] = []
        with pytest.raises(TooLargeError):
            await read_body(client.request(headers), LIMITS, room(), sizes.append)
        assert (sum(sizes), len(client.messages)) == (120, 1)
    assert len(await read(b"x" * 100)) == 100


async def test_body_has_a_limit_of_time_that_parts_do_not_renew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a byte now and then would hold it for ever."""
    monkeypatch.setattr(budgets, "FIRST_S", 0.1)
    client = FakeClient(b"{", is_whole=False)
    with pytest.raises(TooSlowError, match="1 bytes of the body arrived in 0 s"):
        await asyncio.wait_for(read_body(client.request(), LIMITS, room()), HANG_S)

    class Dribbling(FakeClient):
        async def receive(self) -> Any:
            await asyncio.sleep(0.02)
            return await super().receive()

    slow = Dribbling(*[b"x"] * 90)
    with pytest.raises(TooSlowError):
        await asyncio.wait_for(read_body(slow.request(), LIMITS, room()), HANG_S)
    assert len(slow.messages) > 50


def test_time_for_a_body_grows_with_what_has_arrived_up_to_a_limit() -> None:
    """A slow but honest client gets a large body through."""
    assert limit_s(0) == 30.0
    assert limit_s(10_000_000) == 130.0
    assert limit_s(10**12) == 300.0


async def test_json_has_a_lower_limit_than_binary_tensors() -> None:
    """JSON costs far more to parse, also in the JSON part of a binary body."""
    limits = BodyLimits(json_bytes=100, body_bytes=1000)
    binary = [("inference-header-content-length", "50")]
    client = FakeClient(b"x" * 600)
    read_any = partial(read_body, may_be_binary=True)
    got = await read_any(client.request(binary), limits, room())
    assert len(got) == 600
    with pytest.raises(
        TooLargeError, match="max_json_mb"
    ):  # of a route without tensors
        await read_body(FakeClient(b"x" * 600).request(binary), limits, room())
    with pytest.raises(TooLargeError, match="max_json_mb"):
        await read_body(FakeClient(b"x" * 101).request(), limits, room())
    with pytest.raises(TooLargeError, match="max_body_mb"):
        await read_any(FakeClient(b"x" * 1001).request(binary), limits, room())
    much = [("inference-header-content-length", "101")]
    with pytest.raises(TooLargeError, match="max_json_mb"):
        await read_any(FakeClient(b"x" * 600).request(much), limits, room())


async def test_bodies_of_all_requests_share_a_budget() -> None:
    budget = BodyBudget(250)
    held = [Reservation(budget) for _ in range(3)]
    for one in held[:2]:
        await read_body(FakeClient(b"x" * 60, b"x" * 40).request(), LIMITS, one)
    assert budget.used == 200
    with pytest.raises(NoMemoryError, match="max_bodies_mb") as refused:
        await read_body(FakeClient(b"x" * 60).request(), LIMITS, held[2])
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1.0)
    held[0].release()
    held[0].release()
    await read_body(FakeClient(b"x" * 60).request(), LIMITS, held[2])
    for one in held:
        one.release()
    assert budget.used == 0


async def test_decompression_is_charged_and_takes_its_share_of_the_budget() -> None:
    limits = BodyLimits(10**6, 10**6)
    budget = BodyBudget(400_000)
    reservation = Reservation(budget)
    packed = gzip.compress(b"x" * 300_000)
    headers = [("content-encoding", "gzip")]
    sent: list[int] = []
    added: list[int] = []
    request = FakeClient(packed).request(headers)
    await read_body(request, limits, reservation, sent.append, added.append)
    assert (sum(sent), sum(added)) == (len(packed), 300_000 - len(packed))
    assert budget.used == 300_000
    request = FakeClient(packed).request(headers)
    with pytest.raises(NoMemoryError):
        await read_body(request, limits, Reservation(budget))


async def test_decompression_of_a_body_that_is_refused_is_charged() -> None:
    packed = gzip.compress(b"x" * 10**6)
    request = FakeClient(packed).request([("content-encoding", "gzip")])
    limits, added = BodyLimits(10**5, 10**5), list[int]()
    with pytest.raises(TooLargeError):
        await read_body(
            request, limits, Reservation(BodyBudget(10**7)), on_unpacked=added.append
        )
    assert 10**4 < sum(added) <= 10**5


async def test_client_that_hangs_up_within_its_body_is_gone() -> None:
    client = FakeClient(b"{", hangs_up=True, is_whole=False)
    with pytest.raises(ClientGoneError):
        await asyncio.wait_for(read_body(client.request(), LIMITS, room()), HANG_S)


async def test_cancelling_ends_the_reading() -> None:
    """A cancelled read is not mistaken for a slow client."""
    reading = asyncio.ensure_future(
        read_body(FakeClient(b"{", is_whole=False).request(), LIMITS, room())
    )
    await settle()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(b"hello", mtime=0)),
        ("GZIP", gzip.compress(b"hello", mtime=0)),
        ("deflate", zlib.compress(b"hello")),
        ("identity", b"hello"),
        ("gzip", gzip.compress(b"hello", mtime=0) + b"anything"),
    ],
)
async def test_compressed_body_is_unpacked(encoding: str, packed: bytes) -> None:
    parts = [packed[k : k + 1] for k in range(len(packed))]
    assert await read(*parts, headers=[("content-encoding", encoding)]) == b"hello"


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "zstd", "", "chunked"])
async def test_encoding_that_is_not_known_is_refused(encoding: str) -> None:
    with pytest.raises(UnknownEncodingError, match="send gzip, deflate"):
        await read(b"x", headers=[("content-encoding", encoding)])


@pytest.mark.parametrize(
    ("encoding", "packed", "words"),
    [
        ("gzip", b"no gzip", "not valid gzip"),
        ("gzip", zlib.compress(b"hello"), "not valid gzip"),
        ("deflate", gzip.compress(b"hello", mtime=0), "not valid deflate"),
        ("gzip", gzip.compress(b"hello", mtime=0)[:-1], "incomplete"),
        ("gzip", gzip.compress(b"hello", mtime=0)[:12], "incomplete"),
        ("gzip", b"", "incomplete"),
        ("gzip", gzip.compress(b"hello", mtime=0)[:-8] + b"\0" * 8, "not valid gzip"),
    ],
)
async def test_body_that_cannot_be_unpacked_is_refused(
    encoding: str, packed: bytes, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        await read(packed, headers=[("content-encoding", encoding)])


@pytest.mark.parametrize(("size", "is_taken"), [(100, True), (101, False)])
async def test_limit_holds_for_what_is_unpacked(size: int, is_taken: bool) -> None:
    packed = gzip.compress(b"x" * size)
    headers = [("content-encoding", "gzip")]
    if is_taken:
        assert len(await read(packed, headers=headers)) == size
    else:
        with pytest.raises(TooLargeError):
            await read(packed, headers=headers)


async def test_decompression_bomb_takes_no_memory() -> None:
    unpacked: list[int] = []
    real = zlib.decompressobj

    class Watched:
        def __init__(self, bits: int) -> None:
            self._reader = real(bits)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reader, name)

        def decompress(self, data: bytes, most: int) -> bytes:
            found = self._reader.decompress(data, most)
            unpacked.append(len(found))
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zlib, "decompressobj", Watched)
        with pytest.raises(TooLargeError):
            await read(
                gzip.compress(b"\0" * 1_000_000),
                limit=2000,
                headers=[("content-encoding", "gzip")],
            )
    assert unpacked == [FIRST_BYTES]


async def test_gzip_of_several_members_is_unpacked_whole() -> None:
    """RFC 1952 allows several members; none may be dropped silently."""
    packed = gzip.compress(b"[1, 2", mtime=0) + gzip.compress(b", 3]")
    found = await read(packed, headers=[("content-encoding", "gzip")])
    assert found == b"[1, 2, 3]"


async def unpack(packed: bytes) -> bytes | bytearray:
    request = FakeClient(packed).request([("content-encoding", "gzip")])
    limits, budget = BodyLimits(10**7, 10**7), BodyBudget(10**8)
    return await read_body(request, limits, Reservation(budget))


@pytest.mark.parametrize("size", [FIRST_BYTES, 2_500_000])
async def test_large_members_are_unpacked_whole(size: int) -> None:
    """Compressed data is read in pieces, which end anywhere in a member."""
    first, second = random.Random(1).randbytes(size), b"\0" * size
    packed = gzip.compress(first) + gzip.compress(second) + gzip.compress(b"end")
    assert await unpack(packed) == first + second + b"end"


EMPTY_BLOCKS = b"\0\0\0\xff\xff" * 10**6


@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(b"", mtime=0) * 3 + gzip.compress(b"x") + b"x" * 5 * 10**6,
        gzip.compress(b"", mtime=0)[:10] + EMPTY_BLOCKS,
        gzip.compress(random.Random(1).randbytes(5 * 10**6)),
    ],
    ids=["members", "empty blocks", "one"],
)
async def test_only_the_start_of_a_body_is_unpacked_on_the_loop(
    packed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = zlib.decompressobj

    class Watched:
        def __init__(self, bits: int) -> None:
            self._reader = real(bits)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reader, name)

        def decompress(self, data: bytes, most: int) -> bytes:
            if threading.current_thread() is threading.main_thread():
                sizes.append(len(data))
            assert len(data) <= 2**20
            return self._reader.decompress(data, most)

    monkeypatch.setattr(zlib, "decompressobj", Watched)
    with contextlib.suppress(InvalidRequestError):
        await unpack(packed)
    assert 0 < sum(sizes) <= 4 * FIRST_BYTES


async def test_gzip_of_too_many_members_is_refused() -> None:
    """Each member costs a copy of the rest of the body."""
    packed = gzip.compress(b"", mtime=0) * 1000
    with pytest.raises(InvalidRequestError, match="more than 16 members"):
        await read(packed, limit=10**6, headers=[("content-encoding", "gzip")])


# While the client is connected.


async def test_result_or_error_of_the_work_is_the_callers() -> None:
    async def work() -> int:
        return 5

    async def fails() -> int:
        raise InvalidRequestError("as asked")

    client = FakeClient()
    assert await while_connected(client.request(), work()) == 5
    with pytest.raises(InvalidRequestError, match="as asked"):
        await while_connected(client.request(), fails())


@pytest.mark.parametrize("is_client", [True, False])
async def test_work_ends_with_the_client_or_with_the_caller(is_client: bool) -> None:
    client = FakeClient()
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    waiting = asyncio.ensure_future(while_connected(client.request(), work()))
    await settle()
    if is_client:
        client.hang_up()
    else:
        waiting.cancel()
    error = ClientGoneError if is_client else asyncio.CancelledError
    with pytest.raises(error):
        await asyncio.wait_for(waiting, HANG_S)
    assert seen == ["cleaned up"]


async def test_work_is_not_begun_for_a_client_that_is_gone() -> None:
    client = FakeClient(hangs_up=True)
    seen: list[str] = []

    async def work() -> None:
        seen.append("begun")

    with pytest.raises(ClientGoneError):
        await while_connected(client.request(), work())
    assert seen == []


async def test_client_that_hangs_up_after_its_answer_cancels_nothing() -> None:
    """Its connection may carry other requests."""
    client = FakeClient()

    async def work() -> int:
        return 5

    assert await while_connected(client.request(), work()) == 5
    client.hang_up()
    await settle()


@pytest.mark.parametrize("parts", [[b"abc"], [b"a", b"b", b"c"], [b""]])
async def test_body_that_has_arrived_is_read_as_any_other(parts: list[bytes]) -> None:
    client = FakeClient(*parts)
    request = client.request(is_complete=True)
    whole = await read_body(request, LIMITS, room())
    assert bytes(whole) == b"".join(parts)


async def test_body_that_has_arrived_is_bounded_as_any_other() -> None:
    client = FakeClient(b"x" * 101)
    with pytest.raises(TooLargeError):
        await read_body(client.request(is_complete=True), LIMITS, room())
    client = FakeClient(hangs_up=True)
    with pytest.raises(ClientGoneError):
        await read_body(client.request(is_complete=True), LIMITS, room())


async def test_one_tenant_has_half_of_the_budget() -> None:
    """One tenant's bodies must not keep out those of others."""
    budget = BodyBudget(100)
    one, other = Reservation(budget, "a"), Reservation(budget, "b")
    one.add(50)
    with pytest.raises(NoMemoryError, match="this tenant"):
        Reservation(budget, "a").add(1)
    other.add(50)
    one.release()
    Reservation(budget, "a").add(50)
    other.release()
    alone = Reservation(BodyBudget(100))  # without keys, there is nobody to protect
    alone.add(100)
    beside = BodyBudget(100, has_tenants=True)
    Reservation(beside).add(50)
    with pytest.raises(NoMemoryError, match="this tenant"):
        Reservation(beside).add(1)
