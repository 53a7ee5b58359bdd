"""Tenants: keys, rate limits, quarantine, metering and the database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multiworld.errors import (
    OverloadedError,
    QuarantinedError,
    RequestPoisonedError,
    ServeError,
    UnauthorizedError,
)
from multiworld.serve.controller import tenant_manager
from multiworld.serve.controller.fleet.decision_log import DecisionLog
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.tenant_manager import (
    CHUNK,
    TenantManager,
    UnknownTenantError,
)
from multiworld.serve.gateway.admission.authenticator import Authenticator, digest_of
from multiworld.serve.gateway.admission.quarantine import (
    FIRST_QUARANTINE_S,
    POISON_LIMIT,
    POISON_S,
    Quarantine,
)
from multiworld.serve.gateway.admission.rate_limits import RateLimiter
from multiworld.serve.gateway.admission.usage_meter import RESEND_S, UsageMeter
from multiworld.serve.spec.dedicated import is_dedicated, route_of
from multiworld.serve.spec.loader import parse_spec
from multiworld.serve.tenants.directory import (
    Key,
    Tenant,
    TenantDirectory,
)
from multiworld.serve.tenants.keys import digest_of as key_digest
from multiworld.serve.tenants.keys import make_key, parse_key
from multiworld.serve.tenants.sqlite_registry import TenantDatabase
from multiworld.serve.tenants.usage_rows import MAX_UNCONFIRMED, UsageRow
from multiworld.serve.wire.control_messages import (
    AllTenants,
    PoisonFound,
    UsageReport,
    UsageStored,
)
from tests.memory import objects_in
from tests.unit.waiting import HANG_S, until


def keyed(name: str, **more: Any) -> tuple[Tenant, str]:
    text, key_id, digest = make_key()
    return Tenant(
        name=name, keys=(Key(id=key_id, digest=digest, made_at=0.0),), **more
    ), text


# Keys.


def test_keys_are_unique_and_stored_as_digests() -> None:
    made = [make_key() for _ in range(50)]
    assert len({key for key, _, _ in made}) == 50
    key, key_id, digest = made[0]
    assert parse_key(key) == (key_id, digest)
    secret = key.rsplit("-", 1)[1] if key.count("-") == 2 else key[16:]
    assert secret not in json.dumps(keyed("a")[0].to_json())
    assert parse_key("nonsense") == ("", key_digest("nonsense"))


def test_clients_of_a_suspended_tenant_are_told_the_operators_words() -> None:
    tenant, text = keyed("acme")
    tenant = replace(tenant, is_suspended=True, suspension="unpaid")
    authenticator = Authenticator(needs_key=True)
    authenticator.directory.put([tenant])
    headers = {"authorization": f"Bearer {text}"}
    with pytest.raises(UnauthorizedError, match="is suspended: unpaid"):
        authenticator.identify(headers)
    with pytest.raises(UnauthorizedError, match="unknown, expired or revoked"):
        authenticator.identify({"authorization": f"Bearer {text[:-1]}_"})
    authenticator.directory.put([replace(tenant, suspension="")])
    with pytest.raises(UnauthorizedError, match=r"is suspended$"):
        authenticator.identify(headers)
    assert authenticator.refused == {("acme", "suspended"): 2, ("", "wrong key"): 1}


def test_directory_finds_the_tenant_of_a_valid_key_only() -> None:
    (acme, key), (beta, other) = keyed("acme"), keyed("beta")
    directory = TenantDirectory()
    directory.put([acme, beta])
    assert directory.find(*parse_key(key), 0.0) is acme
    assert directory.find(*parse_key(other), 0.0) is beta
    assert directory.find(parse_key(key)[0], parse_key(other)[1], 0.0) is None
    assert (
        directory.find(*parse_key(key[:-1] + ("a" if key[-1] != "a" else "b")), 0.0)
        is None
    )
    ending = replace(acme, keys=(replace(acme.keys[0], expires_at=10.0),))
    directory.put([ending])
    assert directory.find(*parse_key(key), 9.9) is ending
    assert directory.find(*parse_key(key), 10.0) is None
    directory.put([replace(acme, keys=())])
    assert directory.find(*parse_key(key), 0.0) is None
    directory.remove("beta")
    assert directory.find(*parse_key(other), 0.0) is None


def test_unknown_key_ids_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong id costs the same as a wrong secret, so timing reveals nothing."""
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    acme, key = keyed("acme")
    directory = TenantDirectory()
    directory.put([acme])
    for text in (key, make_key()[0], "nonsense", ""):
        directory.find(*parse_key(text), 0.0)
    assert [len(one) + len(other) for one, other in compared] == [128] * 4


