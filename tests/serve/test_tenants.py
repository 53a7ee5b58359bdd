"""Tenants of a service: keys, limits, floods, poison requests, dedicated replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import yaml

from multiworld.serve.controller.answers import TenantShown, TenantWithKey
from multiworld.serve.load.generator import Load, Target
from multiworld.serve.tenants.records import UsageSum
from tests.serve.harness import Served, body, served, spec_with
from tests.serve.models import DIE, FINE, SLOW, expected

pytestmark = pytest.mark.timeout(240)

GATEWAY = {"port": 0, "authentication": "keys"}
WAIT_S = 40.0


def key_of(service: Served, name: str, **said: Any) -> str:
    asked = {"name": name, **said}
    return service.ask("POST", "/tenants", TenantWithKey, json=asked).key


def change(service: Served, name: str, **said: Any) -> None:
    service.ask("PATCH", f"/tenants/{name}", TenantShown, json=said)


def ask(
    service: Served, key: str, x: float = 1.0, code: int = FINE, model: str = "m"
) -> httpx.Response:
    return httpx.post(
        f"{service.url}/v2/models/{model}/infer",
        json=body(x, code),
        headers={"Authorization": f"Bearer {key}"},
        timeout=WAIT_S,
    )


def load_of(service: Served, key: str, rate: float, code: int = FINE) -> Load:
    target = Target(
        f"{service.url}/v2/models/m/infer",
        [orjson.dumps(body(1.0, code))],
        {"X-API-Key": key},
    )

    def check(number: int, answer: Any) -> bool:
        values: list[float] = answer["outputs"][0]["data"]
        return values == [expected(1.0)]

    return Load(target, rate, check)


def test_keys_give_access_to_their_models_only(tmp_path: Path) -> None:
    spec = spec_with(gateway=GATEWAY)
    with served(tmp_path, spec) as service:
        acme = key_of(service, "acme", models=["m"], rpm_limit=4)
        beta = key_of(service, "beta", models=["other*"])
        operator = key_of(service, "ops", is_operator=True)
        url = service.url
        assert httpx.post(f"{url}/v2/models/m/infer", json=body(1.0)).status_code == 401
        wrong = ask(service, acme[:-1] + ("a" if acme[-1] != "a" else "b"))
        assert wrong.status_code == 401
        assert wrong.headers["www-authenticate"] == "Bearer"
        hidden = ask(service, beta)
        assert hidden.status_code == 404
        assert hidden.json()["error"] == "unknown model 'm'; available models: none"
        listed = httpx.get(f"{url}/v1/models", headers={"X-API-Key": beta}).json()
        assert listed["data"] == []
        assert httpx.get(f"{url}/v2/models").status_code == 401
        assert "stages" not in httpx.get(f"{url}/health").text

        answers = [ask(service, acme) for _ in range(5)]
        assert [a.status_code for a in answers] == [200] * 4 + [429]
        assert "rpm_limit of 4" in answers[-1].text
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 61

        change(service, "acme", rpm_limit=None)
        assert ask(service, acme).status_code == 200
        path, grace = "/tenants/acme/rotate", {"grace_s": 600}
        rotated = service.ask("POST", path, TenantWithKey, json=grace)
        assert ask(service, acme).status_code == 200
        assert ask(service, rotated.key).status_code == 200
        old = rotated.keys[0].id
        service.ask("POST", "/tenants/acme/revoke", TenantShown, json={"key": old})
        assert ask(service, acme).status_code == 401
        assert ask(service, rotated.key).status_code == 200
        change(service, "acme", is_suspended=True, suspension="unpaid")
        refusal = ask(service, rotated.key)
        assert refusal.status_code == 401
        assert "is suspended: unpaid" in refusal.text
        change(service, "acme", is_suspended=False)

        _metrics_are_for_operators(service, rotated.key, operator)
        _usage_and_audit(service)
        service.kill_controller()
        assert ask(service, rotated.key).status_code == 200
        service.start()
        assert ask(service, rotated.key).status_code == 200
        known = service.ask("GET", "/tenants", list[TenantShown])
        assert {tenant.name for tenant in known} == {"acme", "beta", "ops"}
        service.until(lambda: _used(service, "acme") == 10, "all was written down")
        rows = service.command("tenants", "usage", "--state", str(service.state))
        assert sum(r["answered"] for r in rows if r["tenant"] == "acme") == 10


def _metrics_are_for_operators(service: Served, key: str, operator: str) -> None:
    metrics = f"{service.url}/metrics"
    assert httpx.get(metrics).status_code == 401
    assert httpx.get(metrics, headers={"X-API-Key": key}).status_code == 401
    text = httpx.get(metrics, headers={"X-API-Key": operator}).text
    assert 'multiworld_refused_total{tenant="",why="no key"}' in text
    assert 'tenant="acme",why="rpm_limit"} 1.0' in text
    assert 'tenant="beta",why="model"} 1.0' in text
    assert 'multiworld_tenant_requests_total{model="m",status="200"' in text
    assert 'multiworld_tenant_seconds_total{model="m",tenant="acme"}' in text


def _usage_and_audit(service: Served) -> None:
    acts = service.command("audit", "--state", str(service.state))
    assert [a["act"] for a in acts][:2] == ["POST /tenants", "POST /tenants"]
    assert acts[-1]["outcome"] == "done"
    assert "key" not in str(acts[0]["what"])


def _used(service: Served, tenant: str) -> int:
    rows = service.ask("GET", "/usage", list[UsageSum])
    return sum(row.answered for row in rows if row.tenant == tenant)


@pytest.mark.heavy
async def test_flood_of_one_tenant_leaves_the_others_their_share(
    tmp_path: Path,
) -> None:
    spec = spec_with(
        gateway=GATEWAY,
        m_max_queued_requests=40,
        m_stages=[
            {"name": "double", "max_ongoing_requests": 8},
            {"name": "add", "max_batch_size": 1, "max_ongoing_requests": 8},
            {"name": "square"},
        ],
    )
    with served(tmp_path, spec) as service:
        flood = load_of(service, key_of(service, "flood"), 250.0, SLOW)
        quiet = load_of(service, key_of(service, "quiet"), 10.0)
        flooding = asyncio.ensure_future(flood.run(6.0))
        asking = asyncio.ensure_future(quiet.run(5.0))
        await asyncio.gather(flooding, asking)
        statuses = {s.status for s in flood.samples}
        assert statuses == {200, 429}, statuses
        refused = sum(s.status == 429 for s in flood.samples)
        assert refused > len(flood.samples) / 2
        assert all(s.is_right for s in quiet.samples), quiet.samples[:3]
        slowest = max(s.latency_s for s in quiet.samples)
        waited = sorted(s.latency_s for s in flood.samples if s.is_answered)
        assert slowest < waited[len(waited) // 2], "it did not wait behind the flood"


@pytest.mark.heavy
async def test_poison_requests_of_one_tenant_affect_no_other_tenant(
    tmp_path: Path,
) -> None:
    """A known poison request kills no more replicas, and its tenant is quarantined."""
    spec = spec_with(gateway=GATEWAY)
    with served(tmp_path, spec) as service:
        bad, good = key_of(service, "bad"), key_of(service, "good")
        load = load_of(service, good, 30.0)
        running = asyncio.ensure_future(load.run())

        async def poison(x: float, key: str) -> httpx.Response:
            return await asyncio.to_thread(ask, service, key, x, DIE)

        first = await poison(1.0, bad)
        assert (first.status_code, "2 replicas died" in first.text) == (500, True)
        lost = len(service.events("lost"))
        again = await poison(1.0, bad)
        assert (again.status_code, "before" in again.text) == (500, True)
        assert len(service.events("lost")) == lost, "it killed nothing more"
        for x in (2.0, 3.0):
            answer = await poison(x, bad)
            assert answer.status_code == 500, answer.text
        refused = await asyncio.to_thread(ask, service, bad, 9.0)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 5
        assert (await asyncio.to_thread(ask, service, good, 9.0)).status_code == 200
        load.end()
        await running
        assert all(s.is_right for s in load.samples)
        assert service.events("quarantined")


@pytest.mark.heavy
async def test_dedicated_replicas_are_not_touched_by_others(tmp_path: Path) -> None:
    spec = spec_with(gateway=GATEWAY, m_dedicated=["acme"])
    with served(tmp_path, spec) as service:
        acme, beta = key_of(service, "acme"), key_of(service, "beta")
        shared = _replicas(service, "m")
        assert len(_replicas(service, "m@acme")) == len(shared) == 4
        load, own = load_of(service, beta, 30.0), load_of(service, acme, 20.0)
        running = [asyncio.ensure_future(one.run()) for one in (load, own)]
        answer = await asyncio.to_thread(ask, service, acme, 5.0, DIE)
        assert answer.status_code == 500
        assert _replicas(service, "m") == shared
        assert all(e.name.startswith("m@acme/1") for e in service.events("lost"))
        direct = await asyncio.to_thread(ask, service, beta, model="m@acme")
        assert direct.status_code == 404
        text = yaml.safe_dump(spec_with(gateway=GATEWAY))
        await asyncio.to_thread(service.update, text)
        await asyncio.to_thread(
            service.until, lambda: not _replicas(service, "m@acme"), "they are gone"
        )
        await asyncio.to_thread(
            service.until, lambda: len(own.samples) > 20, "it is answered without them"
        )
        for one in (load, own):
            one.end()
        await asyncio.gather(*running)
        assert all(s.is_right for s in [*load.samples, *own.samples])


def _replicas(service: Served, model: str) -> dict[str, int | None]:
    return {p.name: p.pid for p in service.status().processes if p.model == model}
