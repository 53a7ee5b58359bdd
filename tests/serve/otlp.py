"""A receiver of OTLP over HTTP, which decodes what it gets."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)


def _value(found: Any) -> Any:
    kind = found.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in found.array_value.values]
    return getattr(found, kind) if kind else None


def _attributes(found: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in found}


@dataclass(frozen=True)
class Got:
    """A span, as it was received."""

    name: str
    trace: str
    id: str
    parent: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: list[str]
    is_error: bool
    process: dict[str, Any]


@dataclass
class Receiver:
    """What was received; ``url`` is for ``OTEL_EXPORTER_OTLP_ENDPOINT``."""

    url: str = ""
    spans: list[Got] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, content: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(content)
        found = [
            Got(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                _attributes(span.attributes),
                [event.name for event in span.events],
                span.status.code == 2,
                _attributes(resource.resource.attributes),
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self.changed:
            self.spans += found
            self.changed.notify_all()

    def until(
        self, is_whole: Callable[[list[Got]], bool], limit_s: float = 30.0
    ) -> list[Got]:
        """Wait until the spans are as wanted; return them."""
        with self.changed:
            is_so = self.changed.wait_for(lambda: is_whole(self.spans), limit_s)
            assert is_so, [each.name for each in self.spans]
            return list(self.spans)

    def trace(self, trace: str, *names: str) -> list[Got]:
        """Return the spans of a trace once it has some of each of these names."""

        def of(spans: list[Got]) -> list[Got]:
            return [each for each in spans if each.trace == trace]

        def is_whole(spans: list[Got]) -> bool:
            return {*names} <= {each.name for each in of(spans)}

        return of(self.until(is_whole))


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Receive at a port of loopback."""
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                content = gzip.decompress(content)
            assert self.path == "/v1/traces"
            found.take(content)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
