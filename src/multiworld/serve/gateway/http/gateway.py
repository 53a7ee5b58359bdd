"""State shared by the HTTP routes of a gateway."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec

from multiworld.errors import (
    InvalidRequestError,
    NoReplicaError,
    RequestPoisonedError,
    UnknownModelError,
)
from multiworld.serve.gateway.admission.authenticator import (
    AdmittedRequest,
    Authenticator,
    ModelVersion,
    digest_of,
)
from multiworld.serve.gateway.http.body_limits import (
    BodyBudget,
    BodyLimits,
)
from multiworld.serve.gateway.http.kept_events import EventLogs
from multiworld.serve.gateway.http.metrics import render
from multiworld.serve.gateway.http.preparations import Preparations
from multiworld.serve.gateway.http.request_counts import RequestCounts
from multiworld.serve.gateway.requests.dispatcher import Dispatcher
from multiworld.serve.gateway.streams.streams import Streams
from multiworld.serve.machines.freed_memory import trim_heap
from multiworld.serve.machines.usage import own_cpu_s
from multiworld.serve.queueing.fair_pool import FairPool
from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.routing import refusals
from multiworld.serve.spec.dedicated import is_dedicated, route_of
from multiworld.serve.spec.schema import ModelSpec
from multiworld.serve.spec.stage import Model, Tensors
from multiworld.serve.tenants.directory import ANONYMOUS, Tenant
from multiworld.serve.text.limits import longest_of
from multiworld.serve.tracing.tracer import Tracer
from multiworld.serve.wire.collation import rows_of
from multiworld.serve.wire.control_messages import (
    Counted,
    FleetReport,
    GatewayReport,
    summed,
)
from multiworld.serve.wire.routing_table import ReplicaState

# Inputs of at least this many bytes are hashed in a thread.
LARGE_BYTES = 256 * 1024
LOG_BYTES = 64 * 2**20  # maximum bytes of the event logs
ENCODERS = 2  # threads that encode prompts

T = TypeVar("T")


class Gateway:
    """A gateway's models, authenticator, dispatcher and streams."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: BodyLimits,
        bodies: BodyBudget,
        authenticator: Authenticator | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.dispatcher, self.limits, self.bodies = dispatcher, limits, bodies
        self.streams = streams or Streams(dispatcher.name)
        self.specs: dict[tuple[str, str], ModelSpec] = {}
        self.authenticator = authenticator or Authenticator(needs_key=False)
        # Called for each poison request that this gateway finds, with the tenant, the
        # model and version, and the request's digest.
        self.on_poison: Callable[[str, ModelVersion, str], None] = lambda *_: None
        self.models: dict[str, dict[str, Model]] = {}
        # Text frontends, by model and version.
        self.text_frontends: dict[tuple[str, str], Any] = {}
        self._bases: dict[str, str] = {}
        self._dedicated = set[str]()  # dedicated models whose replicas have started
        self._loading: dict[tuple[str, str], asyncio.Future[Any]] = {}
        self.compiling = FairPool("multiworld compile")  # compiles grammars
        self.encoding = FairPool("multiworld encode", ENCODERS)  # encodes prompts
        self.preparations = Preparations(self.authenticator.clock)
        self.counts = RequestCounts()
        self.fleet = FleetReport()
        # Updates ``fleet``. The process replaces this default, which does nothing.
        self.ask_fleet: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)
        # Seconds for which a stream without a client is kept: default and maximum.
        self.detach_s, self.max_detach_s = 0.0, 600.0
        self.event_logs = EventLogs(LOG_BYTES)
        self.tracer: Tracer | None = None
        self.is_shutting_down = self.logs_access = self.is_strict = False

    def counted(self, report: GatewayReport) -> Iterator[Counted]:
        """Yield all counts since the start; ``report``: the current one."""
        yield from self.counts.counted()
        yield from self.streams.timed.counted()
        for kind, count in self.streams.counts.items():
            yield "stream_events", (kind,), count
        for (tenant, why), count in self.authenticator.refused.items():
            yield "refused", (tenant, why), count
        for kind, count in report.counts.items():
            yield "router_events", (kind,), count
        none = dict.fromkeys(self.dispatcher.table.routes, 0)
        for model, count in {**none, **report.attained}.items():
            yield "attained", (model,), count
        for model, count in {**none, **report.missed}.items():
            yield "missed", (model,), count

    def report(self) -> GatewayReport:
        report = self.dispatcher.report()
        at_streams = self.streams.router.load()
        streams, queued = self.streams, self.streams.router.waiting
        of_streams = streams.attainment
        tenants, models, oldest_s = streams.in_progress()
        prepared = self.preparations
        for model, waited_s in prepared.oldest_s().items():
            oldest_s[model] = max(waited_s, oldest_s.get(model, 0.0))
        return msgspec.structs.replace(
            report,
            arrived=Counter(report.arrived) + of_streams.arrived,
            attained=Counter(report.attained) + of_streams.attained,
            missed=Counter(report.missed) + of_streams.missed,
            refused=Counter(report.refused) + of_streams.refused,
            completions=streams.timed.of("completions"),
            prompt_tokens=streams.timed.of("prompt_tokens"),
            generated_tokens=streams.timed.of("generation_tokens"),
            in_flight=report.in_flight + self.streams.in_flight + len(prepared),
            load={**report.load, **at_streams},
            waiting={m: n + queued(m) for m, n in report.waiting.items()},
            pending={m: n + queued(m) for m, n in report.pending.items()},
            cpu_s=own_cpu_s(),
            tenants=summed(report.tenants, tenants, prepared.of_tenants()),
            models=summed(models, prepared.of_models()),
            oldest_s={**report.oldest_s, **oldest_s},
        )

    async def metrics(self) -> bytes:
        await self.ask_fleet()
        sums: Counter[tuple[str, tuple[str, ...]]] = Counter()
        report = self.report()
        for kind, labels, value in (*self.fleet.others, *self.counted(report)):
            sums[kind, labels] += value  # type: ignore[assignment]
        gateways = {**self.fleet.gateways, self.dispatcher.name: report}
        # Render in a thread, because the text is long if there are many tenants.
        return await asyncio.to_thread(
            render, sums, gateways, self.fleet, self.dispatcher.table
        )

    def may_use(self, tenant: Tenant, name: str) -> bool:
        is_served = self.base(name) in self.dispatcher.table.routes
        return is_served and not is_dedicated(name) and tenant.may_use(name)

    def base(self, name: str) -> str:
        """Return the base model of an adapter; return any other name unchanged."""
        return self._bases.get(name, name)

    def adapter(self, name: str) -> str:
        """Return ``name`` if it names an adapter, otherwise an empty string."""
        return name if name in self._bases else ""

    def names(self, tenant: Tenant) -> list[str]:
        served = (*self.dispatcher.table.routes, *self._bases)
        return sorted(name for name in served if self.may_use(tenant, name))

    def route(self, name: str, tenant: Tenant) -> str:
        """Return the tenant's dedicated model, or the shared one if there is none.

        The base model serves an adapter. The shared model serves a tenant until the
        tenant's dedicated replicas have started for the first time.
        """
        base = self.base(name)
        own = route_of(base, tenant.name, self.dispatcher.table.routes)
        if own != base and own not in self._dedicated:
            if base in self.dispatcher.table.routes and not self._is_started(own):
                return base
            self._dedicated.add(own)
        return own

    def check_known(self, name: str, tenant: Tenant) -> None:
        """Raise UnknownModelError unless the tenant may use the model ``name``."""
        if not self.may_use(tenant, name):
            if self.base(name) in self.dispatcher.table.routes:
                self.authenticator.count_refusal(tenant.name, "model")
            raise refusals.unknown_model(name, self.names(tenant))

    def model(
        self,
        name: str,
        version: str | None = None,
        tenant: Tenant = ANONYMOUS,
        begun: str = "",
        identity: str = "",
    ) -> tuple[str, Model]:
        """Return a model's active version, the only one served, and the model itself.

        A request that another gateway began with version ``begun`` keeps that version
        while it is loaded. Later, the request continues with the active version if that
        version has the same ``identity``.
        """
        routes = self.dispatcher.table.routes
        self.check_known(name, tenant)
        name = self.route(name, tenant)
        route = routes[name]
        if begun and begun != route.version:
            model = self.models.get(name, {}).get(begun)
            if model is not None:
                return begun, model
            if not identity or identity != self.identity(name, route.version):
                raise NoReplicaError(f"version {begun!r} of model {name!r} is gone")
        elif version is not None and version != route.version:
            raise UnknownModelError(
                f"active version of this model is {route.version!r}, not {version!r}; "
                "request the active version, or omit the version"
            )
        model = self.models.get(name, {}).get(route.version)
        if model is None:
            raise NoReplicaError(f"model {name!r} is not loaded yet; retry later")
        return route.version, model

    def identity(self, name: str, version: str) -> str:
        """Return the name of a version's identity; empty if unknown."""
        spec = self.specs.get((name, version))
        return "" if spec is None or spec.identity is None else spec.identity.name

    def max_tokens(self, name: str, tenant: Tenant) -> int | None:
        """Return a text model's maximum tokens per sequence; None if not loaded."""
        name = self.route(name, tenant)
        version = self.dispatcher.table.routes[name].version
        model = self.models.get(name, {}).get(version)
        spec = self.specs.get((name, version))
        if model is None or spec is None:
            return None
        if model.generation is None or spec.generation is None:
            return None
        return longest_of(spec.generation, model.generation)

    def add_version(self, name: str, spec: ModelSpec, model: Model) -> None:
        self.models.setdefault(name, {})[spec.version] = model
        self.specs[name, spec.version] = spec
        self._find_adapters()

    def table_changed(self) -> None:
        """Remove versions that the routing table no longer has; update adapters."""
        routes = self.dispatcher.table.routes
        for name, versions in list(self.models.items()):
            kept = routes[name].stages.keys() if name in routes else ()
            for version in versions.keys() - kept:
                del versions[version]
                self.text_frontends.pop((name, version), None)
                self.specs.pop((name, version), None)
        self._dedicated &= routes.keys()
        self._find_adapters()

    def _find_adapters(self) -> None:
        routes = self.dispatcher.table.routes
        active = {n: self.specs.get((n, route.version)) for n, route in routes.items()}
        self._bases = {
            adapter: name
            for name, spec in active.items()
            if spec is not None and not is_dedicated(name)
            for adapter in spec.adapters
            if adapter not in routes
        }

    def is_ready(self, name: str) -> bool:
        return not self.missing_stages(name)

    def _is_started(self, name: str) -> bool:
        """Return whether every stage has a replica that has started.

        Only the routing table decides, because a new gateway is not yet connected to
        replicas. Stages that may scale to zero do not count.
        """
        table = self.dispatcher.table
        route = table.routes[name]
        return all(
            any(
                replica.state is not ReplicaState.STARTING
                for replica in table.stage(name, route.version, stage)
            )
            for stage in range(route.stages[route.version])
            if stage not in route.on_demand
        )

    def missing_stages(self, name: str) -> list[int]:
        """Return the stages that lack a ready replica and may not scale to zero."""
        on_demand = self.dispatcher.table.routes[name].on_demand
        return [s for s in self.dispatcher.missing(name) if s not in on_demand]

    def check_rows(
        self, name: str, version: str, tensors: Tensors, tenant: Tenant
    ) -> None:
        """Refuse a request that no batch can hold, before its tenant is charged."""
        spec = self.specs.get((self.route(name, tenant), version))
        if spec is None:
            return
        rows = rows_of(tensors)
        least = min(stage.max_batch_size for stage in spec.stages)
        if rows > least:
            raise InvalidRequestError(
                f"a request with {rows} rows does not fit into a batch of at most "
                f"{least} (max_batch_size); send fewer rows in one request"
            )

    async def infer(
        self,
        admitted: AdmittedRequest,
        name: str,
        version: str,
        tensors: Tensors,
        deadline_s: float | None,
        session: str | None = None,
    ) -> Tensors:
        """Run inference for one request; cancelling also cancels all its attempts.

        Raises ``OutdatedError`` if another version became active before the request
        was sent, or if the tenant's dedicated replicas were removed.
        """
        tenant, model_version = admitted.tenant, (name, version)
        await self.check_poison(admitted, model_version, lambda: _digest(tensors))
        served = self.route(name, tenant)
        try:
            answer = await self.dispatcher.infer(
                served,
                tensors,
                deadline_s=deadline_s,
                session=None if session is None else f"{tenant.name}\0{session}",
                share=tenant.share,
                timing=admitted.timing,
                version=version,
                origin=admitted.origin,
                is_resumed=admitted.is_resumed,
            )
        except UnknownModelError:
            # While the request waited, the model or the tenant's dedicated replicas
            # were removed.
            if served == name or name not in self.dispatcher.table.routes:
                raise refusals.unknown_model(name, self.names(tenant)) from None
            raise refusals.OutdatedError(f"{served!r} is no longer served") from None
        except RequestPoisonedError:
            self.found_poison(tenant, model_version, await _digest(tensors))
            raise
        admitted.rows += rows_of(tensors)
        return answer

    async def check_poison(
        self,
        admitted: AdmittedRequest,
        model_version: ModelVersion,
        digest: Callable[[], Awaitable[str]],
    ) -> None:
        """Refuse poison requests, and all requests of a quarantined tenant."""
        quarantine = self.authenticator.quarantine
        if quarantine.has_records(admitted.tenant.name, model_version):
            found = await digest()
            self.authenticator.check_poison(admitted, model_version, found)

    def found_poison(
        self, tenant: Tenant, model_version: ModelVersion, digest: str
    ) -> None:
        """Record a poison request that this gateway found, and report it."""
        self.record_poison(tenant.name, model_version, digest)
        self.on_poison(tenant.name, model_version, digest)

    def record_poison(
        self, tenant: str, model_version: ModelVersion, digest: str, age_s: float = 0.0
    ) -> None:
        """Record a poison request; reject a quarantined tenant's waiting requests.

        ``age_s``: seconds since it was found; the controller repeats those of the last
        hour to each gateway that joins, also to one that joins again and knows them.
        """
        quarantine, now = self.authenticator.quarantine, self.authenticator.clock()
        if age_s and quarantine.is_poison(tenant, model_version, digest, now):
            return
        if self.authenticator.add_poison(tenant, model_version, digest, age_s):
            self.dispatcher.quarantine(tenant, model_version[0])
            self.streams.quarantine(tenant, self.base(model_version[0]))

    def deadline_s(self, name: str, tenant: Tenant) -> float:
        """Return a model's default deadline, in seconds.

        The deadline is infinite if the model generates text and the spec sets none.
        """
        route = self.dispatcher.table.routes[self.route(name, tenant)]
        return route.deadline_s if route.has_deadline else math.inf

    async def encoded(self, share: Share, size: int, encode: Callable[[], T]) -> T:
        """Run a tokenizer in a thread, fairly among tenants; may take a second."""
        work = self.encoding.submit(share, 1.0 + size, encode)
        return await asyncio.wrap_future(work)

    async def text(self, name: str, version: str, model: Model) -> Any:
        """Return the text frontend of a model; load it once, in a thread."""
        load = model.text if model.generation is None else model.generation.tokenizer
        if load is None:
            raise InvalidRequestError(
                f"model {name!r} takes no text; send tensors to /v2/models/{name}/infer"
            )
        key = name, version
        if key in self.text_frontends:
            return self.text_frontends[key]
        loading = self._loading.get(key)
        if loading is None:
            loading = asyncio.ensure_future(asyncio.to_thread(_loaded, load))
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
            self._loading[key] = loading
        text = await asyncio.shield(loading)
        if version in self.models.get(name, {}):  # else it was removed meanwhile
            self.text_frontends[key] = text
        return text


def _loaded(load: Callable[[], Any]) -> Any:
    """Load a text frontend, including everything that its first use would load."""
    made = load()
    prepare = getattr(made, "prepare", None)
    if prepare is not None:
        prepare()
    trim_heap()
    return made


async def _digest(tensors: Tensors) -> str:
    """Return the digest of a request's tensors; hash large ones in a thread."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size < LARGE_BYTES:
        return digest_of(tensors)
    return await asyncio.to_thread(digest_of, tensors)
