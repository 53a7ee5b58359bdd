"""The measured services: multiworld's, Ray Serve, and the upper bounds."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

import multiworld
from benchmarks.rivals.environment import HERE
from benchmarks.serving import BARE, CHAIN, OURS, RAY, WHOLE

EMPTY, SLOW, MINILM = "empty", "slow", "minilm"
"""Names of the pipelines."""

TEXT = "A replica that is lost is replaced, and nobody who asked has to ask again."
NUMBER: dict[str, Any] = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]
}
STOP_S = 60.0
"""Maximum seconds for a service to shut down."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running pipeline, and a request for it.

    Attributes:
        name: Name of the contender.
        pipeline: Name of the pipeline.
        url: URL to post to.
        body: Body of the request, for JSON.
    """

    name: str
    pipeline: str
    url: str
    body: dict[str, Any]


def spec_of(only: str | None = None, replicas: int = 1) -> dict[str, Any]:
    """Return the spec of one of multiworld's pipelines, or of all but the slow one."""
    factory = "benchmarks.serving.models:"
    minilm = "multiworld.demo.minilm:model"
    stage = {"max_batch_size": 64, "replicas": replicas}
    models: dict[str, Any] = {
        EMPTY: {"factory": factory + "empty", "stages": [stage] * 3},
        "empty-whole": {"factory": factory + "empty", "stages": [stage]},
        SLOW: {"factory": factory + "slow", "stages": [stage] * 3},
        MINILM: {"factory": minilm, "stages": [{"name": f"s{n}"} for n in range(3)]},
        "minilm-whole": {"factory": minilm, "stages": [{}]},
    }
    if only is not None:
        models = {only: models[only]}
    else:
        del models[SLOW]
    return {"app": "bench", "models": models, "gateway": {"port": 0}}


@contextlib.contextmanager
def running(
    spec: dict[str, Any], folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Serve a spec; yield its URL. Its state is in ``folder / "state"``.

    ``environment``: variables besides those of this process.
    """
    path = folder / "app.yaml"
    path.write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "multiworld.cli.main", "serve", str(path)]
    command += ["--state", str(folder / "state"), "--json"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError((folder / "log").read_text()[-2000:])
        url: str = json.loads(line)["url"]
        yield url
    finally:
        process.terminate()
        process.wait(STOP_S)
        process.stdout.close()


@contextlib.contextmanager
def ours(
    folder: Path, only: str | None = None, replicas: int = 1
) -> Iterator[list[Service]]:
    """Serve the pipeline ``only`` of multiworld; None: all but the slow one."""
    with running(spec_of(only, replicas), folder) as url:
        yield list(_asked(url, only))


def _asked(url: str, only: str | None) -> Iterator[Service]:
    def infer(model: str) -> str:
        return f"{url}/v2/models/{model}/infer"

    embed = f"{url}/v1/embeddings"
    every = (
        Service(OURS, EMPTY, infer(EMPTY), NUMBER),
        Service(WHOLE, EMPTY, infer("empty-whole"), NUMBER),
        Service(OURS, SLOW, infer(SLOW), NUMBER),
        Service(OURS, MINILM, embed, {"input": TEXT, "model": MINILM}),
        Service(WHOLE, MINILM, embed, {"input": TEXT, "model": "minilm-whole"}),
    )
    for service in every:
        if service.pipeline == only or (only is None and service.pipeline != SLOW):
            yield service


@contextlib.contextmanager
def rays(
    python: str | Path, pipeline: str, folder: Path, replicas: int = 1
) -> Iterator[Service]:
    """Serve one pipeline on Ray Serve, with an interpreter that has ``ray[serve]``."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    script = HERE / "ray_serving.py"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    process = subprocess.Popen(
        [str(python), str(script), pipeline, str(port), str(replicas)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={
            **kept,
            "PYTHONPATH": str(_site(folder)),
            "HF_HUB_OFFLINE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"Ray Serve did not start with {python}")
        body = NUMBER if pipeline != MINILM else {"model": MINILM, "input": TEXT}
        yield Service(RAY, pipeline, f"http://127.0.0.1:{port}/", body)
    finally:
        process.stdin.close()
        process.wait(STOP_S)


@contextlib.contextmanager
def ceiling(name: str) -> Iterator[Service]:
    """Serve one of the upper bounds, BARE or CHAIN; see the module ``ceiling``."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = int(sock.getsockname()[1])
        module = "benchmarks.serving.ceiling"
        stages = {BARE: "0", CHAIN: "3"}[name]
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(sock.fileno()), stages],
            stdin=subprocess.PIPE,
            pass_fds=[sock.fileno()],
        )
    assert process.stdin is not None
    try:
        yield Service(name, EMPTY, f"http://127.0.0.1:{port}/", NUMBER)
    finally:
        process.stdin.close()
        process.wait(STOP_S)


def _site(folder: Path) -> Path:
    """Return a folder that contains only the model's package and this one."""
    from multiworld.demo import minilm

    site = Path(tempfile.mkdtemp(dir=folder))
    ours = Path(multiworld.__file__).parent
    for package in (ours, minilm.folder().parent):
        (site / package.name).symlink_to(package)
    return site


def pids_of(state: Path, prefix: str = "") -> list[int]:
    """Return the PIDs of processes by prefix of their name; "": all, with the store."""
    record = json.loads((state / "record.json").read_text())
    found = [p["pid"] for p in record["processes"] if p["name"].startswith(prefix)]
    return found if prefix else [*found, record["store"]["pid"]]


def family_of(state: Path) -> list[int]:
    """Return the PIDs of a service's processes, store, controller and their helpers."""
    found = [psutil.Process(pid) for pid in pids_of(state)]
    # The command line of a process that exits meanwhile is None.
    commands = {
        process: process.info["cmdline"] or []
        for process in psutil.process_iter(["cmdline"])
    }
    controllers = [
        process
        for process, command in commands.items()
        if str(state) in command and "serve" in command
    ]
    helpers = [c for p in [*found, *controllers] for c in p.children(recursive=True)]
    return sorted({process.pid for process in [*found, *controllers, *helpers]})
