"""What serving costs: requests a second and latency, beside Ray Serve in the same run.

``python benchmarks/serving.py [--ray PYTHON] [--rounds 5] [--seconds 4]``. ``--ray``
names an interpreter that has ``ray[serve]`` (and torch and transformers, for MiniLM).

All services are up at once; closed-loop clients (1, then 32) ask each in turn, and the
rounds alternate. Two pipelines of three stages: one that does nothing, which shows the
cost of the machinery, and the sentence encoder MiniLM. For the limit there is MiniLM in
one stage behind the same gateway. Writes ``results/serving.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import torch
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parent
TEXT = "A replica that is lost is replaced, and nobody who asked has to ask again."
CLIENTS = (1, 32)
START_S = 120.0

NUMBER: dict[str, Any] = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]
}


@dataclass
class Contender:
    """A service that is up."""

    name: str
    pipeline: str
    url: str
    body: dict[str, Any]
    rounds: dict[int, list[dict[str, float]]] = field(default_factory=dict)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def empty_model(stages: int) -> Any:
    """Return stages that do nothing; a factory of the service."""
    from multiworld.serve import Model, Stage, TensorSpec

    return Model(
        stages=[
            Stage(name=f"s{n}", load=lambda context: lambda tensors: tensors)
            for n in range(stages)
        ],
        inputs=[TensorSpec("x", "FP32", (-1,))],
        outputs=[TensorSpec("x", "FP32", (-1,))],
    )


def slow_model(stages: int) -> Any:
    """Return stages that take 50 ms, so that there is always work in flight."""
    from multiworld.serve import Model, Stage, Tensors, TensorSpec

    def sleep(tensors: Tensors) -> Tensors:
        time.sleep(0.05)
        return tensors

    return Model(
        stages=[Stage(load=lambda context: sleep) for _ in range(stages)],
        inputs=[TensorSpec("x", "FP32", (-1,))],
        outputs=[TensorSpec("x", "FP32", (-1,))],
    )


@contextlib.contextmanager
def multiworld_service(
    folder: Path, replicas: int = 1, only: str | None = None
) -> Iterator[list[Contender]]:
    """Serve all our pipelines, or one."""
    minilm = "multiworld.serve.models.minilm:model"
    empty = {"max_batch_size": 64, "replicas": replicas}
    spec: dict[str, Any] = {
        "app": "bench",
        "models": {
            "empty": {"factory": "serving:empty_model", "stages": [empty] * 3},
            "slow": {"factory": "serving:slow_model", "stages": [empty] * 3},
            "single": {
                "factory": "serving:empty_model",
                "stages": [empty],
            },
            "minilm": {
                "factory": minilm,
                "stages": [{"name": f"s{n}"} for n in range(3)],
            },
            "whole": {
                "factory": minilm,
                "stages": [{}],
            },
        },
        "gateway": {"port": 0},
    }
    if only is not None:
        spec["models"] = {only: spec["models"][only]}
    else:
        del spec["models"]["slow"]
    path = folder / "app.yaml"
    path.write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "multiworld.cli.main", "serve", str(path)]
    command += ["--state", str(folder / "state"), "--json"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit((folder / "log").read_text()[-2000:])
        url = json.loads(line)["url"]
        embed, text = f"{url}/v1/embeddings", {"input": TEXT}
        every = [
            Contender("multiworld", "empty", f"{url}/v2/models/empty/infer", NUMBER),
            Contender("multiworld", "slow", f"{url}/v2/models/slow/infer", NUMBER),
            Contender("one stage", "empty", f"{url}/v2/models/single/infer", NUMBER),
            Contender("multiworld", "minilm", embed, text | {"model": "minilm"}),
            Contender("one stage", "minilm", embed, text | {"model": "whole"}),
        ]
        wanted = {only} if only is not None else {"empty", "minilm"}
        yield [contender for contender in every if contender.pipeline in wanted]
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def ray_service(python: str, kind: str, replicas: int = 1) -> Iterator[Contender]:
    """Serve one pipeline on Ray Serve."""
    port = free_port()
    process = subprocess.Popen(
        [python, HERE / "serving_ray.py", kind, str(port), str(replicas)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{_site_of_minilm()}",
            "HF_HUB_OFFLINE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        line = process.stdout.readline()
        if line.strip() != "ready":
            raise SystemExit(f"Ray Serve did not start: {line}")
        body = NUMBER if kind != "minilm" else {"model": "minilm", "input": TEXT}
        yield Contender("Ray Serve", kind, f"http://127.0.0.1:{port}/", body)
    finally:
        process.stdin.close()
        process.wait(60)


def _site_of_minilm() -> str:
    """Return a folder that has the model's package and nothing else."""
    from multiworld.serve.models import minilm

    folder = Path(tempfile.gettempdir()) / "multiworld-bench-site"
    folder.mkdir(exist_ok=True)
    link = folder / minilm.PACKAGE
    if not link.exists():
        link.symlink_to(minilm.folder().parent)
    return str(folder)


