"""Metrics of a service with two gateways: each scrape shows the sums of both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.harness import Served, body, served, spec_with, traffic

pytestmark = pytest.mark.timeout(240)

ANSWERED = "multiworld_requests_total", "200"
CLIENTS = 24
"""Connections, which the kernel divides between the gateways."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    spec = spec_with(gateway={"port": 0, "replicas": 2})
    with served(tmp_path_factory.mktemp("metrics"), spec) as made:
        yield made


def scraped(service: Served) -> dict[str, dict[str, float]]:
    """Return the sums of all samples by metric, and by their status, stage or kind."""
    text = httpx.get(f"{service.url}/metrics", timeout=20).text
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            what = [sample.labels.get(n, "") for n in ("status", "stage", "gateway")]
            label = next((one for one in what if one), "")
            sums = found.setdefault(sample.name, {})
            sums[label] = sums.get(label, 0.0) + sample.value
    return found


def answered(service: Served) -> float:
    name, status = ANSWERED
    return scraped(service).get(name, {}).get(status, 0.0)


def spread(service: Served, count: int) -> None:
    """Send requests, each on its own connection."""
    for number in range(count):
        assert service.infer(float(number)).status_code == 200


def test_one_scrape_counts_what_all_gateways_answered(service: Served) -> None:
    before = answered(service)
    spread(service, CLIENTS)
    per_gateway = [
        sum(report.counts.values())
        for name in ("gateway/1", "gateway/2")
        if (report := service.status(reports=True).gateway_report(name)) is not None
    ]
    assert len(per_gateway) == 2
    assert min(per_gateway) > 0, "one gateway got no connection"
    for _ in range(8):
        found = scraped(service)
        assert found[ANSWERED[0]]["200"] == before + CLIENTS
        assert found["multiworld_request_seconds_count"][""] == before + CLIENTS
        assert len(found["multiworld_in_flight"]) == 2
        stages = found["multiworld_stage_requests_total"]
        assert stages.keys() == {"0", "1", "2"}
        assert min(stages.values()) >= before + CLIENTS
        assert found["multiworld_build_info"][""] == 1


async def test_sums_equal_what_the_load_generator_counted_and_never_fall(
    service: Served,
) -> None:
    before = answered(service)
    seen = [before]
    async with traffic(service, 100.0) as load:
        await asyncio.to_thread(service.break_replica, "kill", "add")
        for _ in range(20):
            seen.append(await asyncio.to_thread(answered, service))
            await asyncio.sleep(0.1)
    assert seen == sorted(seen)
    assert seen[-1] > before
    assert answered(service) == before + len(load.load.samples)


@pytest.mark.parametrize("is_polite", [True, False])
def test_counts_of_a_gateway_that_has_ended_stay(
    service: Served, is_polite: bool
) -> None:
    """A killed one may lose what it counted after the last scrape."""
    spread(service, CLIENTS)
    before = answered(service)
    victim = next(p for p in service.status().processes if p.name.startswith("gateway"))
    assert victim.pid is not None
    if is_polite:
        service.command("drain", victim.name, "--state", str(service.state))
    else:
        os.kill(victim.pid, signal.SIGKILL)
    service.until(
        lambda: (
            victim.name not in [p.name for p in service.status().processes]
            and service.status().is_ready
        ),
        "the gateway is replaced",
    )
    assert answered(service) == before
    spread(service, CLIENTS)
    assert answered(service) == before + CLIENTS


def test_load_shows_what_requests_were_spent_on(
    service: Served, tmp_path: Path
) -> None:
    path = tmp_path / "body.json"
    path.write_text(json.dumps(body(1.0)))
    words = ("load", service.url, "m", "--body", str(path), "--seconds", "1")
    found = service.command(*words, "--rate", "50", "--breakdown")
    assert found["answered"] == found["sent"] == 50
    phases = {row["phase"]: row for row in found["phases"]}
    assert list(phases) == ["parse", "queue", "hop", "compute", "render", "outside"]
    assert all(row["mean_s"] >= 0 for row in found["phases"])
    assert sum(row["mean_s"] for row in found["phases"]) < 10
    assert len([name for name in found["cpu_s"] if name.startswith("gateway")]) == 2
    assert len([name for name in found["cpu_s"] if name.startswith("m/")]) == 4
    shown = subprocess.run(
        [sys.executable, "-m", "multiworld", *words, "--rate", "20", "--breakdown"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = shown.stdout.splitlines()
    heads = next(line for line in lines if "p99" in line and "mean" in line)
    parse = next(line for line in lines if line.split()[:1] == ["parse"])
    assert heads.split() == ["phase", "mean", "p50", "p99", "share"]
    assert parse.index(" ms") < heads.index("p50")
    plain = service.command(*words, "--rate", "20")
    assert "phases" not in plain
