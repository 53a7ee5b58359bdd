"""Socket options, and addresses from host names."""

from __future__ import annotations

import asyncio
import socket

import pytest

from multiworld.net.tcp import UNIX_BUFFER_BYTES, connected, resolve, tune


@pytest.mark.parametrize(
    ("host", "family"),
    [
        ("127.0.0.1", socket.AF_INET),
        ("0.0.0.0", socket.AF_INET),
        ("::1", socket.AF_INET6),
        ("fe80::1", socket.AF_INET6),
    ],
)
async def test_numeric_address_is_used_as_it_is(host: str, family: int) -> None:
    """No look-up is needed, so none can fail or block."""
    assert await resolve(host, 29500) == (family, (host, 29500))


async def test_name_is_looked_up() -> None:
    family, where = await resolve("localhost", 29500)
    assert where[1] == 29500
    assert family in (socket.AF_INET, socket.AF_INET6)
    assert where[0] in ("127.0.0.1", "::1")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.0.0.1.invalid", "a b"])
async def test_unknown_name_is_an_os_error(host: str) -> None:
    """Callers retry or report it like any other failure to connect."""
    with pytest.raises(OSError):  # noqa: PT011 - the text depends on the resolver
        await resolve(host, 1)


def test_tuned_tcp_socket_does_not_delay_or_block() -> None:
    """A small message leaves at once; the failure detector decides who is dead."""
    with socket.socket() as sock:
        tune(sock)
        assert sock.gettimeout() == 0.0
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        # It would end the connection of a receiver that has no room for this long.
        assert not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        # Routers forget what is idle for minutes.
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            assert 0 < sock.getsockopt(socket.IPPROTO_TCP, option) <= 60


def test_tuned_unix_socket_does_not_block() -> None:
    """The kernel limits the buffers; tuning never shrinks them."""
    with socket.socket(socket.AF_UNIX) as plain, socket.socket(socket.AF_UNIX) as tuned:
        tune(tuned)
        assert tuned.gettimeout() == 0.0
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            before = plain.getsockopt(socket.SOL_SOCKET, option)
            after = tuned.getsockopt(socket.SOL_SOCKET, option)
            assert before <= after <= 2 * UNIX_BUFFER_BYTES


async def test_connection_to_a_crowded_listener_waits_for_room() -> None:
    """The connection is returned only once it is established."""
    name = f"\0multiworld-test-{id(object()):x}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen(0)
        first = await connected(socket.AF_UNIX, name)
        second = asyncio.ensure_future(connected(socket.AF_UNIX, name))
        await asyncio.sleep(0.05)
        assert not second.done()
        accepted = [listener.accept()[0]]
        sock = await asyncio.wait_for(second, 20)
        accepted.append(listener.accept()[0])
        assert sock.getpeername() == name.encode()
        for each in (first, sock, *accepted):
            each.close()


@pytest.mark.parametrize("is_read_late", [False, True])
async def test_data_of_an_ended_sender_arrives_late(*, is_read_late: bool) -> None:
    """The sender's kernel keeps the data while the receiver is busy."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        sock = await connected(socket.AF_INET, listener.getsockname())
        accepted, _ = listener.accept()
    sent = 0
    try:
        while True:
            sent += sock.send(bytes(1 << 16))
    except BlockingIOError:
        sock.close()
    if is_read_late:
        await asyncio.sleep(4.5)
    with accepted:
        accepted.settimeout(20)
        found = 0
        while count := len(await asyncio.to_thread(accepted.recv, 1 << 20)):
            found += count
    assert found == sent