async def ask(
    http: aiohttp.ClientSession, contender: Contender, clients: int, seconds: float
) -> dict[str, float]:
    """Ask in a closed loop; return what came of it."""
    latencies: list[float] = []
    end = time.monotonic() + seconds

    async def client() -> None:
        while (begin := time.monotonic()) < end:
            async with http.post(contender.url, json=contender.body) as response:
                await response.read()
                if response.status != 200:
                    raise SystemExit(f"{contender.name}: {response.status}")
            latencies.append(time.monotonic() - begin)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    took_s = time.monotonic() - began
    ordered = sorted(latencies)
    return {
        "requests_per_s": len(ordered) / took_s,
        "p50_ms": 1000 * ordered[len(ordered) // 2],
        "p99_ms": 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
    }


async def measure(contenders: list[Contender], rounds: int, seconds: float) -> None:
    """Ask everybody, in turn, round after round; the first is for warming up."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        for contender in contenders:
            await ask(http, contender, 4, 1.0)
        for number in range(rounds):
            for clients in CLIENTS:
                order = contenders if number % 2 else contenders[::-1]
                for contender in order:
                    found = await ask(http, contender, clients, seconds)
                    contender.rounds.setdefault(clients, []).append(found)
                    print(
                        f"{number + 1}/{rounds} {contender.pipeline:7} {clients:3} "
                        f"clients {contender.name:11} {found['requests_per_s']:8.1f} "
                        f"requests/s  p50 {found['p50_ms']:7.2f} ms",
                        flush=True,
                    )


def ticks(pids: Iterable[int]) -> float:
    """Return the seconds of a core that processes have taken so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def processes(state: Path, prefix: str = "") -> list[int]:
    """Return the service's processes whose names begin so."""
    record = json.loads((state / "record.json").read_text())
    found = [p["pid"] for p in record["processes"] if p["name"].startswith(prefix)]
    return found if prefix else [*found, record["store"]["pid"]]


async def idle_cpu(state: Path, seconds: float = 5.0) -> float:
    """Return the share of one core that the whole idle service takes."""
    pids = processes(state)
    before = ticks(pids)
    await asyncio.sleep(seconds)
    return (ticks(pids) - before) / seconds


async def cpu_per_request(
    state: Path, contender: Contender, seconds: float
) -> dict[str, float]:
    """Return microseconds of a core that a request takes, where, with 32 clients."""
    parts = {"gateway": "gateway", "three workers": "empty/"}
    pids = {name: processes(state, prefix) for name, prefix in parts.items()}
    async with aiohttp.ClientSession() as http:
        await ask(http, contender, 32, 1.0)
        before = {name: ticks(found) for name, found in pids.items()}
        rate = (await ask(http, contender, 32, seconds))["requests_per_s"]
    count = rate * seconds
    return {n: (ticks(p) - before[n]) / count * 1e6 for n, p in pids.items()}


def summary(contenders: list[Contender]) -> list[dict[str, Any]]:
    """Return medians of the rounds, and ratios to Ray Serve's."""
    rows: list[dict[str, Any]] = []
    for pipeline in ("empty", "minilm"):
        for clients in CLIENTS:
            here = [c for c in contenders if c.pipeline == pipeline]
            found = {
                c.name: {
                    key: median(r[key] for r in c.rounds[clients])
                    for key in ("requests_per_s", "p50_ms", "p99_ms")
                }
                for c in here
            }
            row: dict[str, Any] = {"pipeline": pipeline, "clients": clients, **found}
            if "Ray Serve" in found:
                ours, ray = found["multiworld"], found["Ray Serve"]
                row["rate_against_ray"] = ours["requests_per_s"] / ray["requests_per_s"]
                row["p50_against_ray"] = ours["p50_ms"] / ray["p50_ms"]
            if "one stage" in found:
                ours, whole = found["multiworld"], found["one stage"]
                row["rate_against_one_stage"] = (
                    ours["requests_per_s"] / whole["requests_per_s"]
                )
                row["hop_ms"] = (ours["p50_ms"] - whole["p50_ms"]) / 2
            rows.append(row)
    return rows


@contextlib.asynccontextmanager
async def everybody(python: str | None, folder: Path) -> AsyncIterator[list[Contender]]:
    """Start all services."""
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(multiworld_service(folder))
        if python is not None:
            for kind in ("empty", "minilm"):
                found.append(stack.enter_context(ray_service(python, kind)))
        yield found


async def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with everybody(given.ray, folder) as contenders:
            idle = await idle_cpu(folder / "state")
            cpu = await cpu_per_request(folder / "state", contenders[0], given.seconds)
            await measure(contenders, given.rounds, given.seconds)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rounds": given.rounds,
        "seconds": given.seconds,
        "idle_cores": idle,
        "cpu_us_per_request": cpu,
        "medians": summary(contenders),
        "contenders": [asdict(c) for c in contenders],
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", help="an interpreter that has ray[serve]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "serving.json")
    given = parser.parse_args()
    found = asyncio.run(run(given))
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(
        json.dumps(
            {k: found[k] for k in ("idle_cores", "cpu_us_per_request", "medians")},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
