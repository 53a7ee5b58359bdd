"""A gateway's process from its start to its exit, inside the test's process."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch

from multiworld.config import WorldConfig
from multiworld.errors import ServeError, SpecError
from multiworld.serve.gateway import process as module
from multiworld.serve.gateway.admission import usage_meter
from multiworld.serve.gateway.admission.authenticator import digest_of
from multiworld.serve.gateway.http.embedded_server import EmbeddedServer
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.process import (
    GatewayProcess,
    allowed_connections,
    listen,
)
from multiworld.serve.gateway.requests.dispatcher import Dispatcher
from multiworld.serve.gateway.streams.streams import NOTHING, Streams
from multiworld.serve.spec.schema import GatewaySpec, ModelSpec
from multiworld.serve.spec.stage import Model, Stage, TensorSpec
from multiworld.serve.tenants.directory import Key, Tenant
from multiworld.serve.tenants.keys import make_key
from multiworld.serve.tenants.registry import open_registry
from multiworld.serve.wire.control_agent import ControlAgent, control_world
from multiworld.serve.wire.control_messages import (
    NEWS,
    ORDERS,
    AllTenants,
    CancelRequest,
    Finish,
    FleetReport,
    FleetReportRequest,
    GatewayReport,
    Hello,
    ModelNeeded,
    ModelsChanged,
    News,
    Order,
    PoisonFound,
    ProbeReplica,
    ProbeResult,
    Report,
    ReportRequest,
    StageLoaded,
    TableApplied,
    TableChanged,
    TenantsChanged,
    UsageReport,
    UsageStored,
)
from multiworld.serve.wire.generation_messages import Sampling
from multiworld.serve.wire.inference_messages import AnswerItem, Answers, Work
from multiworld.serve.wire.process_args import ProcessArgs
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)
from multiworld.world.manager import WorldManager
from multiworld.world.world import World
from tests.recorded import recorded
from tests.unit.serve.edges import HANG_S, Controller, Peer, break_world, settle, until
from tests.unit.serve.gateway.fakes import body
from tests.unit.serve.wire.test_edges import MemoryManager

N = TypeVar("N", bound=News)

ME = "gateway/1"
REPLICA = "m/0/1"
INFER = "/v2/models/m/infer"

_numbers = itertools.count()


def double() -> Model:
    return Model(
        stages=[Stage(load=lambda context: lambda tensors: tensors)],
        inputs=[TensorSpec("x", "FP32", (-1,))],
    )


BUILT = threading.Event()


def slow() -> Model:
    BUILT.wait(HANG_S)
    return double()


def broken() -> Model:
    raise SpecError("as asked")


def odd() -> Model:
    raise ValueError("as asked")


def models(**factories: Callable[[], Model]) -> ModelsChanged:
    specs = {
        name: ModelSpec(
            factory=f"{__name__}:{factory.__name__}",
            stages=[{}],  # type: ignore[list-item]
        )
        for name, factory in factories.items()
    }
    return ModelsChanged({n: {"1": s.model_dump_json()} for n, s in specs.items()})


def table(
    number: int = 1, *replicas: str, on_demand: tuple[int, ...] = ()
) -> TableChanged:
    route = Route("1", {"1": 1}, on_demand=on_demand)
    known = {n: Replica(n, "m", "1", 0, ReplicaState.READY) for n in replicas}
    return TableChanged(RoutingTable(number, (ME,), {"m": route}, known))


class Running:
    def __init__(self, **changes: Any) -> None:
        self.store = f"memory://gateway-{next(_numbers)}"
        spec = GatewaySpec(port=0, shutdown_s=1.0, **changes.pop("gateway", {}))
        args = ProcessArgs(
            app="app",
            name=ME,
            role="gateway",
            store=self.store,
            silence_s=2.0,
            gateway=spec,
            **{"orphan_s": 100.0, **changes},
        )
        self._manager = MemoryManager(config=args.config())
        self._manager.failures = []
        self._others: list[WorldManager] = []
        with (
            recorded(module, Dispatcher) as dispatchers,
            recorded(module, Streams) as streams,
            recorded(module, Gateway) as gateways,
            recorded(module, ControlAgent) as agents,
            recorded(module, EmbeddedServer) as servers,
        ):
            self.process = GatewayProcess(args, self._manager)
        (self.dispatcher,), (self.gateway,) = dispatchers, gateways
        (self.agent,), (self.server,) = agents, servers
        (self.streams,) = streams
        self.running = asyncio.ensure_future(self.process.run())
        self.heard: list[News] = []

    async def join(self, world: str, rank: int) -> World:
        manager = WorldManager(config=WorldConfig(join_s=20))
        self._others.append(manager)
        return await manager.join(
            world, rank=rank, size=2, store=self.store, backend="memory"
        )

    async def controlled(self) -> None:
        """Become its controller."""
        world = await self.join(control_world("app", ME), 0)
        self.controller = Controller(world, 1)

    async def order(self, *orders: Order) -> None:
        for order in orders:
            await self.controller.send(ORDERS, order)

    async def received(self, kind: type[N]) -> N:
        """Return the next news of a kind; ``heard`` has all news."""
        while True:
            news = await self.controller.receive(NEWS)
            self.heard.append(news)
            if isinstance(news, kind):
                return news

    async def up(self, *orders: Order) -> None:
        """Start it with these orders, by default a model and a table."""
        await self.controlled()
        await self.order(*(orders or (models(m=double), table())))
        await self.received(StageLoaded)

    @property
    def url(self) -> str:
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def client(self, **headers: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=HANG_S)

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        for manager in (self._manager, *self._others):
            await manager.close()


@asynccontextmanager
async def gateway(**changes: Any) -> AsyncIterator[Running]:
    made = Running(**changes)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Return the sockets that are made to listen; they are closed after the test.

    Periods are short, and the limits of this process are left alone.
    """
    made: list[socket.socket] = []

    class Recorded(socket.socket):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr(module, "allowed_connections", lambda wanted: wanted)
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "USAGE_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Recorded)
        yield made
    for sock in made:
        sock.close()


