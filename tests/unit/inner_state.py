"""Checks of private state for tests; no other test file looks at it."""

from __future__ import annotations

import socket
from typing import Any

from multiworld.backends.direct.inbound import Inbound
from multiworld.backends.direct.lending import Block, Lender
from multiworld.backends.mailbox import Mailbox
from multiworld.liveness.heartbeat_links import HeartbeatLinks
from multiworld.net.framed_connection import FramedConnection
from multiworld.rendezvous.admission import Registry
from multiworld.rendezvous.blocking_values import BlockingValues
from multiworld.rendezvous.deadline_heap import Deadlines
from multiworld.rendezvous.store_server import StoreServer
from multiworld.rendezvous.store_service import StoreService
from multiworld.serve.controller.fleet_metrics import Totals
from multiworld.serve.gateway.requests.router import Router
from multiworld.serve.replica.scheduling.token_shares import TokenShares
from multiworld.serve.replica.sequences.generation_worker import GenerationWorker
from multiworld.serve.replica.whole_engines.engine_sequences import (
    EngineSequences,
    Phase,
)
from multiworld.serve.replica.whole_engines.engine_worker import EngineWorker


def check_router(router: Router) -> None:
    """Check that every request waits, or is held by the replica of each attempt."""
    requests, held_by = router._requests, router._held
    for number, request in requests.items():
        assert request.is_waiting or request.attempts, f"{number} is nowhere"
        for nth, state in request.attempts.items():
            assert (number, nth) in held_by[state.replica]
    for replica, held in held_by.items():
        for number, nth in held:
            assert requests[number].attempts[nth].replica == replica
    for queue in router._queues.values():
        waiting = queue.unsent
        assert waiting.count == waiting._by_tenant.total() >= 0


def leaks_of(worker: Any) -> dict[str, int]:
    """Return what the worker still holds, by kind; empty if nothing leaks."""
    match worker:
        case EngineSequences():
            found = {
                "sequences": len(worker._known),
                "runs": len(worker._runs) + len(worker._leaving),
                "held": len(worker._in[Phase.HELD]),
                "waiting": worker.waiting,
            }
        case EngineWorker():
            found = {**leaks_of(worker.sequences), "tasks": len(worker._tasks)}
        case GenerationWorker():
            found = {
                "sequences": len(worker._table),
                "logged bytes": worker._log.nbytes,
                "prefixes in use": len(worker._prefixes._found)
                + len(worker._prefixes._cache._uses),
                "blocks": worker._scheduler.pool.used_blocks,
                "rebuilt tokens": len(worker.recovery.sampled),
                "scheduled": len(worker._scheduler.pool.known),
            }
        case _:
            raise TypeError(f"{type(worker).__name__} is no worker of sequences")
    return {kind: count for kind, count in found.items() if count}


def kept_bytes(worker: GenerationWorker) -> int:
    """Return the bytes of the activation log and of the prefix cache."""
    return worker._log.nbytes + worker._prefixes._cache.nbytes


def counter_count(shares: TokenShares) -> int:
    """Return the number of tenants whose counters are kept."""
    return len(shares._served)


def is_clean(inbound: Inbound) -> bool:
    """Return whether no message is partially received."""
    return inbound._start == inbound._end and inbound._arrival is None


def held_bytes(mailbox: Mailbox) -> int:
    """Return the bytes of held messages, including ``MESSAGE_BYTES`` for each."""
    return sum(mailbox._held.values())


def fileno(connection: FramedConnection[Any] | BlockingValues) -> int:
    """Return a connection's descriptor; -1 once it is closed."""
    if isinstance(connection, BlockingValues):
        return connection._sock.fileno()
    return connection._stream.fileno()


def datagram_sockets(links: HeartbeatLinks) -> list[socket.socket]:
    waiting = [each.datagrams for each in links._connections.values()]
    used = links._heartbeat._datagrams.values()
    return [*used, *(sock for sock in waiting if sock is not None)]


def lent_blocks(lender: Lender) -> list[Block]:
    return list(lender._blocks.values())


def world_count(registry: Registry) -> int:
    return len(registry._worlds)


def deadline_count(deadlines: Deadlines[Any]) -> int:
    return len(deadlines._entries)


def waiting_count(owner: Mailbox | Registry | StoreService | StoreServer) -> int:
    """Return the number of receives of a mailbox, or of claims, that wait."""
    match owner:
        case Mailbox():
            return sum(map(len, owner._posted.values())) + len(owner._taken)
        case Registry():
            return deadline_count(owner._deadlines)
        case StoreService():
            return waiting_count(owner._registry)
        case StoreServer():
            return waiting_count(owner._service)


def session_count(store: StoreServer) -> int:
    return store._service.session_count


def apart_count(totals: Totals) -> int:
    """Return the number of processes whose counts are kept separately."""
    return len(totals._latest)
