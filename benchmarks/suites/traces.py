"""Suite "traces": cost of OpenTelemetry, alternating with a service without it.

The load is requests to one empty stage, and streams of SmolLM2 in int8. A receiver in
this process takes the spans, and drops them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.members import Options
from benchmarks.serving.by_turns import (
    EMPTY_MODEL,
    Difference,
    OnStep,
    requests,
    serving,
    streams,
    text_model,
)
from multiworld.demo import smollm2

BASELINE = "without"
SHARES = {"1 % sampled": 0.01, "all sampled": 1.0}
"""Share of the requests whose spans are exported, by contender."""


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def _receiving() -> Iterator[str]:
    """Receive spans; yield the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def run(options: Options, on_step: OnStep) -> None:
    """Measure requests and streams, one after the other."""
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    with _receiving() as url:
        contenders = {BASELINE: Difference()}
        for name, share in SHARES.items():
            environment = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": url,
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": str(share),
            }
            contenders[name] = Difference(environment=environment)
        with serving(EMPTY_MODEL, contenders) as services:
            asyncio.run(requests(services, options, on_step))
        with serving(text_model(folder), contenders) as services:
            asyncio.run(streams(services, options, on_step))