async def ended(running: Running) -> None:
    await asyncio.wait_for(asyncio.shield(running.running), HANG_S)


# Start and exit.


async def test_gateway_listens_once_it_has_a_table_and_exits_on_request() -> None:
    """Until then, other gateways on its port serve the requests."""
    async with gateway() as g:
        await g.controlled()
        await g.order(models(m=double))
        assert await g.received(Hello) == Hello(os.getpid())
        await settle()
        assert not g.server.started
        await g.order(table(5))
        await g.received(StageLoaded)
        assert g.heard == [Hello(os.getpid()), TableApplied(5), StageLoaded()]
        async with g.client() as client:
            health = await client.get("/health")
            assert health.status_code == 503
            assert health.json()["stages_without_replica"] == {"m": [0]}
            assert (await client.get("/v2/models/m")).status_code == 200
        await g.order(Finish())
        await ended(g)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_shuts_a_gateway_down_as_an_order_does(
    number: signal.Signals,
) -> None:
    async with gateway() as g:
        await g.controlled()
        await g.received(Hello)
        os.kill(os.getpid(), number)
        await ended(g)
    async with gateway() as g:
        await g.up()
        os.kill(os.getpid(), number)
        await ended(g)


async def test_unused_gateway_without_a_controller_exits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It exits at once if it never had a controller, and later if it serves."""
    async with gateway(orphan_s=0.05) as g:
        await ended(g)
    monkeypatch.setattr(module, "ORPHAN_FACTOR", 0.0005)
    async with gateway(orphan_s=100.0) as g:
        await g.up()
        await asyncio.sleep(0.1)  # twice as long as an orphan may live
        assert not g.running.done()
        await g.controller.world.close()
        await ended(g)


async def test_gateway_with_generation_requests_keeps_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ORPHAN_FACTOR", 0.005)  # half a second
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    async with gateway(orphan_s=100.0) as g:
        await g.up()
        await g.controller.world.close()
        for _ in range(60):  # the last of them after a second
            stream = g.streams.open(
                "m",
                [1],
                Sampling(max_tokens=1),
                NOTHING,
                lambda item: None,
                deadline_s=60.0,
                version=g.streams.router.route("m").version,
            )
            stream.close()
            await asyncio.sleep(0.02)
        assert not g.running.done()
        await ended(g)


async def test_gateway_without_a_controller_continues_to_serve() -> None:
    async with gateway() as g:
        await g.up()
        await break_world(g.controller.world)
        async with g.client() as client:
            assert (await client.get("/v2/models/m")).status_code == 200
        g.heard.clear()
        await g.controlled()
        await g.received(StageLoaded)
        assert g.heard == [Hello(os.getpid()), TableApplied(1), StageLoaded()]
        await g.order(ReportRequest(3))
        assert (await g.received(Report)).number == 3


NOT_OURS = ["203.0.113.1", "no address", "::2"]


@pytest.mark.parametrize("host", NOT_OURS)
def test_address_that_is_not_ours_cannot_be_listened_on(host: str) -> None:
    with pytest.raises(OSError, match=r"."):
        listen(GatewaySpec(host=host), 0)


@pytest.mark.parametrize("host", NOT_OURS)
def test_socket_that_cannot_be_bound_is_closed(
    host: str, sockets: list[socket.socket]
) -> None:
    """Python warns about sockets that are not closed."""
    with pytest.raises(OSError, match=r"."):
        listen(GatewaySpec(host=host), 0)
    assert [sock.fileno() for sock in sockets] == [-1]


def test_gateways_share_a_port() -> None:
    """The kernel distributes the connections."""
    with listen(GatewaySpec(), 0) as one:
        port = one.getsockname()[1]
        with listen(GatewaySpec(), port) as other:
            assert other.getsockname()[1] == port


# Requests and probes.


async def answering(replica: Peer, count: int) -> list[Any]:
    """Answer ``count`` requests with twice their inputs; return their headers."""
    headers: list[Any] = []
    while len(headers) < count:
        header, contents = await replica.receive_with(Work)
        for item, tensors in zip(header.items, contents, strict=True):
            headers.append(item)
            answer = Answers((AnswerItem((item.key[1], item.key[2])),))
            await replica.send_with(answer, [{"y": tensors["x"] * 2}])
    return headers


async def test_request_and_probe_go_over_the_edge_to_a_replica() -> None:
    async with gateway() as g:
        await g.up(models(m=double), table(1, REPLICA))
        replica = Peer(await g.join(f"edge:{ME}>{REPLICA}", 1), 0)
        serving = asyncio.ensure_future(answering(replica, 2))
        async with g.client() as client:
            answer = await client.post(INFER, json=body(4.0))
        assert answer.json()["outputs"][0]["data"] == [8.0]
        await g.order(ProbeReplica(REPLICA))
        assert await g.received(ProbeResult) == ProbeResult(REPLICA, None)
        _, probe = await serving
        assert probe.via == {"0": REPLICA}
        await g.order(ReportRequest(1))
        report = (await g.received(Report)).gateway
        assert report is not None
        assert (report.connected, report.arrived) == ((REPLICA,), {"m": 1})


async def test_probe_that_cannot_be_sent_is_reported_with_its_reason() -> None:
    """The controller can then try again."""
    probe = ProbeReplica(REPLICA, 0.5)
    async with gateway() as g:
        await g.up(models(other=double), table(1, REPLICA))
        await g.order(ProbeReplica("none"), ProbeReplica(REPLICA))
        for name in ("none", REPLICA):
            probed = await g.received(ProbeResult)
            assert probed.replica == name
            assert str(probed.error).startswith("UnknownModelError: this gateway does")
        await g.order(models(m=double), probe)
        assert "NoReplicaError" in str((await g.received(ProbeResult)).error)
        await g.join(f"edge:{ME}>{REPLICA}", 1)
        await until(lambda: g.dispatcher.report().connected)
        await g.order(probe)
        assert "DeadlineExceededError" in str((await g.received(ProbeResult)).error)


async def test_factory_of_a_new_version_does_not_hold_up_other_orders() -> None:
    """Only the table that makes the version active waits for it."""
    async with gateway() as g:
        await g.up(models(m=double), table(1, REPLICA))
        acme = Tenant(name="acme")
        await g.order(models(slow=slow))
        await g.order(AllTenants((acme,), is_first=True, is_last=True))
        await g.order(table(2, REPLICA), ReportRequest(1))
        await g.received(Report)
        assert not BUILT.is_set()
        assert g.dispatcher.table.number == 2
        routes = {"m": Route("1", {"1": 1}), "slow": Route("1", {"1": 1})}
        await g.order(TableChanged(RoutingTable(3, (ME,), routes)), ReportRequest(2))
        await g.received(Report)
        assert g.dispatcher.table.number == 2
        BUILT.set()
        await until(lambda: g.dispatcher.table.number == 3)


async def test_order_to_cancel_is_answered_with_the_number_of_streams() -> None:
    async with gateway() as g:
        await g.up(table(1))
        await g.order(CancelRequest("r-1", 7))
        assert await g.received(Report) == Report(7)


async def test_end_waits_for_requests_in_flight() -> None:
    async with gateway() as g:
        await g.up(models(m=double), table(1, REPLICA))
        replica = Peer(await g.join(f"edge:{ME}>{REPLICA}", 1), 0)
        async with g.client() as client:
            asking = asyncio.ensure_future(client.post(INFER, json=body(4.0)))
            await until(lambda: g.dispatcher.in_flight)
            await g.order(Finish())
            await until(lambda: g.server.should_exit)
            await answering(replica, 1)
            assert (await asking).status_code == 200
        await ended(g)


async def test_model_that_runs_nowhere_is_asked_for_now_and_then() -> None:
    async with gateway() as g:
        await g.up(models(m=double), table(1, on_demand=(0,)))
        async with g.client(**{"x-timeout-s": "0.5"}) as client:
            answer = await client.post(INFER, json=body(4.0))
        assert answer.status_code == 503
        await g.order(ReportRequest(1))
        await g.received(Report)
        asked = [news for news in g.heard if isinstance(news, ModelNeeded)]
        assert 1 <= len(asked) <= 4
        assert set(asked) == {ModelNeeded("m")}


# Models.


async def test_model_that_cannot_be_built_leaves_the_others_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway() as g:
        await g.up(models(bad=broken, m=double), table())
        async with g.client() as client:
            assert (await client.get("/v2/models/m")).status_code == 200
        assert "model bad: as asked" in caplog.text


async def test_factory_that_raises_anything_leaves_the_others_alone() -> None:
    """Otherwise every gateway would exit, and each one that replaces it."""
    async with gateway() as g:
        await g.controlled()
        await g.order(models(bad=odd, m=double), table())
        await until(lambda: g.server.started or g.running.done())
        if g.running.done():
            g.running.result()


# Tenants, usage and poison requests.


def keyed(name: str) -> tuple[Tenant, str]:
    text, key_id, digest = make_key()
    return Tenant(name=name, keys=(Key(id=key_id, digest=digest, made_at=0.0),)), text


async def test_earlier_tenants_apply_until_all_parts_have_arrived() -> None:
    """A controller that dies in between locks nobody out."""
    (acme, acmes), (beta, betas), (gamma, gammas) = map(keyed, ("acme", "beta", "c"))

    async with gateway(gateway={"authentication": "keys"}) as g:

        async def may(key: str) -> bool:
            await g.order(ReportRequest(1))
            await g.received(Report)
            async with g.client(**{"x-api-key": key}) as client:
                return (await client.get("/v2/models")).status_code == 200

        await g.up(
            models(m=double),
            table(),
            AllTenants((acme,), is_first=True, is_last=True),
        )
        assert [await may(key) for key in (acmes, betas)] == [True, False]
        await g.order(AllTenants((beta,), is_first=True, is_last=False))
        assert [await may(key) for key in (acmes, betas)] == [True, False]
        await g.order(AllTenants((beta,), is_first=True, is_last=False))
        await g.order(AllTenants((gamma,), is_first=False, is_last=True))
        assert [await may(k) for k in (acmes, betas, gammas)] == [False, True, True]
        await g.order(TenantsChanged((acme,), ("beta", "nobody")))
        assert [await may(k) for k in (acmes, betas, gammas)] == [True, False, True]


async def test_usage_is_reported_until_it_is_stored_and_once_more_at_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A controller that dies in between does not lose it."""
    monkeypatch.setattr(usage_meter, "RESEND_S", 3600.0)
    async with gateway() as g:
        await g.up()
        async with g.client() as client:
            await client.post(INFER, content=b"{")
        first = await g.received(UsageReport)
        assert (first.rows[0].model, first.rows[0].failed) == ("m", 1)
        await break_world(g.controller.world)
        await g.controlled()
        again = await g.received(UsageReport)
        assert (again.meter, again.number) == (first.meter, first.number)
        assert again.rows == first.rows
        await g.order(UsageStored(again.number))
        async with g.client() as client:
            await client.post(INFER, content=b"{{")
        await g.order(Finish())
        last = await g.received(UsageReport)
        assert last.number > again.number
        await g.order(UsageStored(last.number))
        await ended(g)