async def test_ten_thousand_tenants_are_sent_in_chunks_and_found(
    tmp_path: Path,
) -> None:
    """One message would block the gateway's event loop."""
    everybody = {}
    for number in range(10_000):
        key = Key(id=f"{number:012x}", digest=f"{number:064x}", made_at=0.0)
        everybody[f"t{number}"] = Tenant(name=f"t{number}", keys=(key,))
    database = TenantDatabase(tmp_path / "tenants.db")
    tenanting = TenantManager(database, History(), list, lambda name, order: None)
    tenanting.tenants = everybody
    orders = [order for order in tenanting.greeting() if isinstance(order, AllTenants)]
    assert len(orders) == 10_000 / CHUNK
    firsts = [order.is_first for order in orders]
    assert firsts == [True] + [False] * (len(orders) - 1)
    directory = TenantDirectory()
    for order in orders:
        directory.put(order.tenants)
    found = directory.find(f"{9876:012x}", f"{9876:064x}", 0.0)
    assert found is not None
    assert found.name == "t9876"
    await tenanting.close()


# Limits.


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=200), st.integers(1, 12))
def test_no_minute_has_more_than_the_limit(gaps: list[float], limit: int) -> None:
    tenant, limiter = Tenant(name="a", rpm_limit=limit), RateLimiter()
    let_in: list[float] = []
    now = 1000.0
    for gap in gaps:
        now += gap
        refusal = limiter.admit(tenant, 1, now)
        if refusal is None:
            limiter.release(tenant)
            let_in.append(now)
        else:
            assert 0 < refusal.retry_after_s <= 61
        assert sum(now - at < 60 for at in let_in) <= limit
    later = now + 62
    assert limiter.admit(tenant, 1, later) is None


def test_limit_that_is_set_while_a_request_runs_outlives_it() -> None:
    """Its release must not drop the tenant's counts."""
    before, limiter = Tenant(name="a"), RateLimiter()
    after = Tenant(name="a", rpm_limit=3)
    assert limiter.admit(before, 1, 0.0) is None
    for _ in range(3):
        assert limiter.admit(after, 1, 0.5) is None
        limiter.release(after)
    limiter.release(before)
    assert limiter.admit(after, 1, 1.0) is not None


def test_parallel_requests_are_counted_until_they_end() -> None:
    tenant, limiter = Tenant(name="a", max_parallel_requests=2), RateLimiter()
    assert limiter.admit(tenant, 1, 0.0) is None
    assert limiter.admit(tenant, 1, 0.0) is None
    refused = limiter.admit(tenant, 1, 0.0)
    assert refused is not None
    assert refused.limit == "max_parallel_requests"
    limiter.release(tenant)
    assert limiter.admit(tenant, 1, 0.0) is None
    assert limiter.in_flight("a") == 2


