"""Process of a gateway: HTTP server, dispatcher, streams and controller connection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import uvicorn

from multiworld.errors import MultiWorldError, ServeError, UnknownModelError
from multiworld.serve.gateway.admission.authenticator import Authenticator, ModelVersion
from multiworld.serve.gateway.admission.last_usage import store_rest
from multiworld.serve.gateway.admission.shared_limits import shared_limits
from multiworld.serve.gateway.http.app import make_app
from multiworld.serve.gateway.http.body_limits import BodyBudget, BodyLimits
from multiworld.serve.gateway.http.cross_origin import with_origins
from multiworld.serve.gateway.http.embedded_server import EmbeddedServer
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_protocol import ConnectionLimits, protocol_of
from multiworld.serve.gateway.http.keeper_link import KeeperLink
from multiworld.serve.gateway.http.kept_events import EventLogs
from multiworld.serve.gateway.http.recorded_transport import NoTransport, PeekedSocket
from multiworld.serve.gateway.http.recorder import DetachedRecorder, Recorder
from multiworld.serve.gateway.http.tls_handshake import Certificate, with_tls
from multiworld.serve.gateway.http_routes import ROUTES
from multiworld.serve.gateway.model_builds import ModelBuilds
from multiworld.serve.gateway.openai.schemas import schemas
from multiworld.serve.gateway.requests.dispatcher import Dispatcher
from multiworld.serve.gateway.streams.streams import Streams
from multiworld.serve.keeper.connection_record import ConnectionRecord
from multiworld.serve.machines.open_files import raise_limit
from multiworld.serve.spec.datatypes import example_of
from multiworld.serve.spec.schema import GatewaySpec, ModelSpec
from multiworld.serve.spec.stage import Model
from multiworld.serve.tenants.directory import Tenant
from multiworld.serve.tenants.registry import has_registry
from multiworld.serve.tracing.tracer import tracer_of
from multiworld.serve.wire import control_messages as messages
from multiworld.serve.wire.control_agent import ControlAgent
from multiworld.serve.wire.edges import Edges, Outbox
from multiworld.serve.wire.frames import Entry
from multiworld.serve.wire.generation_messages import GenerationMessage
from multiworld.serve.wire.process_args import ProcessArgs
from multiworld.serve.wire.routing_table import RoutingTable, edges_of
from multiworld.world.manager import WorldManager

logger = logging.getLogger("multiworld.serve")

GENERATION = get_args(GenerationMessage)  # messages that go to the streams
PROBE_TOKENS = (1, 1, 1, 1)  # prompt of the probe of a model that generates text
LOADING_S = 10.0  # maximum seconds to load tokenizers before the gateway serves
HOLD_S = 60.0  # maximum seconds that a table waits for models that it makes active
POISON = 256  # maximum poison requests that wait to be reported to a controller
USAGE_S = 1.0  # seconds between usage reports
# Maximum seconds to wait for the fleet's state; then metrics show the last known one.
FLEET_S = 2.0
# Maximum seconds for the keeper to answer whether another gateway takes over.
LEAVE_S = 1.0
# Seconds until a leaving gateway looks for the next keeper again, and maximum for which
# it does so. A keeper is replaced within a second or two.
LEAVE_AGAIN_S, LEAVE_LOOK_S = 0.1, 2.0
# Maximum seconds to send the last report to the controller, and the last entries to the
# keeper.
LAST_S = 0.5
# Minimum seconds between two messages that ask the controller for replicas of a model.
ASK_S = 0.2
OTHER_FILES = 256  # descriptors reserved for files other than client sockets
MIN_CONNECTIONS = 64  # minimum number of connections with which a gateway may run
BACKLOG = 2048  # maximum connections that wait to be accepted
LOOK_S = 1.0  # seconds between checks of whether the gateway is orphaned

# Idle time after which a gateway without a controller exits, as a multiple of
# ``orphan_s``. For a gateway that never had a controller, the multiple is 1.
ORPHAN_FACTOR = 60


def listen(spec: GatewaySpec, port: int) -> socket.socket:
    """Return a socket that shares its port with the other gateways."""
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    # Name the protocol: asyncio disables Nagle's algorithm only for IPPROTO_TCP, and
    # the algorithm would delay the second part of an answer by 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((spec.host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def allowed_connections(wanted: int) -> int:
    """Raise the limit of open files; return how many connections the limit allows."""
    hard = raise_limit()
    room = hard - OTHER_FILES
    if room < MIN_CONNECTIONS:
        raise ServeError(
            f"the limit of open files is {hard}; a gateway needs "
            f"{OTHER_FILES + MIN_CONNECTIONS}: raise it with `ulimit -n`"
        )
    if room < wanted:
        logger.warning(
            "gateway.max_connections is %d, but the limit of open files allows %d; "
            "raise it with `ulimit -n`",
            wanted,
            room,
        )
    return min(wanted, room)


def _protocol_of(spec: GatewaySpec, max_connections: int) -> type[asyncio.Protocol]:
    limits = ConnectionLimits(spec.head_s, max_connections)
    protocol = protocol_of(limits)
    if spec.tls_certificate is None or spec.tls_key is None:
        return protocol
    certificate = Certificate(spec.tls_certificate, spec.tls_key)
    return with_tls(protocol, certificate, limits)


class GatewayProcess:
    def __init__(
        self,
        args: ProcessArgs,
        manager: WorldManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        assert args.gateway is not None
        self._args, self._spec = args, args.gateway
        self._dispatcher = Dispatcher(args.name)
        self._dispatcher.on_missing = self._ask_for
        self._streams = Streams(args.name)
        self._streams.on_missing = self._ask_for
        self._asked_at: dict[str, float] = {}
        spec = args.gateway
        mib = 2**20
        body_bytes = int(spec.max_body_mb * mib)
        json_bytes = min(int(spec.max_json_mb * mib), body_bytes)
        limits = BodyLimits(json_bytes, body_bytes)
        bodies = BodyBudget(int(spec.max_bodies_mb * mib), body_bytes)
        self._authenticator = Authenticator(
            needs_key=args.gateway.authentication == "keys"
        )
        if args.alive:
            path = Path(args.alive).with_name("limits")
            self._authenticator.limiter.shared = shared_limits(path)
        self._gateway = Gateway(
            self._dispatcher, limits, bodies, self._authenticator, self._streams
        )
        self._gateway.on_poison = self._report_poison
        self._gateway.logs_access = spec.access_log
        self._gateway.is_strict = spec.strict
        self._gateway.detach_s = spec.detach_s
        self._gateway.max_detach_s = max(spec.detach_s, spec.max_detach_s)
        self._gateway.event_logs = EventLogs(int(spec.detached_mb * mib))
        self._gateway.ask_fleet = self._ask_fleet
        self._tracer = self._gateway.tracer = tracer_of(
            os.environ, args.app, args.name, {"multiworld.role": "gateway"}
        )
        self._fleet: asyncio.Future[None] | None = None
        self._numbers = itertools.count(1)
        self._usage_kept = asyncio.Event()
        self._meter = secrets.token_hex(8)
        self._incoming_tenants: dict[str, Tenant] = {}
        self._poison: deque[messages.PoisonFound] = deque(maxlen=POISON)
        config = args.config()
        self._agent = ControlAgent(
            manager, args.app, args.name, args.store, config, self._obey
        )
        self._edges = Edges(manager, args.store, config, self)
        self._probes: set[asyncio.Task[None]] = set()
        self._loading: set[asyncio.Task[None]] = set()
        # Orders are carried out while models are built. Only a routing table waits, for
        # at most ``HOLD_S``, until the versions that it makes active are built.
        self._builds = ModelBuilds(self._add_model, self._apply_held_table)
        self._held_table: RoutingTable | None = None
        self._held_until = 0.0
        connections = allowed_connections(spec.max_connections)
        self._is_routed = asyncio.Event()
        app = make_app(self._gateway, ROUTES, schemas())
        self._config = uvicorn.Config(
            with_origins(app, spec.cors_origins),
            http=_protocol_of(self._spec, connections),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=math.ceil(self._spec.keep_alive_s),
            timeout_graceful_shutdown=int(self._spec.shutdown_s) or 1,
            server_header=False,
            proxy_headers=False,
        )
        self._server = EmbeddedServer(self._config)
        # None: there is no stream keeper, and this gateway accepts connections itself.
        self._stream_keeper: KeeperLink | None = None
        self._taking: set[asyncio.Task[None]] = set()
        self._leaving: asyncio.Task[None] | None = None

    # Edges, as an ``EdgeOwner``.

    def edge_up(self, outbox: Outbox) -> None:
        self._dispatcher.edge_up(outbox)
        self._streams.edge_up(outbox)

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        """Dispatch a frame; all messages of an edge are of one kind."""
        is_generation = isinstance(frame[0][0], GENERATION) if frame else False
        owner = self._streams if is_generation else self._dispatcher
        owner.received(outbox, frame)

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        self._dispatcher.edge_down(outbox, is_polite=is_polite)
        self._streams.edge_down(outbox, is_polite=is_polite)

    # The life of the process.

    async def run(self) -> None:
        """Serve until stopped or orphaned; if cancelled, unconfirmed usage is lost."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        sockets = []
        if self._args.keeper:
            self._stream_keeper = KeeperLink(
                Path(self._args.keeper),
                self._args.name,
                self._args.silence_s,
                self._take,
            )
        else:
            sockets.append(listen(self._spec, self._args.port))
        tasks = [
            loop.create_task(body())
            for body in (
                self._agent.run,
                self._dispatcher.look,
                self._streams.look,
                self._exit_if_orphaned,
                self._report_usage,
            )
        ]
        if self._stream_keeper is not None:
            tasks.append(loop.create_task(self._stream_keeper.run()))
        serving = loop.create_task(self._serve(sockets))
        announcing = loop.create_task(self._announce_when_up())
        try:
            done, _ = await asyncio.wait(
                {*tasks, serving}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            await self._flush_usage()
            last = messages.ReportRequest(0, has_counts=True)
            self._agent.send(self._report(last))
            await self._agent.flush(LAST_S)
        finally:
            for task in (*tasks, serving, announcing, *self._probes, *self._loading):
                task.cancel()
            self._builds.close()
            await asyncio.gather(*tasks, serving, announcing, return_exceptions=True)
            await self._edges.close()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)

    def _take(self, sock: socket.socket | None, record: ConnectionRecord) -> None:
        """Serve a connection that the keeper has given to this gateway."""
        assert self._stream_keeper is not None
        loop = asyncio.get_running_loop()
        protocol: Any = self._config.http_protocol_class
        make: Callable[..., asyncio.Protocol] = partial(
            protocol,
            config=self._config,
            server_state=self._server.server_state,
            app_state={},
            _loop=loop,
        )
        if sock is None:
            made = make(recorder=DetachedRecorder(self._stream_keeper, record))
            made.connection_made(NoTransport(made))
            return
        kept = PeekedSocket(fileno=sock.detach())
        recorder = Recorder(self._stream_keeper, record, kept)
        make = partial(make, recorder=recorder)
        task = loop.create_task(self._connected(make, kept, recorder))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def _connected(
        self,
        make: Callable[[], asyncio.Protocol],
        sock: PeekedSocket,
        recorder: Recorder,
    ) -> None:
        sock.setblocking(False)
        try:
            sock.take_recorded(recorder.record)
            await asyncio.get_running_loop().connect_accepted_socket(make, sock)
        except OSError as error:
            logger.warning("a connection cannot be served: %s", error)
            recorder.closed()
            sock.close()

    async def _serve(self, sockets: list[socket.socket]) -> None:
        """Serve once there is a routing table, and all tokenizers are loaded."""
        # Until then, only the other gateways on the port serve clients.
        await self._is_routed.wait()
        if self._loading:
            await asyncio.wait(self._loading, timeout=LOADING_S)
        await self._server.serve(sockets=sockets)
        if self._stream_keeper is not None:
            await self._stream_keeper.flush(LAST_S)

    async def _announce_when_up(self) -> None:
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        if self._stream_keeper is not None:
            self._stream_keeper.ready()
        self._agent.fact(messages.StageLoaded())

    def _end(self) -> None:
        self._gateway.is_shutting_down = True
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        """Hand over all connections, if there is another gateway, and stop serving."""
        keeper, loop = self._stream_keeper, asyncio.get_running_loop()
        until = loop.time() + LEAVE_LOOK_S
        while keeper is not None:
            is_handed_over = await keeper.leave(LEAVE_S)
            if is_handed_over:
                logger.info("other gateways continue this gateway's connections")
            is_empty = not keeper.has_connections
            if is_handed_over is not None or is_empty or loop.time() > until:
                break
            await asyncio.sleep(LEAVE_AGAIN_S)  # the keeper is being replaced
        self._server.end()
        self._is_routed.set()

    def _add_model(self, name: str, spec: ModelSpec, model: Model) -> None:
        self._gateway.add_version(name, spec, model)
        if model.generation is not None or model.text is not None:
            self._prepare(name, spec.version, model)

    def _prepare(self, name: str, version: str, model: Model) -> None:
        """Load a model's tokenizer before a request waits for it."""

        async def load() -> None:
            try:
                await self._gateway.text(name, version, model)
            except Exception:  # the first request that needs the tokenizer retries
                logger.exception("the tokenizer of %s cannot be loaded", name)

        task = asyncio.ensure_future(load())
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def _obey(self, order: messages.Order) -> None:
        match order:
            case messages.ModelsChanged(specs):
                for name, versions in specs.items():
                    for version, text in versions.items():
                        if version not in self._gateway.models.get(name, {}):
                            self._builds.begin(name, version, text)
                self._held_until = self._clock() + HOLD_S
                loop = asyncio.get_running_loop()
                loop.call_later(HOLD_S + 0.1, self._apply_held_table)
            case messages.TableChanged(table):
                self._table_changed(table)
            case messages.AllTenants():
                self._all_tenants(order)
            case messages.TenantsChanged(tenants, removed):
                self._authenticator.directory.put(tenants)
                for name in removed:
                    self._authenticator.directory.remove(name)
                self._tenants_changed()
            case messages.BudgetsUsed(used):
                self._authenticator.budgets.set_used(used)
            case messages.UsageStored(number):
                self._authenticator.stored(number)
                self._usage_kept.set()
            case messages.PoisonFound(tenant, model, version, digest, age_s):
                self._gateway.record_poison(tenant, (model, version), digest, age_s)
            case messages.ProbeReplica(replica, limit_s):
                task = asyncio.ensure_future(self._probe(replica, limit_s))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)
            case messages.Finish():
                self._end()
            case messages.ReportRequest():
                self._agent.send(self._report(order))
            case messages.CancelRequest(request, number):
                count = self._streams.cancel(request)
                if number:
                    self._agent.send(messages.Report(number, cancelled=count))
            case messages.FleetReport():
                self._gateway.fleet = order
                if self._fleet is not None and not self._fleet.done():
                    self._fleet.set_result(None)

    def _report(self, asked: messages.ReportRequest) -> messages.Report:
        report = self._gateway.report()
        counted = tuple(self._gateway.counted(report)) if asked.has_counts else ()
        if asked.has_streams:
            report = self._streams.shown(report)
        return messages.Report(asked.number, gateway=report, counted=counted)

    async def _ask_fleet(self) -> None:
        if self._agent.lost_at is not None:
            return
        if self._fleet is None or self._fleet.done():
            self._fleet = asyncio.get_running_loop().create_future()
            self._agent.send(messages.FleetReportRequest(next(self._numbers)))
        try:
            async with asyncio.timeout(FLEET_S):
                await asyncio.shield(self._fleet)
        except TimeoutError:
            self._fleet = None
            logger.warning("the controller did not send the state of the fleet")

    def _apply_held_table(self) -> None:
        if self._held_table is not None:
            self._table_changed(self._held_table)

    def _table_changed(self, table: RoutingTable) -> None:
        active = ((name, route.version) for name, route in table.routes.items())
        if self._clock() < self._held_until and any(v in self._builds for v in active):
            self._held_table = table  # it activates a version that is still being built
            return
        self._held_table = None
        self._dispatcher.table_changed(table)
        self._streams.table_changed(table)
        self._edges.apply(edges_of(table, self._args.name))
        self._gateway.table_changed()
        # Spare gateways have no connections, so only the others share the limits.
        count = len(table.gateways) - self._args.spare_gateways
        self._authenticator.gateways = max(1, count)
        self._agent.fact(messages.TableApplied(table.number))
        self._is_routed.set()

    def _all_tenants(self, part: messages.AllTenants) -> None:
        """Replace all tenants once the last part has arrived."""
        if part.is_first:
            self._incoming_tenants = {}
        self._incoming_tenants.update((tenant.name, tenant) for tenant in part.tenants)
        if part.is_last:
            self._authenticator.directory.replace_all(self._incoming_tenants)
            self._tenants_changed()

    def _tenants_changed(self) -> None:
        tenants = self._authenticator.directory.tenants
        self._gateway.counts.keep_tenants(tenants)
        self._gateway.bodies.has_tenants = bool(tenants)

    def _report_poison(
        self, tenant: str, model_version: ModelVersion, digest: str
    ) -> None:
        """Report a poison request now, or once a controller is connected."""
        self._poison.append(messages.PoisonFound(tenant, *model_version, digest))
        self._send_pending_poison()

    def _send_pending_poison(self) -> None:
        while self._poison and self._agent.lost_at is None:
            self._agent.send(self._poison.popleft())

    async def _report_usage(self) -> None:
        reported_to: object = None
        while True:
            await asyncio.sleep(USAGE_S)
            if self._agent.lost_at is not None:
                continue
            self._send_pending_poison()
            if reported_to is not self._agent.joined_at:
                reported_to = self._agent.joined_at
                self._authenticator.meter.resend_all()
            self._send_due_usage()

    def _send_due_usage(self) -> None:
        for number, rows in self._authenticator.meter.take_due(self._clock()):
            self._agent.send(messages.UsageReport(self._meter, number, rows))

    async def _flush_usage(self) -> None:
        """Report the remaining usage and wait briefly until it is stored."""
        meter = self._authenticator.meter
        meter.resend_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(USAGE_S):
                while self._agent.lost_at is None and not meter.is_all_confirmed:
                    self._usage_kept.clear()
                    self._send_due_usage()
                    await self._usage_kept.wait()
        if meter.is_all_confirmed:
            return
        folder = Path(self._args.alive).parent if self._args.alive else None
        if folder is None or not has_registry(folder):
            logger.warning("the controller did not confirm the last usage report")
            return
        try:
            await store_rest(meter, self._meter, folder, self._clock())
        except (ServeError, OSError) as error:
            logger.warning("the last usage cannot be stored: %s", error)

    def _ask_for(self, model: str) -> None:
        """Report to the controller that a request needs a model without replicas."""
        now = self._clock()
        if now - self._asked_at.get(model, -ASK_S) >= ASK_S:
            self._asked_at[model] = now
            self._agent.send(messages.ModelNeeded(model))

    async def _probe(self, replica: str, limit_s: float) -> None:
        error: str | None = None
        try:
            known = self._dispatcher.table.replicas.get(replica)
            if self._held_table is not None:  # the held table may have the replica
                await self._builds.wait(min(limit_s, LOADING_S))
            elif known is not None:
                await self._builds.wait(limit_s, (known.model, known.version))
            model = self._model_of(replica)
            if model.generation is not None:
                await self._streams.probe(replica, PROBE_TOKENS, limit_s)
            else:
                await self._dispatcher.probe(replica, example_of(model), limit_s)
        except Exception as problem:  # the user's example may raise anything
            error = f"{type(problem).__name__}: {problem}"
        self._agent.send(messages.ProbeResult(replica, error))

    def _model_of(self, replica: str) -> Model:
        known = self._dispatcher.table.replicas.get(replica)
        versions = self._gateway.models.get(known.model, {}) if known else {}
        model = versions.get(known.version) if known else None
        if model is None:
            raise UnknownModelError(
                f"this gateway does not have the model of replica {replica}"
            )
        return model

    async def _exit_if_orphaned(self) -> None:
        """Shut down after a time without a controller and without requests."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._clock()
            is_busy = self._dispatcher.in_flight or self._streams.in_flight
            latest = max(self._dispatcher.asked_at, self._streams.asked_at)
            asked_at = now if is_busy else latest
            lost_at = self._agent.lost_at
            factor = ORPHAN_FACTOR if self._agent.joined_at is not None else 1
            if lost_at is None:
                continue
            if now - max(asked_at, lost_at) > factor * self._args.orphan_s:
                logger.warning("no controller and no requests: this gateway exits")
                self._end()


async def run_gateway(args: ProcessArgs) -> int:
    try:
        async with WorldManager(config=args.config()) as manager:
            await GatewayProcess(args, manager).run()
    except (MultiWorldError, OSError) as error:
        logger.error("%s", error)
        return 1
    return 0