async def test_usage_that_is_not_stored_does_not_block_shutdown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway() as g:
        await g.up()
        async with g.client() as client:
            await client.post(INFER, content=b"{")
        await g.order(Finish())
        await ended(g)
        assert "did not confirm the last usage report" in caplog.text


async def test_usage_that_no_controller_stores_goes_to_the_file(tmp_path: Path) -> None:
    """The file is beside the lock that all processes of a service hold."""
    database = open_registry(tmp_path)
    async with gateway(alive=str(tmp_path / "alive")) as g:
        await g.up()
        async with g.client() as client:
            await client.post(INFER, content=b"{")
        await g.order(Finish())
        await ended(g)
    found = database.usage(None, 0.0, by_minute=False)
    assert sum(row.requests for row in found) == 1
    database.close()


async def test_poison_request_of_another_gateway_is_refused_here() -> None:
    """One that was found here is reported once there is a controller."""
    async with gateway() as g:
        await g.up(models(m=double), table(1, REPLICA))
        tensors = {"x": torch.tensor([6.0])}
        digest = digest_of(tensors)
        await g.order(PoisonFound("", "m", "1", digest), ReportRequest(1))
        await g.received(Report)
        async with g.client() as client:
            answer = await client.post(INFER, json=body(6.0))
        assert "is a poison request" in answer.json()["error"]
        await break_world(g.controller.world)
        await until(lambda: g.agent.lost_at is not None)
        g.gateway.on_poison("acme", ("m", "1"), "abc")
        await g.controlled()
        assert await g.received(PoisonFound) == PoisonFound("acme", "m", "1", "abc")