def test_bytes_are_owed_and_paid_back() -> None:
    """A large request is admitted once; its tenant then waits."""
    tenant, limiter = Tenant(name="a", bytes_per_s=100.0), RateLimiter()
    assert limiter.admit(tenant, 1, 0.0) is None
    limiter.spend(tenant, 1200)
    limiter.release(tenant)
    refused = limiter.admit(tenant, 1, 1.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(9.0, abs=0.1)
    assert limiter.admit(tenant, 1, 1.0 + refused.retry_after_s) is None


def test_tokens_are_owed_and_paid_back_within_minutes() -> None:
    """A tenant may use a minute's tokens at once, and finish a long answer."""
    tenant, limiter = Tenant(name="a", tpm_limit=600), RateLimiter()
    assert limiter.admit(tenant, 1, 0.0) is None
    limiter.spend_tokens(tenant, 500)
    assert limiter.admit(tenant, 1, 0.0) is None
    limiter.spend_tokens(tenant, 700)
    refused = limiter.admit(tenant, 1, 0.0)
    assert refused is not None
    assert refused.limit == "tpm_limit"
    assert refused.retry_after_s == pytest.approx(60.0, abs=0.2)
    assert limiter.admit(tenant, 1, 59.0) is not None
    assert limiter.admit(tenant, 1, refused.retry_after_s) is None
    halves = RateLimiter()
    assert halves.admit(tenant, 2, 0.0) is None
    halves.spend_tokens(tenant, 300)
    assert halves.admit(tenant, 2, 0.0) is not None


def test_limits_are_divided_between_gateways_and_forgotten() -> None:
    tenant, limiter = Tenant(name="a", rpm_limit=10), RateLimiter()
    empty = objects_in(limiter)
    let_in = sum(limiter.admit(tenant, 2, 0.5) is None for _ in range(10))
    assert let_in == 5
    for _ in range(let_in):
        limiter.release(tenant)
    limiter.prune(30.0)
    assert limiter.admit(tenant, 2, 30.0) is not None
    assert objects_in(limiter) > empty
    limiter.prune(200.0)
    assert objects_in(limiter) == empty
    free = Tenant(name="b")
    limiter.admit(free, 1, 0.0)
    limiter.release(free)
    assert objects_in(limiter) == empty


# Quarantine.


def test_poison_request_is_refused_for_its_tenant_only() -> None:
    quarantine = Quarantine()
    assert quarantine.add("acme", "m", "d1", 0.0) == 0.0
    assert quarantine.is_poison("acme", "m", "d1", 1.0)
    assert not quarantine.is_poison("acme", "m", "d2", 1.0)
    assert not quarantine.is_poison("beta", "m", "d1", 1.0)
    assert not quarantine.has_records("beta", "m")
    assert not quarantine.is_poison("acme", "m", "d1", POISON_S + 1)


def test_each_quarantine_of_a_tenant_is_longer() -> None:
    quarantine = Quarantine()
    lengths = [
        quarantine.add("acme", "m", f"d{n}", float(n)) for n in range(POISON_LIMIT)
    ]
    assert lengths == [0.0] * (POISON_LIMIT - 1) + [FIRST_QUARANTINE_S]
    assert quarantine.remaining_s("acme", "m", 5.0) > 0
    assert quarantine.remaining_s("acme", "other", 5.0) == 0
    assert quarantine.remaining_s("beta", "m", 5.0) == 0
    after = POISON_LIMIT + FIRST_QUARANTINE_S + 1
    assert quarantine.remaining_s("acme", "m", after) == 0
    assert quarantine.add("acme", "m", "more", after) == 2 * FIRST_QUARANTINE_S
    quarantine.prune(after + 3 * POISON_S)
    assert not quarantine.has_records("acme", "m")


def test_clients_without_a_key_are_not_quarantined_for_each_other() -> None:
    """They share a name, so only the poison request itself is refused."""
    quarantine = Quarantine()
    for number in range(10):
        assert quarantine.add("", "m", f"d{number}", 0.0) == 0.0
    assert quarantine.remaining_s("", "m", 0.1) == 0.0


# The authenticator.


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_authenticator_admits_requests_with_a_key() -> None:
    authenticator = Authenticator(needs_key=True)
    acme, key = keyed("acme", max_parallel_requests=1)
    authenticator.directory.put([acme])
    with pytest.raises(UnauthorizedError, match="needs an API key"):
        authenticator.admit({})
    with pytest.raises(UnauthorizedError, match="unknown, expired"):
        authenticator.admit(headers(make_key()[0]))
    admitted = authenticator.admit({"x-api-key": key, "authorization": "Bearer "})
    with pytest.raises(OverloadedError, match="max_parallel_requests"):
        authenticator.admit(headers(key))
    authenticator.count_bytes(admitted, 10)
    admitted.rows = 3
    authenticator.finish(admitted, "m", 200)
    assert dict(authenticator.refused) == {
        ("", "no key"): 1,
        ("", "wrong key"): 1,
        ("acme", "max_parallel_requests"): 1,
    }
    (told,) = authenticator.meter.take_due(0.0)
    rows = {(row[1], row[2]): row[3:] for row in told[1]}
    assert rows["acme", "m"][:4] == (1, 1, 0, 0)
    assert rows["acme", ""][3] == 1
    assert rows["", ""][3] == 2


def test_authenticator_without_keys_admits_everybody() -> None:
    """OpenAI's clients always send a key; once tenants exist, it has to be valid."""
    authenticator = Authenticator(needs_key=False)
    assert authenticator.admit(headers("sk-anything")).tenant.name == ""
    assert authenticator.admit({}).tenant.name == ""
    acme, key = keyed("acme")
    authenticator.directory.put([acme])
    assert authenticator.admit(headers(key)).tenant is acme
    assert authenticator.admit({}).tenant.name == ""
    with pytest.raises(UnauthorizedError):
        authenticator.admit(headers("sk-anything"))


def test_authenticator_refuses_poison_requests() -> None:
    authenticator = Authenticator(needs_key=False)
    (acme, key), (beta, other) = keyed("acme"), keyed("beta")
    authenticator.directory.put([acme, beta])
    one, two = authenticator.admit(headers(key)), authenticator.admit(headers(other))
    model_version = "m", "1"
    assert not authenticator.quarantine.has_records("acme", model_version)
    authenticator.add_poison("acme", model_version, "bad")
    assert authenticator.quarantine.has_records("acme", model_version)
    for _ in range(3):  # completions of one request
        with pytest.raises(RequestPoisonedError):
            authenticator.check_poison(one, model_version, "bad")
    assert authenticator.refused["acme", "poisonous"] == 1
    authenticator.check_poison(one, model_version, "good")
    authenticator.check_poison(one, ("m", "2"), "bad")  # another version may survive it
    authenticator.check_poison(two, model_version, "bad")
    for number in range(2):
        authenticator.add_poison("acme", model_version, f"d{number}")
    with pytest.raises(QuarantinedError) as found:
        authenticator.check_poison(one, model_version, "good")
    assert found.value.retry_after_s > 10
    authenticator.check_poison(two, model_version, "good")


def test_poison_of_the_last_hour_is_no_new_poison() -> None:
    """An authenticator that starts later gets old reports with their age."""
    now, (acme, key) = 10_000.0, keyed("acme")
    before, later = (Authenticator(needs_key=False, clock=lambda: now) for _ in "ab")
    found = []
    for number in range(10):
        assert not before.add_poison("acme", ("m", "1"), f"d{number}")
        found.append((now, f"d{number}"))
        now += 330.0
    later.directory.put([acme])
    for at, digest in found:
        assert not later.add_poison("acme", ("m", "1"), digest, now - at)
    one = later.admit(headers(key))
    later.check_poison(one, ("m", "1"), "good")
    with pytest.raises(RequestPoisonedError):
        later.check_poison(one, ("m", "1"), "d9")
    assert not later.add_poison("acme", ("m", "1"), "d10")
    assert later.add_poison("acme", ("m", "1"), "d11", 1.0) or later.add_poison(
        "acme", ("m", "1"), "d12"
    )


def test_digest_differs_between_requests() -> None:
    tensors = [
        {"x": torch.zeros(2, 3)},
        {"y": torch.zeros(2, 3)},
        {"x": torch.zeros(3, 2)},
        {"x": torch.zeros(2, 3, dtype=torch.int32)},
        {"x": torch.ones(2, 3)},
    ]
    assert len({digest_of(one) for one in tensors}) == len(tensors)
    strided = torch.zeros(3, 2).t()
    assert digest_of({"x": strided}) == digest_of(tensors[0])


# Usage metering, and the database.


def test_usage_is_counted_once_however_often_it_is_sent(tmp_path: Path) -> None:
    """Unconfirmed batches are sent again, and may arrive in any order."""
    registry, meter = TenantDatabase(tmp_path / "r.db"), UsageMeter()
    meter.at("acme", "m", 125.0).requests += 2
    meter.at("acme", "m", 130.0).requests += 1
    (first,) = meter.take_due(0.0)
    meter.at("acme", "m", 190.0).requests += 5
    (second,) = meter.take_due(1.0)
    registry.add_usage("a meter", *second)
    registry.add_usage("a meter", *first)
    meter.resend_all()
    assert meter.take_due(2.0) == [first, second]
    assert meter.take_due(3.0) == []
    assert meter.take_due(2.0 + RESEND_S) == [first, second]
    for told in (second, first, second):
        registry.add_usage("a meter", *told)
        meter.confirmed(told[0])
    assert meter.is_all_confirmed
    row_told = UsageRow(180, "acme", "m", 1, 0, 0, 0, 0, 0, 0, 0.0)
    registry.add_usage("another meter", 1, [row_told])
    (row,) = registry.usage(None, 0.0, by_minute=False)
    assert (row.requests, row.first_minute, row.last_minute) == (9, 120, 180)
    assert len(registry.usage("acme", 0.0, by_minute=True)) == 2
    assert registry.usage("acme", 180.0, by_minute=True)[0].requests == 6
    assert registry.usage("beta", 0.0, by_minute=True) == []
    registry.close()


def test_meter_keeps_unconfirmed_usage() -> None:
    meter = UsageMeter()
    told: dict[int, Any] = {}
    for number in range(MAX_UNCONFIRMED + 3):
        meter.at("a", "m", number * 60.0).requests += 1
        told.update(meter.take_due(float(number)))
    assert len(told) == MAX_UNCONFIRMED
    assert not meter.is_all_confirmed
    for number in told:
        meter.confirmed(number)
    (rest,) = meter.take_due(100.0)
    assert len(rest[1]) == 3


def test_database_persists_and_names_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    registry = TenantDatabase(path)
    acme, _ = keyed("acme", weight=2.0, models=("a*",))
    registry.save(acme)
    number = registry.audit("root", "POST /tenants", {"name": "acme"})
    assert registry.audited(5)[0].outcome == "begun"
    registry.audit_outcome(number, "done")
    registry.close()
    assert path.stat().st_mode & 0o077 == 0
    again = TenantDatabase(path)
    assert again.tenants() == {"acme": acme}
    assert again.audited(5)[0].what == {"name": "acme"}
    assert again.audited(5)[0].outcome == "done"
    again.delete("acme")
    assert again.tenants() == {}
    again.close()
    bad = tmp_path / "bad.db"
    bad.write_text("this is no database, whatever its name says" * 100)
    with pytest.raises(ServeError, match="move it away"):
        TenantDatabase(bad)


async def test_tenant_changes_are_sent_and_stored(tmp_path: Path) -> None:
    registry = TenantDatabase(tmp_path / "r.db")
    told: list[tuple[str, Any]] = []
    tenanting = TenantManager(
        registry, History(), lambda: ["gateway/1"], lambda *said: told.append(said)
    )
    _, key = await tenanting.create("acme", {"rpm_limit": 5})
    assert told[-1][1].tenants[0].rpm_limit == 5
    assert key not in repr(told)
    with pytest.raises(ServeError, match="already"):
        await tenanting.create("acme", {})
    for wrong in ("Acme!", "acme\n", "m@acme"):
        with pytest.raises(ServeError, match="lower-case"):
            await tenanting.create(wrong, {})
    with pytest.raises(UnknownTenantError):
        await tenanting.change("beta", {})
    changed = await tenanting.change("acme", {"rpm_limit": None, "models": ["x"]})
    assert (changed.rpm_limit, changed.models) == (None, ("x",))
    rotated, second = await tenanting.rotate("acme", 60.0)
    assert second != key
    ends = [k.expires_at for k in rotated.keys]
    assert ends[0] is not None
    assert ends[0] < time.time() + 61
    assert ends[1] is None
    with pytest.raises(UnknownTenantError, match="no key"):
        await tenanting.revoke("acme", "nokey")
    one = await tenanting.revoke("acme", key)  # the key's id, or all of it
    assert len(one.keys) == 1
    fresh, _ = await tenanting.rotate("acme", 0.0)
    assert len(fresh.keys) == 1
    assert (await tenanting.revoke("acme", None)).keys == ()
    row = UsageRow(60, "acme", "m", 1, 1, 0, 0, 1, 1, 1, 0.5)
    tenanting.used("gateway/1", UsageReport("x", 1, (row,)))
    await until(lambda: told[-1][1] == UsageStored(1))
    await tenanting.delete("acme")
    assert told[-1][1].removed == ("acme",)
    poison = PoisonFound("a", "m", "1", "d")
    tenanting.poisonous("gateway/2", poison)
    assert told[-1][1] == poison
    told_later = list(tenanting.greeting())[-1]
    assert isinstance(told_later, PoisonFound), "who starts later is told"
    assert told_later.digest == "d"
    assert 0.0 < told_later.age_s < 60.0
    await tenanting.close()
    again = TenantDatabase(tmp_path / "r.db")
    assert again.tenants() == {}
    again.close()


# Dedicated replicas, and the decision log.

SPEC = """
models:
  m:
    factory: a:b
    dedicated: [acme]
    stages: [{}, {replicas: 2}]
  "m@beta":
    factory: a:b
    stages: [{replicas: 3}, {}]
"""


def test_dedicated_models_are_separate_models() -> None:
    app = parse_spec(SPEC)
    assert list(app.models) == ["m", "m@acme", "m@beta"]
    assert app.models["m@acme"].stages == app.models["m"].stages
    assert app.models["m@beta"].stages[0].replicas == 3
    again = type(app).model_validate(app.model_dump())
    assert again == app
    assert route_of("m", "acme", app.models) == "m@acme"
    assert route_of("m", "gamma", app.models) == "m"
    assert route_of("m", "", app.models) == "m"
    assert is_dedicated("m@acme")
    with pytest.raises(ServeError, match="there is no model 'x'"):
        parse_spec(SPEC.replace('"m@beta"', '"x@beta"'))


def test_decision_log_keeps_decisions_with_their_snapshots(tmp_path: Path) -> None:
    journal = DecisionLog(tmp_path / "d.jsonl")
    for number in range(3):
        facts = {"rate": number}
        journal.record("scaling", "m", f"what {number}", facts, lambda: {"now": 1.0})
    journal.set_reason("scaling", "m", "nothing new")
    last = journal.last(2)
    assert [d.what for d in last] == ["what 1", "what 2"]
    assert journal.reasons()[0].what == "nothing new"
    journal.settle(20.0)
    lines = (tmp_path / "d.jsonl").read_text().splitlines()
    assert json.loads(lines[2])["snapshot"] == {"now": 1.0}


def test_one_bad_row_of_the_tenants_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = TenantDatabase(tmp_path / "registry.db")
    for name in ("acme", "bad", "beta"):
        database.save(Tenant(name=name))
    for data in ("{", "[]", '{"name": "bad", "weight": "heavy"}', '{"name": 3}'):
        with contextlib.closing(sqlite3.connect(tmp_path / "registry.db")) as other:
            other.execute("UPDATE tenants SET data = ? WHERE name = 'bad'", (data,))
            other.commit()
        caplog.clear()
        assert [*database.tenants()] == ["acme", "beta"]
        assert "tenant 'bad' cannot be read" in caplog.text
    database.close()


async def test_locked_database_holds_one_thread_and_no_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways report unconfirmed usage again and again."""
    monkeypatch.setattr(tenant_manager, "CLOSE_S", 0.1)
    registry = TenantDatabase(tmp_path / "r.db")
    told: list[Any] = []
    tenanting = TenantManager(
        registry, History(), lambda: [], lambda name, order: told.append(order)
    )
    other = sqlite3.connect(tmp_path / "r.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for _ in range(20):
        for number in range(3):
            tenanting.used("g", UsageReport("meter", number, ()))
    await asyncio.sleep(0.05)
    writing = [t for t in asyncio.all_tasks() if "_keep" in repr(t.get_coro())]
    assert len(writing) == 3
    async with asyncio.timeout(HANG_S):  # threads for the record and the audit log
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.0) for _ in range(64)))
        assert not told
        closing = asyncio.ensure_future(tenanting.close())
        await asyncio.sleep(0.2)
        other.execute("ROLLBACK")
        await closing
    other.close()


def test_error_of_a_full_disk_is_shown(tmp_path: Path) -> None:
    """SQLite ends the transaction by itself."""
    registry = TenantDatabase(tmp_path / "r.db")
    registry.audit("me", "act", {})
    log = tmp_path / "r.db-wal"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size, limits[1]))
    try:
        with pytest.raises(ServeError, match="disk"):
            registry.audit("me", "act", {"long": "y" * 5_000_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    registry.audit("me", "again", {"name": "\ud800"})
    assert [entry.act for entry in registry.audited(9)] == ["act", "again"]
    assert registry.audited(1)[0].what == {"name": "?"}
    registry.close()
