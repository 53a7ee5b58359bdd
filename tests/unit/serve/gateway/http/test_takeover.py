"""A protocol that continues another gateway's connection, from its record."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from multiworld.serve.gateway.http.http_protocol import (
    CONTINUE,
    BoundedProtocol,
    ConnectionLimits,
)
from multiworld.serve.gateway.http.recorder import Unrecorded
from multiworld.serve.keeper.connection_record import ConnectionRecord
from tests.unit.serve.edges import settle, until

HEAD_S = 0.3


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.is_closed = b"", False

    def write(self, data: Any) -> None:
        self.out += bytes(data)

    write_unrecorded = write

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def set_write_buffer_limits(
        self, high: int | None = None, low: int | None = None
    ) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Taken(Unrecorded):
    def __init__(self, record: ConnectionRecord, *, is_single: bool = False) -> None:
        self.taken_over, self.is_single = record, is_single
        self.said: list[str] = []

    def answered(self) -> None:
        self.said.append("answered")

    def idle(self) -> None:
        self.said.append("idle")


SERVED = list[str]()
OPENED = list[str]()
"""Paths whose answers may end."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    SERVED.append(scope["path"])
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/stream":
        await until(lambda: OPENED)
    head = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(autouse=True)
def fresh() -> None:
    SERVED.clear()
    OPENED.clear()


def post(path: str, size: int = 2, more: str = "") -> bytes:
    text = f"POST {path} HTTP/1.1\r\nhost: x\r\n{more}content-length: {size}\r\n\r\n"
    return text.encode()


def protocol_from(
    record: ConnectionRecord, *, is_single: bool = False
) -> tuple[BoundedProtocol, Transport, Taken]:
    config = uvicorn.Config(app, ws="none", log_config=None, lifespan="off")
    config.load()
    recorder, transport = Taken(record, is_single=is_single), Transport()
    protocol = BoundedProtocol(
        ConnectionLimits(HEAD_S, 10),
        set(),
        config=config,
        server_state=ServerState(),
        app_state={},
        _loop=asyncio.get_running_loop(),
        recorder=recorder,
    )
    protocol.connection_made(transport)
    return protocol, transport, recorder


def begun(sent: bytes) -> ConnectionRecord:
    """Return the record of an answer that has begun."""
    record = ConnectionRecord(1, has_begun=True, is_admitted=True)
    record.input += sent
    return record


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"{}",
        b"{}" + post("/third")[:20],
        b"{}" + post("/third", 9, "connection: upgrade\r\nupgrade: h2c\r\n") + b"{}",
    ],
)
async def test_kept_stream_serves_no_request_that_its_client_pipelined(
    rest: bytes,
) -> None:
    """The client's own connection serves it; its tokens are not those of the stream."""
    sent = post("/stream") + b"{}" + post("/second") + rest
    _, transport, recorder = protocol_from(begun(sent), is_single=True)
    await until(lambda: SERVED)
    await asyncio.sleep(2 * HEAD_S)
    assert not transport.is_closed
    OPENED.append("/stream")
    await until(lambda: recorder.said)
    await settle()
    assert SERVED == ["/stream"]
    assert recorder.said == ["idle"]


async def test_pipelined_request_behind_a_continued_answer_is_told_to_go_on() -> None:
    """Only the continued answer had its interim response before."""
    sent = post("/stream") + b"{}" + post("/next", 2, "expect: 100-continue\r\n")
    protocol, transport, _ = protocol_from(begun(sent))
    OPENED.append("/stream")
    await until(lambda: CONTINUE in transport.out)
    protocol.data_received(b"{}")
    await until(lambda: SERVED == ["/stream", "/next"])


async def test_rest_of_an_answered_request_limits_no_later_one() -> None:
    record = begun(post("/early", 10) + b"12345")
    record.has_begun, record.answered = False, 1
    protocol, transport, _ = protocol_from(record)
    protocol.data_received(b"67890")
    protocol.data_received(post("/slow", 20))
    for _ in range(20):
        await asyncio.sleep(2 * HEAD_S / 20)
        protocol.data_received(b"x")
    await until(lambda: SERVED == ["/slow"])
    assert not transport.is_closed