async def test_poison_that_is_told_again_counts_once() -> None:
    """The controller repeats it to a gateway that has joined again after a pause."""
    async with gateway() as g:
        await g.up(models(m=double), table(1, REPLICA))
        told = [PoisonFound("acme", "m", "1", "abc", age_s=1.0 + n) for n in range(5)]
        await g.order(*told, ReportRequest(1))
        await g.received(Report)
        quarantine = g.gateway.authenticator.quarantine
        assert quarantine.is_poison("acme", ("m", "1"), "abc", time.monotonic())
        assert not quarantine.remaining_s("acme", ("m", "1"), time.monotonic())


FLEET = FleetReport(
    1,
    {},
    {"gateway/2": GatewayReport(in_flight=7)},
    (("attained", ("m",), 5.0), ("fleet_events", ("lost", "m", "1"), 3.0)),
)


async def scraped(g: Running) -> str:
    async with g.client() as client:
        return (await client.get("/metrics")).text


async def test_metrics_are_those_of_the_whole_service() -> None:
    """One report of the controller serves all scrapes that wait."""
    async with gateway() as g:
        await g.up()
        scrapes = [asyncio.ensure_future(scraped(g)) for _ in range(3)]
        await g.received(FleetReportRequest)
        await g.order(FLEET)
        for text in [await scrape for scrape in scrapes]:
            lost = '{kind="lost",model="m",stage="1"} 3.0'
            assert f"multiworld_fleet_events_total{lost}" in text
            assert 'multiworld_in_flight{gateway="gateway/2"} 7.0' in text
            assert f'multiworld_in_flight{{gateway="{ME}"}} 0.0' in text
            assert 'multiworld_attained_total{model="m"} 5.0' in text
        assert not [
            news for news in g.heard[-1:] if not isinstance(news, FleetReportRequest)
        ]


