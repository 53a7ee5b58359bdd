"""Sampling and export of spans, through OpenTelemetry's SDK.

OpenTelemetry's environment variables configure it:
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/. A
slow or failed exporter costs only the memory of a bounded number of spans.
"""

from __future__ import annotations

import importlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import multiworld
from multiworld.errors import ConfigError
from multiworld.serve.tracing.spans import Attributes, Span
from multiworld.serve.wire.origin import Parent

logger = logging.getLogger("multiworld.serve")

EXPORTER, DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SDK = "opentelemetry.sdk.trace"
OTLP = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
"""Modules with an ``OTLPSpanExporter``, by protocol."""

RATIO = re.compile(r"(?:ParentBased\{root:)?TraceIdRatioBased\{([\d.e+-]+)\}")
"""Description of a sampler that takes a share of all new traces."""

IDS = 16  # last hexadecimal digits of a trace's id, by which ratio samplers decide

FLUSH_S = 1.0  # maximum seconds to export the last spans of a process


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the environment enables traces."""
    exporter = environment.get(EXPORTER, "").strip()
    if environment.get(DISABLED, "").strip().lower() == "true" or exporter == "none":
        return False
    return bool(exporter or any(environment.get(name) for name in ENDPOINTS))


def check(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if exporter or protocol is unsupported or not installed."""
    if not is_wanted(environment):
        return
    exporter = environment.get(EXPORTER, "").strip() or "otlp"
    if exporter not in ("otlp", "console"):
        raise ConfigError(EXPORTER, exporter, "give otlp, console or none")
    needed = [SDK.rpartition(".")[0]]
    if exporter == "otlp":
        needed.append(_otlp_module(environment).rpartition(".")[0])
    for name in needed:
        if not _exists(name):
            rule = f"{name} is not installed: pip install 'multiworld-elastic[otel]'"
            raise ConfigError(EXPORTER, exporter, rule)


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _otlp_module(environment: Mapping[str, str]) -> str:
    found = [environment[name] for name in PROTOCOLS if environment.get(name)]
    protocol = found[0].strip() if found else "http/protobuf"
    if protocol not in OTLP:
        raise ConfigError(PROTOCOLS[1], protocol, f"give one of {', '.join(OTLP)}")
    return OTLP[protocol]


def _bound_of(sampler: Any) -> int | None:
    """Return the bound below which a ratio sampler takes a new trace's id.

    None: it is another sampler. The descriptions of samplers are specified:
    https://opentelemetry.io/docs/specs/otel/trace/sdk/#getdescription
    """
    found = RATIO.match(sampler.get_description())
    if found is None:
        return None
    sampling = importlib.import_module("opentelemetry.sdk.trace.sampling")
    bound: int = sampling.TraceIdRatioBased.get_bound_for_rate(float(found[1]))
    return bound


