"""Models with fixed-time stages on Ray Serve, autoscaled. Needs ``ray[serve]``.

Arguments: a port, and a JSON object with ``models`` (milliseconds of each stage, by
model name) and either ``autoscaling_config`` or ``fleet`` (replicas of each stage). The
script prints "ready", and then every half second the number of replicas by model as a
line of JSON, until its standard input ends.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

LOOK_S = 0.5
"""Seconds between counts of the replicas."""

ACTOR = {"num_cpus": 0.1}


@serve.deployment(max_ongoing_requests=32, ray_actor_options=ACTOR)
class Paced:
    """Sleeps a fixed time for each request, one request after the other."""

    def __init__(self, ms: float) -> None:
        self._ms, self._lock = ms, threading.Lock()

    def __call__(self, value: float) -> float:
        with self._lock:
            time.sleep(self._ms / 1000)
        return value


@serve.deployment(max_ongoing_requests=1000, ray_actor_options=ACTOR)
class Ingress:
    """Sends a number through the stages."""

    def __init__(self, *stages: Any) -> None:
        self._stages = stages

    async def __call__(self, request: Request) -> dict[str, Any]:
        value = (await request.json())["inputs"][0]["data"][0]
        for stage in self._stages:
            value = stage.remote(value)
        return {"outputs": [{"data": [await value]}]}


def main() -> None:
    """Serve until standard input ends."""
    port, config = int(sys.argv[1]), json.loads(sys.argv[2])
    logging.disable(logging.WARNING)
    ray.init(
        num_cpus=32,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    for name, times in config["models"].items():
        stages = [
            Paced.options(
                name=f"{name}-{k}",
                **(
                    {"num_replicas": config["fleet"][k]}
                    if config.get("fleet")
                    else {"autoscaling_config": config["autoscaling_config"]}
                ),
            ).bind(ms)
            for k, ms in enumerate(times)
        ]
        app = Ingress.options(name=f"{name}-in").bind(*stages)
        serve.run(app, name=name, route_prefix=f"/{name}")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    threading.Thread(target=_watch, args=(config["models"],), daemon=True).start()
    sys.stdin.read()
    serve.shutdown()


def _watch(models: dict[str, Any]) -> None:
    """Print the number of stage replicas by model, in any state."""
    while True:
        found: Counter[str] = Counter()
        for name, app in serve.status().applications.items():
            for title, deployment in app.deployments.items():
                if not title.endswith("-in"):
                    found[name] += sum(deployment.replica_states.values())
        sys.stdout.write(json.dumps({name: found[name] for name in models}) + "\n")
        sys.stdout.flush()
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main()