@pytest.mark.parametrize("has_controller", [True, False])
async def test_metrics_without_an_answer_are_those_of_the_last_one(
    has_controller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that hangs must not delay scrapes for long."""
    monkeypatch.setattr(module, "FLEET_S", 0.05)
    async with gateway() as g:
        await g.up()
        await g.order(FLEET, ReportRequest(1))
        await g.received(Report)
        if not has_controller:
            await break_world(g.controller.world)
            await until(lambda: g.agent.lost_at is not None)
        for _ in range(2):
            assert 'multiworld_attained_total{model="m"} 5.0' in await scraped(g)


async def test_counts_are_reported_if_asked_for_and_at_the_end() -> None:
    """They are many, and the controller keeps those of a gateway that has exited."""
    async with gateway() as g:
        await g.up()
        async with g.client() as client:
            await client.post("/v2/models/none/infer", json=body(6.0))
        await g.order(ReportRequest(1), ReportRequest(2, has_counts=True), Finish())
        reports = [(await g.received(Report)) for _ in range(3)]
        counted = [report.counted for report in reports]
        assert [report.number for report in reports] == [1, 2, 0]
        assert counted[0] == ()
        for counts in counted[1:]:
            assert ("requests", ("unknown", "404"), 1.0) in counts


# The limit of open files.


@pytest.mark.parametrize(
    ("files", "wanted", "allowed"),
    [(1 << 20, 4096, 4096), (1024, 4096, 768), (1024, 500, 500), (320, 4096, 64)],
)
def test_connections_fit_the_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    files: int,
    wanted: int,
    allowed: int,
) -> None:
    limits: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, files))
    monkeypatch.setattr(resource, "setrlimit", lambda *given: limits.append(given))
    assert allowed_connections(wanted) == allowed
    assert limits[0] == (resource.RLIMIT_NOFILE, (files, files))
    assert ("ulimit -n" in caplog.text) == (allowed < wanted)


def test_limit_of_open_files_that_is_too_low_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is refused at startup, not at the first clients."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(ServeError, match=r"open files is 300.*needs 320"):
        allowed_connections(4096)
