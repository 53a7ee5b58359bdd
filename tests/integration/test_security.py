"""Security: secrets, certificates and untrusted peers at every port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import random
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch
import trustme

from multiworld import (
    ConfigError,
    MemberLostError,
    Security,
    StoreUnreachableError,
    Tls,
    World,
    WorldConfig,
    WorldManager,
    WrongSecretError,
)
from multiworld.liveness import link_table
from multiworld.liveness.control_link import SocketLink
from multiworld.net import frames
from multiworld.net.handshake_messages import Proof
from multiworld.rendezvous.membership import Address
from multiworld.rendezvous.store_messages import Claim, SealedMember, StoreRequest
from multiworld.rendezvous.store_server import StoreServer
from multiworld.rendezvous.store_service import StoreService
from multiworld.testing import no_leaks
from tests.conftest import certificates
from tests.recorded import recorded
from tests.traffic import Traffic
from tests.unit.inner_state import fileno
from tests.wire import frame_of

SECRET = b"a secret long enough to be one"
OTHER = b"another that is long enough, too"
CONFIG = WorldConfig(join_s=10)
SHORT = WorldConfig(join_s=1.5)


class Fort:
    """A store and two members with traffic, all with the same security."""

    def __init__(
        self, server: StoreServer, managers: list[WorldManager], worlds: list[World]
    ) -> None:
        self.server, self.managers, self.worlds = server, managers, worlds
        self.store = f"tcp://127.0.0.1:{server.port}"

    def listeners(self) -> list[tuple[int, object]]:
        doors: list[tuple[int, object]] = [
            (socket.AF_INET, ("127.0.0.1", self.server.port))
        ]
        for manager in self.managers:
            address = manager.watchdog.listen("127.0.0.1")
            doors.append((socket.AF_INET, ("127.0.0.1", address.port)))
            doors.append((socket.AF_UNIX, "\0" + address.unix))
        return doors

    def refused(self) -> int:
        managers = sum(sum(manager.refused.values()) for manager in self.managers)
        return managers + sum(self.server.refused.values())


@contextlib.asynccontextmanager
async def fort(security: Security, backend: str = "direct") -> AsyncIterator[Fort]:
    server = await StoreServer.listen("127.0.0.1", 0, security=security)
    store = f"tcp://127.0.0.1:{server.port}"
    async with (
        WorldManager(config=CONFIG, security=security) as one,
        WorldManager(config=CONFIG, security=security) as two,
    ):
        worlds = await asyncio.gather(
            one.join("w", rank=0, size=2, store=store, backend=backend),
            two.join("w", rank=1, size=2, store=store, backend=backend),
        )
        yield Fort(server, [one, two], list(worlds))
    await server.close()


@contextlib.asynccontextmanager
async def traffic(here: Fort) -> AsyncIterator[Traffic]:
    async def echo() -> None:
        while True:
            await here.worlds[1].send(await here.worlds[1].recv(src=0), dst=0)

    echoing = asyncio.create_task(echo())
    try:
        async with Traffic(here.worlds[0]) as going:
            yield going
    finally:
        echoing.cancel()
        await asyncio.gather(echoing, return_exceptions=True)


def kinds_of_security(tls: Tls) -> list[Security]:
    return [
        Security(secret=SECRET),
        Security(tls=tls),
        Security(secret=SECRET, tls=tls),
        Security(),
    ]


@pytest.fixture(params=["secret", "tls", "both", "open"])
def security(request: pytest.FixtureRequest, tls: Tls) -> Security:
    names = ("secret", "tls", "both", "open")
    return kinds_of_security(tls)[names.index(request.param)]


async def test_untrusted_peers_at_every_port_disturb_no_member(
    security: Security,
) -> None:
    async with no_leaks(allow=("asyncio_",)), fort(security) as here:
        async with traffic(here) as going:
            knocks = garbage()
            for family, where in here.listeners():
                for knock in knocks:
                    await knock_at(family, where, knock)
                await going.advances(5)
        refused = here.refused()
        # A peer that hangs up with bytes unread may be gone before it is checked.
        assert refused > len(knocks)
        assert here.worlds[0].is_ready


def garbage() -> list[bytes]:
    seeded = random.Random(7)
    ours = {"multiworld": frames.PROTOCOL_VERSION}
    knocks = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x00\x05hello",
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 16 * 1024 + 1),
        frame_of(b"hello"),
        frame_of({}),
        frame_of([]),
        frame_of(b"[" * 10_000),
        frame_of(b'{"deep":' + b"[" * 10_000),
        frame_of({"multiworld": "x"}),
        frame_of(ours),
        frame_of({**ours, "kind": "link"}),
        frame_of({**ours, "kind": ["lane"]}),
        frame_of({**ours, "kind": "lane", "nonce": "x"}),
        frame_of({**ours, "sealed": True}),
    ]
    return knocks + [seeded.randbytes(seeded.randrange(1, 400)) for _ in range(60)]


async def knock_at(family: int, where: object, knock: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, where)  # type: ignore[arg-type]
        with contextlib.suppress(OSError):
            await loop.sock_sendall(sock, knock)
            sock.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(loop.sock_recv(sock, 65536), 10)


@pytest.mark.parametrize(
    "body",
    [
        b"garbage",
        {},
        {"op": "new in a later release", "nonce": 1},
        {"op": "Ready"},
        {"op": "Broken", "nonce": 1, "rank": 2},
        b'{"op":"DatagramsAt","port":1e999}',
    ],
    ids=str,
)
async def test_member_that_violates_the_protocol_is_lost_and_no_other(
    body: object,
) -> None:
    async with fort(Security()) as here, traffic(here) as going:
        async with WorldManager(config=CONFIG) as bad:
            with recorded(link_table, SocketLink) as links:
                world, _ = await asyncio.gather(
                    here.managers[0].join("x", rank=0, size=2, store=here.store),
                    bad.join("x", rank=1, size=2, store=here.store),
                )
            (own,) = [link for link in links if link.key.peer != bad.watchdog.uid]
            with socket.socket(fileno=os.dup(fileno(own))) as sock:
                sock.send(frame_of(body))
            with pytest.raises(MemberLostError, match="violated the protocol"):
                await world.recv(src=1)
            await going.advances(5)
        assert here.worlds[0].is_ready


async def test_many_slow_untrusted_peers_block_no_member(
    security: Security,
) -> None:
    async with fort(security) as here, traffic(here) as going:
        slow = []
        for family, where in here.listeners():
            for number in range(300):
                sock = socket.socket(family, socket.SOCK_STREAM)
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, where)  # type: ignore[arg-type]
                with contextlib.suppress(OSError):
                    sock.send(b"\0" * (number % 3))
                slow.append(sock)
        await going.advances(5)
        new = await asyncio.wait_for(
            asyncio.gather(
                *(
                    manager.join("new", rank=rank, size=2, store=here.store)
                    for rank, manager in enumerate(here.managers)
                )
            ),
            10,
        )
        await asyncio.gather(*(world.barrier() for world in new))
        for sock in slow:
            sock.close()
        assert here.server.refused["crowded"] > 0
        assert here.managers[0].refused["crowded"] > 0


async def test_wrong_secret_is_named_and_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="multiworld")
    with caplog.at_level(logging.CRITICAL, logger="multiworld"):
        for ours, theirs in ((SECRET, OTHER), (SECRET, b""), (b"", OTHER)):
            async with fort(Security(secret=ours)) as here, traffic(here) as going:
                async with WorldManager(security=Security(secret=theirs)) as bad:
                    with pytest.raises(WrongSecretError, match="MULTIWORLD_SECRET"):
                        await bad.join("w", rank=1, size=2, store=here.store)
                assert here.server.refused == {"secret": 1}
                await going.advances(5)


async def test_recorded_handshake_opens_nothing() -> None:
    async with fort(Security(secret=SECRET)) as here, traffic(here) as going:
        recorded = await record_handshake(here)
        assert len(recorded) > 100
        before = here.server.refused.get("secret", 0)
        loop = asyncio.get_running_loop()
        with socket.create_connection(("127.0.0.1", here.server.port)) as sock:
            sock.setblocking(False)
            await loop.sock_sendall(sock, recorded)
            answers = b""
            with contextlib.suppress(OSError):
                while chunk := await asyncio.wait_for(loop.sock_recv(sock, 65536), 10):
                    answers += chunk
        assert b'"ok":true' not in answers
        assert here.server.refused["secret"] == before + 1
        await going.advances(5)


async def record_handshake(here: Fort) -> bytes:
    """Join through a relay, and return the bytes that the member sent."""
    recorded = b""
    done = asyncio.Event()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", here.server.port)

        async def pump(
            source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, keep: bool
        ) -> None:
            nonlocal recorded
            while data := await source.read(65536):
                recorded += data if keep else b""
                sink.write(data)
            sink.close()

        await asyncio.gather(
            pump(reader, back, keep=True), pump(there, writer, keep=False)
        )
        done.set()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with WorldManager(security=Security(secret=SECRET)) as guest:
        await guest.join("alone", rank=0, size=1, store=f"tcp://127.0.0.1:{port}")
    await asyncio.wait_for(done.wait(), 10)
    server.close()
    await server.wait_closed()
    return recorded


async def test_member_record_that_the_store_forged_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    security = Security(secret=SECRET)
    async with fort(security) as here:
        genuine = StoreService.receive

        def forged(service: StoreService, session: int, message: StoreRequest) -> None:
            if isinstance(message, Claim):
                member = message.member.member
                address = dataclasses.replace(member.address, port=1)
                member = dataclasses.replace(member, address=address)
                record = SealedMember(member, message.member.proof)
                message = msgspec.structs.replace(message, member=record)
            genuine(service, session, message)

        monkeypatch.setattr(StoreService, "receive", forged)
        with pytest.raises(WrongSecretError, match="record of rank 0"):
            await here.managers[0].join("x", rank=0, size=1, store=here.store)


@pytest.mark.heavy
async def test_tls_carries_large_tensors_between_hosts(
    monkeypatch: pytest.MonkeyPatch, tls: Tls
) -> None:
    monkeypatch.setattr(Address, "is_on", lambda self, host: False)
    async with fort(Security(tls=tls, secret=SECRET)) as here:
        left, right = here.worlds
        big = torch.arange(4_000_000, dtype=torch.int32)
        for _ in range(3):
            sends = asyncio.gather(left.send(big, dst=1), right.send(big, dst=0))
            got = await asyncio.gather(right.recv(src=0), left.recv(src=1))
            await sends
            assert all(torch.equal(tensor, big) for tensor in got)
        sending = asyncio.create_task(left.send(big, dst=1))
        await asyncio.sleep(0.01)  # at any byte
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await left.send(torch.ones(3), dst=1, tag=5)
        assert (await right.recv(src=0, tag=5)).tolist() == [1, 1, 1]
        totals = [torch.ones(300_000), torch.ones(300_000)]
        await asyncio.gather(left.all_reduce(totals[0]), right.all_reduce(totals[1]))
        assert totals[0].sum() == 600_000


async def test_certificate_of_another_authority_is_refused(
    tls: Tls, tmp_path: Path
) -> None:
    strange = certificates(trustme.CA(), tmp_path)
    async with fort(Security(tls=tls)) as here, traffic(here) as going:
        async with WorldManager(config=SHORT, security=Security(tls=strange)) as bad:
            with pytest.raises(WrongSecretError, match="certificate"):
                await bad.join("w", rank=1, size=2, store=here.store)
        async with WorldManager(config=SHORT, security=Security()) as bad:
            with pytest.raises(StoreUnreachableError):
                await bad.join("w", rank=1, size=2, store=here.store)
        await going.advances(5)
        assert sum(here.server.refused.values()) > 0


@pytest.mark.parametrize(
    ("has_client", "words"),
    [(True, "the store does not use TLS"), (False, "the store requires TLS")],
)
async def test_tls_on_one_side_only_is_named(
    tls: Tls, has_client: bool, words: str
) -> None:
    with_tls = Security(tls=tls)
    ours, theirs = (with_tls, None) if has_client else (None, with_tls)
    store = await StoreServer.listen("127.0.0.1", 0, security=theirs)
    try:
        async with WorldManager(security=ours) as manager:
            with pytest.raises(StoreUnreachableError, match=words):
                await manager.join(
                    "w",
                    rank=0,
                    size=2,
                    store=f"tcp://127.0.0.1:{store.port}",
                    config=WorldConfig(join_s=1),
                )
    finally:
        await store.close()


async def test_backends_that_would_go_around_it_are_refused(tls: Tls) -> None:
    """Gloo is refused with TLS, and with a secret unless it is allowed."""
    async with WorldManager(security=Security(tls=tls)) as manager:
        with pytest.raises(ConfigError, match="TLS"):
            await manager.join(
                "w", rank=0, size=1, store="tcp://127.0.0.1:1", backend="gloo"
            )
    async with WorldManager(security=Security(secret=SECRET)) as manager:
        with pytest.raises(ConfigError, match="open_backends"):
            await manager.join(
                "w", rank=0, size=1, store="tcp://127.0.0.1:1", backend="gloo"
            )
    allowed = Security(secret=SECRET, open_backends=True)
    async with fort(allowed, "gloo") as here, traffic(here) as going:
        await going.advances(5)


def test_security_comes_from_the_environment(tmp_path: Path, tls: Tls) -> None:
    read = Security.from_environment
    assert read({}) == Security()
    assert read({"MULTIWORLD_SECRET": SECRET.decode()}).secret == SECRET
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    assert read({"MULTIWORLD_SECRET_FILE": str(file)}).secret == SECRET
    assert SECRET.decode() not in repr(read({"MULTIWORLD_SECRET": SECRET.decode()}))
    certificates = {
        "MULTIWORLD_TLS_CERT": str(tls.certificate),
        "MULTIWORLD_TLS_KEY": str(tls.key),
        "MULTIWORLD_TLS_CA": str(tls.authority),
    }
    assert read(certificates).tls == tls
    for bad in (
        {"MULTIWORLD_SECRET": "short"},
        {"MULTIWORLD_SECRET": ""},
        {"MULTIWORLD_SECRET": SECRET.decode(), "MULTIWORLD_SECRET_FILE": str(file)},
        {"MULTIWORLD_SECRET_FILE": str(tmp_path / "missing")},
        {"MULTIWORLD_TLS_CERT": str(tls.certificate)},
        {**certificates, "MULTIWORLD_TLS_KEY": str(file)},
    ):
        with pytest.raises(ConfigError):
            read(bad)


async def test_sockets_bind_to_the_interface_in_use() -> None:
    async with fort(Security()) as here:
        for family, where in here.listeners():
            if family == socket.AF_INET:
                with pytest.raises(OSError, match="refused"):
                    socket.create_connection(("127.0.0.2", where[1]))  # type: ignore[index]
        listening = own_listeners()
        assert listening
        assert not [where for where in listening if where.startswith("00000000:")]


def own_listeners() -> list[str]:
    """Return the addresses that this process listens on, as the kernel writes them."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    inodes = own_inodes()
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]


def own_inodes() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


async def test_lie_about_a_size_allocates_nothing() -> None:
    config = CONFIG.replace(max_message_bytes=1 << 20)
    security = Security()
    server = await StoreServer.listen("127.0.0.1", 0, security=security)
    store = f"tcp://127.0.0.1:{server.port}"
    async with WorldManager(config=config) as one, WorldManager(config=CONFIG) as two:
        left, right = await asyncio.gather(
            one.join("w", rank=0, size=2, store=store),
            two.join("w", rank=1, size=2, store=store),
        )
        sending = asyncio.create_task(right.send(torch.empty(1 << 28), dst=0))
        with pytest.raises(Exception, match="announces"):
            await left.recv(src=1)
        await asyncio.gather(sending, return_exceptions=True)
    await server.close()


def test_frames_of_json_only() -> None:
    """The library unpickles nothing that it receives."""
    source = Path(frames.__file__).parents[1]
    for path in source.rglob("*.py"):
        if path.relative_to(source).parts[0] == "testing":
            continue  # pipes to a test's own children
        text = path.read_text()
        assert "pickle.load" not in text, path
        assert "torch.load" not in text, path
    assert json.loads(frames.encode(Proof("a"))[4:]) == {"proof": "a"}