class Tracer:
    """Tracer of one process, made by ``tracer_of``."""

    def __init__(
        self,
        sampler: Any,  # OpenTelemetry's ``Sampler``
        processor: Any,  # OpenTelemetry's ``SpanProcessor``, which exports
        resource: Any,  # OpenTelemetry's ``Resource``, which describes this process
        clock: Callable[[], float] = time.monotonic,  # measures all times of spans
    ) -> None:
        self._sampler, self._processor, self._resource = sampler, processor, resource
        self._bound = _bound_of(sampler)
        self._clock = clock
        self._api = importlib.import_module("opentelemetry.trace")
        self._sdk = importlib.import_module(SDK)
        scope = importlib.import_module("opentelemetry.sdk.util.instrumentation")
        self._scope = scope.InstrumentationScope("multiworld", multiworld.__version__)

    def root(self, parent: Parent | None, trace: str, span: str, name: str) -> Parent:
        """Return the span with id ``span`` for a request; decide whether it is sampled.

        Its trace is that of ``parent`` (the client's span) or, without one, ``trace``.
        """
        context = None
        if parent is None and self._bound is not None:
            # The same decision, in a tenth of the time.
            return Parent(trace, span, int(trace[-IDS:], 16) < self._bound)
        if parent is not None:
            known = self._context(parent.trace, parent.span, parent.is_sampled, True)
            trace = parent.trace
            context = self._api.set_span_in_context(self._api.NonRecordingSpan(known))
        found = self._sampler.should_sample(context, int(trace, 16), name)
        return Parent(trace, span, found.decision.is_sampled())

    def begun(self, name: str) -> Parent:
        """Return the root span of an operation that no client requested."""
        return self.root(None, secrets.token_hex(16), secrets.token_hex(8), name)

    def export(self, spans: Iterable[Span]) -> None:
        """Queue spans for export, whether sampled or not; never blocks."""
        offset_ns = time.time_ns() - int(self._clock() * 1e9)
        for span in spans:
            self._processor.on_end(self._exported(span, offset_ns))

    def _exported(self, span: Span, offset_ns: int) -> Any:
        def at(moment: float) -> int:
            return int(moment * 1e9) + offset_ns

        sdk, status = self._sdk, importlib.import_module("opentelemetry.trace.status")
        trace, of = span.parent.trace, span.parent.span
        code = status.StatusCode.ERROR if span.error else status.StatusCode.UNSET
        return sdk.ReadableSpan(
            name=span.name,
            context=self._context(trace, span.id or secrets.token_hex(8), True, False),
            parent=self._context(trace, of, True, True) if of else None,
            resource=self._resource,
            attributes=span.attributes,
            events=[
                sdk.Event(name, attributes, at(moment))
                for name, moment, attributes in span.events
            ],
            kind=self._api.SpanKind[span.kind.value],
            status=status.Status(code, span.error or None),
            start_time=at(span.began_at),
            end_time=at(max(span.began_at, span.ended_at)),
            instrumentation_scope=self._scope,
        )

    def _context(self, trace: str, span: str, is_sampled: bool, is_remote: bool) -> Any:
        flags = self._api.TraceFlags(int(is_sampled))
        return self._api.SpanContext(int(trace, 16), int(span, 16), is_remote, flags)

    def close(self) -> None:
        """Export the remaining spans; blocks for at most ``FLUSH_S``."""
        # In a thread: the SDK ignores the time that ``force_flush`` is given.
        flush = threading.Thread(target=self._processor.force_flush, daemon=True)
        flush.start()
        flush.join(FLUSH_S)


def modules(environment: Mapping[str, str]) -> list[str]:
    """Return the modules that a tracer needs, for import before a fork."""
    if not is_wanted(environment):
        return []
    found = [f"{SDK}.export", "opentelemetry.sdk.resources"]
    if environment.get(EXPORTER, "").strip() != "console":
        found.append(_otlp_module(environment))
    return found


def tracer_of(
    environment: Mapping[str, str], app: str, process: str, about: Attributes
) -> Tracer | None:
    """Return the tracer of a process; None if the environment does not enable traces.

    Call this in the process itself, not before a fork, because it starts a thread.
    """
    if not is_wanted(environment):
        return None
    try:
        check(environment)
    except ConfigError as error:
        logger.warning("this process exports no traces: %s", error)
        return None
    sdk = importlib.import_module(SDK)
    export = importlib.import_module(f"{SDK}.export")
    if environment.get(EXPORTER, "").strip() == "console":
        exporter = export.ConsoleSpanExporter()
    else:
        exporter = importlib.import_module(_otlp_module(environment)).OTLPSpanExporter()
    resources = importlib.import_module("opentelemetry.sdk.resources")
    own: Attributes = {
        "service.name": app,
        "service.instance.id": process,
        "service.version": multiworld.__version__,
        **about,
    }
    given = resources.OTELResourceDetector().detect().attributes
    resource = resources.Resource.create({**own, **given})
    # The provider selects the sampler from the environment.
    sampler = sdk.TracerProvider(shutdown_on_exit=False).sampler
    return Tracer(sampler, export.BatchSpanProcessor(exporter), resource)
