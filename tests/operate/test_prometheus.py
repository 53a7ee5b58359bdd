"""Our alert rules and board, read by Prometheus, beside a service with faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import yaml

from tests.serve.harness import ROOT, WAIT_S, Served, body, served
from tests.serve.models import RAISE
from tests.serve.texts import asked, spec_of
from tests.tiny_decoder import save_decoder

MONITORING = ROOT / "examples" / "monitoring"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROMETHEUS is None, reason="there is no Prometheus here"),
]

ALERT_S = 60.0
"""Seconds for an alert to fire, and to clear again."""

NAME = re.compile(r"\b((?:multiworld|vllm)[_:][a-z0-9_]+)")
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def shortened(rules: str) -> str:
    """Return rules whose minutes are seconds, so that a test sees them clear."""
    rules = re.sub(r"\[\d+m\]", "[8s]", rules)
    return re.sub(r"for: \d+[sm]", "for: 1s", rules)


def names_of(text: str) -> set[str]:
    return {SUFFIX.sub("", name) for name in NAME.findall(text)}


class Prometheus:
    """A server that scrapes a service, and evaluates our rules."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **params: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def alerts(self) -> dict[str, list[dict[str, str]]]:
        """Return the labels of the alerts that fire, by name."""
        found: dict[str, list[dict[str, str]]] = {}
        for each in self.ask("alerts")["alerts"]:
            if each["state"] == "firing":
                found.setdefault(each["labels"]["alertname"], []).append(each["labels"])
        return found

    async def until(self, name: str, *, fires: bool) -> None:
        limit = time.monotonic() + ALERT_S
        while (name in await asyncio.to_thread(self.alerts)) is not fires:
            assert time.monotonic() < limit, (name, fires, self.alerts())
            await asyncio.sleep(0.5)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    spec = spec_of(save_decoder(tmp_path_factory.mktemp("decoder")))
    # Long enough for a silent replica to be seen before it is replaced.
    spec["silence_s"] = 20.0
    spec["models"]["tensors"] = {"factory": "tests.serve.models:model"}
    spec["models"]["tensors"]["stages"] = [{}, {}, {}]
    with served(tmp_path_factory.mktemp("watched"), spec) as made:
        yield made


@pytest.fixture(scope="module")
def prometheus(
    service: Served, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    rules = (MONITORING / "alerts.yaml").read_text()
    (folder / "alerts.yaml").write_text(shortened(rules))
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    target = service.url.removeprefix("http://")
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        limit = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                if found.ask("query", query='up{job="multiworld"}')["result"]:
                    break
            assert time.monotonic() < limit, (folder / "log").read_text()
            time.sleep(0.2)
        yield found
    finally:
        process.terminate()
        process.wait(WAIT_S)


def test_prometheus_accepts_the_files() -> None:
    for words in (["rules", "alerts.yaml"], ["config", "prometheus.yaml"]):
        command = [str(PROMTOOL), "check", *words]
        done = subprocess.run(command, cwd=MONITORING, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout


def complete(service: Served) -> None:
    """Have a stream in the metrics."""
    wanted = asked(4)
    wanted |= wanted.pop("extra_body")
    url = f"{service.url}/v1/completions"
    assert httpx.post(url, json=wanted, timeout=WAIT_S).status_code == 200


def test_prometheus_finds_no_fault_in_our_metrics(service: Served) -> None:
    complete(service)
    text = httpx.get(f"{service.url}/metrics", timeout=WAIT_S).content
    command = [str(PROMTOOL), "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    # vLLM's names have a colon, which is for recording rules.
    found = [
        line
        for line in (done.stdout + done.stderr).decode().splitlines()
        if not line.startswith("vllm:")
    ]
    assert found == []


def test_every_query_is_of_metrics_that_there_are(
    service: Served, prometheus: Prometheus
) -> None:
    complete(service)
    board = json.loads((MONITORING / "grafana.json").read_text())
    queries = [
        target["expr"] for panel in board["panels"] for target in panel["targets"]
    ]
    queries += [each["expr"] for each in board["annotations"]["list"]]
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    queries += [rule["expr"] for group in groups for rule in group["rules"]]
    scaled = yaml.safe_load((MONITORING / "keda.yaml").read_text())
    queries += [each["metadata"]["query"] for each in scaled["spec"]["triggers"]]
    text = httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
    there = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert set().union(*map(names_of, queries)) - there == set()
    for query in queries:
        plain = query.replace("$__rate_interval", "10s").replace("$__range", "1m")
        prometheus.ask("query", query=plain.replace("$model", ".*"))


async def test_quiet_service_alerts_nobody(
    service: Served, prometheus: Prometheus
) -> None:
    await asyncio.to_thread(service.until, lambda: service.status().is_ready, "ready")
    for name in await asyncio.to_thread(prometheus.alerts):  # of the start
        await prometheus.until(name, fires=False)
    assert prometheus.alerts() == {}


async def test_failing_requests_alert_and_clear(
    service: Served, prometheus: Prometheus
) -> None:
    url = f"{service.url}/v2/models/tensors/infer"
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        until = asyncio.ensure_future(
            prometheus.until("MultiworldRequestsFail", fires=True)
        )
        while not until.done():
            await http.post(url, json=body(1.0, RAISE))
            await asyncio.sleep(0.1)
        await until
        (labels,) = prometheus.alerts()["MultiworldRequestsFail"]
        assert labels["model"] == "tensors"
        until = asyncio.ensure_future(
            prometheus.until("MultiworldRequestsFail", fires=False)
        )
        while not until.done():
            await http.post(url, json=body(1.0))
            await asyncio.sleep(0.1)
        await until


async def test_silent_replica_alerts_and_clears(
    service: Served, prometheus: Prometheus
) -> None:
    processes = service.status().processes
    name, pid = next((p.name, p.pid) for p in processes if p.model == "tensors")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        url = f"{service.url}/v2/models/tensors/infer"
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            asked = asyncio.ensure_future(http.post(url, json=body(1.0)))
            await prometheus.until("MultiworldReplicaSilent", fires=True)
            (labels,) = prometheus.alerts()["MultiworldReplicaSilent"]
            assert labels["replica"] == name
            os.kill(pid, signal.SIGCONT)
            await asked
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    await prometheus.until("MultiworldReplicaSilent", fires=False)


async def test_dying_replicas_alert_and_clear(
    service: Served, prometheus: Prometheus
) -> None:
    until = asyncio.ensure_future(prometheus.until("MultiworldReplicasDie", fires=True))
    while not until.done():
        with contextlib.suppress(Exception):  # none is ready
            await asyncio.to_thread(service.break_replica, "kill", "middle")
        await asyncio.sleep(0.3)
    await until
    await prometheus.until("MultiworldReplicasDie", fires=False)
    await asyncio.to_thread(service.until, lambda: service.status().is_ready, "ready")
    await prometheus.until("MultiworldStageEmpty", fires=False)


def test_scaled_object_is_what_keda_accepts() -> None:
    """The schema is KEDA's own, of its custom resource (Apache 2.0)."""
    schema = json.loads((Path(__file__).parent / "scaledobject.json").read_text())
    scaled = yaml.safe_load((MONITORING / "keda.yaml").read_text())
    jsonschema_rs.validator_for(schema).validate(scaled)
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 16
    assert not jsonschema_rs.validator_for(schema).is_valid(scaled)
