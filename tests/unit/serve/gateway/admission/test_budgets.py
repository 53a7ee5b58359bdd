"""Token budgets at the controller, at gateways, and between them."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from multiworld.errors import OverloadedError
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.tenant_manager import TenantManager
from multiworld.serve.gateway.admission.authenticator import Authenticator
from multiworld.serve.gateway.admission.budgets import (
    DAY_S,
    TokenBudgets,
    TokenLedger,
    day_of,
    month_of,
    next_month_of,
)
from multiworld.serve.tenants.directory import Key, Tenant
from multiworld.serve.tenants.keys import make_key
from multiworld.serve.tenants.sqlite_registry import TenantDatabase
from multiworld.serve.tenants.usage_rows import TokensUsed, UsageRow
from multiworld.serve.wire.control_messages import BudgetsUsed, Order, UsageReport


def at(text: str) -> float:
    """Return the UTC time ``text`` in seconds since the epoch."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


NOON = at("2026-02-28 12:00")
DAY, MONTH = day_of(NOON), month_of(NOON)


def row(tokens: int, minute: float = NOON, tenant: str = "acme") -> UsageRow:
    nothing = (0,) * 6
    return UsageRow(int(minute), tenant, "m", 1, *nothing, 0.0, tokens, tokens)


def told(in_day: int, in_month: int) -> list[TokensUsed]:
    """Return the tokens used, as the controller reports them."""
    return [TokensUsed("acme", DAY, in_day, MONTH, in_month)]


def test_days_and_months_begin_in_utc() -> None:
    assert at("2026-02-28") == DAY
    assert at("2026-02-01") == MONTH
    assert next_month_of(NOON) == at("2026-03-01")
    assert next_month_of(at("2026-12-31 23:59")) == at("2027-01-01")


def test_ledger_adds_up_and_starts_over() -> None:
    """A late report of yesterday counts only towards the month."""
    ledger = TokenLedger({"acme": 10}, {"acme": 100}, NOON)
    assert ledger.add([row(5), row(2, NOON - DAY_S), row(0, NOON, "b")]) == {"acme"}
    assert ledger.used("acme", NOON) == told(20, 114)[0]
    tomorrow = ledger.used("acme", NOON + DAY_S)
    assert (tomorrow.in_day, tomorrow.in_month) == (0, 0), "March has begun"
    assert ledger.used("new", NOON).in_month == 0


def test_usage_outlives_a_clock_that_jumps_and_jumps_back() -> None:
    """Tokens used after a clock jump count for the day that the clock showed."""
    ledger, budgets = TokenLedger({"acme": 90}, {"acme": 90}, NOON), TokenBudgets()
    tenant = Tenant(name="acme", tokens_per_day=100)
    jumped = NOON + 40 * DAY_S
    for now, tokens in ((NOON, 5), (jumped, 3), (NOON, 1)):
        ledger.add([row(tokens, now)])
        budgets.set_used([ledger.used("acme", now)])
    assert ledger.used("acme", NOON) == told(102, 102)[0]
    for day in range(1, 9):  # however many days it has shown
        ledger.add([row(1, NOON + day * DAY_S)])
    ledger.add([row(60, NOON)])
    assert ledger.used("acme", NOON).in_day >= 100
    assert ledger.used("acme", jumped).in_month == 6
    assert budgets.check(tenant, jumped) is None
    assert budgets.check(tenant, NOON) is not None


def test_gateway_adds_what_the_controller_does_not_know_of_yet() -> None:
    budgets = TokenBudgets()
    tenant = Tenant(name="acme", tokens_per_day=100)
    assert budgets.check(tenant, NOON) is None
    budgets.set_used(told(90, 90))
    budgets.count("acme", 8, NOON)
    assert budgets.check(tenant, NOON) is None
    budgets.count("acme", 2, NOON)
    refusal = budgets.check(tenant, NOON)
    assert refusal is not None
    assert refusal.limit == "tokens_per_day"
    assert refusal.retry_after_s == DAY_S / 2
    assert "2026-03-01 00:00 UTC" in refusal.text
    budgets.stored([row(5)])
    assert budgets.check(tenant, NOON) is None, "the controller tells it next"
    budgets.set_used(told(100, 100))
    assert budgets.check(tenant, NOON) is not None
    assert budgets.check(tenant, NOON + DAY_S / 2) is None, "it is renewed"


def test_day_is_renewed_while_the_controller_confirms_nothing() -> None:
    """It may be gone for days, or its disk may be full."""
    budgets = TokenBudgets()
    tenant = Tenant(name="acme", tokens_per_day=100, tokens_per_month=150)
    budgets.count("acme", 100, NOON - DAY_S)
    refusal = budgets.check(tenant, NOON - DAY_S)
    assert refusal is not None
    assert budgets.check(tenant, NOON) is None
    budgets.count("acme", 50, NOON)
    refusal = budgets.check(tenant, NOON)
    assert refusal is not None
    assert refusal.limit == "tokens_per_month"
    assert budgets.check(tenant, NOON + DAY_S) is None, "March has begun"
    budgets.stored([row(50, NOON - DAY_S)])
    assert budgets.check(tenant, NOON) is None


def test_month_is_a_budget_of_its_own() -> None:
    budgets = TokenBudgets()
    tenant = Tenant(name="acme", tokens_per_day=100, tokens_per_month=1000)
    budgets.set_used(told(3, 1000))
    refusal = budgets.check(tenant, NOON)
    assert refusal is not None
    assert refusal.limit == "tokens_per_month"
    assert refusal.retry_after_s == at("2026-03-01") - NOON
    assert budgets.check(dataclasses.replace(tenant, name="b"), NOON) is None


def test_authenticator_counts_tokens_until_they_are_stored() -> None:
    made = Authenticator(needs_key=False)
    made.directory.put([Tenant(name="")])
    admitted = made.admit({})
    made.count_prompt(admitted, 30)
    made.count_generated(admitted)
    made.finish(admitted, "m", 200)
    tenant = Tenant(name="", tokens_per_month=31)
    assert made.budgets.check(tenant, time.time()) is not None
    ((number, _),) = made.meter.take_due(0.0)
    made.stored(number)
    assert made.budgets.check(tenant, time.time()) is None


def test_tokens_of_a_running_stream_are_reported() -> None:
    """Gateways share the budget; a killed one loses only its last second of usage."""
    made = Authenticator(needs_key=False)
    admitted = made.admit({})
    admitted.model = "m"
    made.count_prompt(admitted, 30)
    for _ in range(5):
        made.count_generated(admitted)
    ((number, rows),) = made.meter.take_due(0.0)
    assert [(r.model, r.prompt_tokens, r.generated_tokens) for r in rows] == [
        ("m", 30, 5)
    ]
    made.stored(number)
    made.count_generated(admitted)
    made.finish(admitted, "m", 200)
    ((_, rows),) = made.meter.take_due(1.0)
    (row,) = rows
    assert (row.requests, row.prompt_tokens, row.generated_tokens) == (1, 0, 1)


async def test_used_budget_is_sent_to_all_gateways_and_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A usage report that arrives twice counts once."""
    monkeypatch.setattr("time.time", lambda: NOON)
    sent: list[tuple[str, Order]] = []

    def manager() -> TenantManager:
        return TenantManager(
            TenantDatabase(tmp_path / "registry.db"),
            History(),
            lambda: ["gateway/1", "gateway/2"],
            lambda name, order: sent.append((name, order)),
        )

    one = manager()
    await one.create("acme", {"tokens_per_day": 100}, 60.0)
    assert one.tenants["acme"].keys[0].expires_at == NOON + 60
    for _ in range(2):
        one.used("gateway/1", UsageReport("meter", 1, (row(20),)))
        await one.settled()
    one.used("gateway/2", UsageReport("other", 1, (row(40),)))
    await one.settled()
    last = {name: o for name, o in sent if isinstance(o, BudgetsUsed)}
    assert set(last) == {"gateway/1", "gateway/2"}
    assert [order.used[0].in_day for order in last.values()] == [120, 120]
    assert [(e.act, e.what) for e in one.registry.audited(9)] == [
        (
            "tokens_per_day of acme is used up",
            {"budget": 100, "prompt_tokens": 60, "generated_tokens": 60},
        )
    ]
    await one.close()
    two = manager()
    greeting = [o for o in two.greeting() if isinstance(o, BudgetsUsed)]
    assert greeting[0].used[0].in_day == 120
    # The first report of each later day uses the budget up again.
    for day, count in ((1, 100), (2, 150)):
        monkeypatch.setattr("time.time", lambda day=day: NOON + 86_400 * day)
        late = row(count, NOON + 86_400 * day)
        two.used("gateway/1", UsageReport("meter", 1 + day, (late,)))
        await two.settled()
    acts = [e.act for e in two.registry.audited(9)]
    assert acts == ["tokens_per_day of acme is used up"] * 3
    await two.close()


def limited(**limits: Any) -> tuple[Authenticator, dict[str, str]]:
    """Return a gateway's authenticator, and the headers of a tenant with limits."""
    made = Authenticator(needs_key=True)
    text, key_id, digest = make_key()
    key = Key(id=key_id, digest=digest, made_at=0.0)
    made.directory.put([Tenant(name="a", keys=(key,), **limits)])
    return made, {"authorization": f"Bearer {text}"}


@pytest.mark.parametrize("limit", ["tpm_limit", "bytes_per_s"])
def test_stream_of_another_gateway_is_charged_here(limit: str) -> None:
    """A gateway that takes streams over may not have served their tenant before."""
    made, headers = limited(**{limit: 60})
    resumed = made.admit(headers, is_resumed=True)
    for _ in range(200):
        made.count_generated(resumed)
    made.count_sent(resumed, 200)
    with pytest.raises(OverloadedError, match=limit):
        made.admit(headers)


def test_tokens_held_are_charged_meanwhile() -> None:
    made, headers = limited(tokens_per_day=10)
    one, other = made.admit(headers), made.admit(headers)
    with made.tokens_held(one, 10):
        with (
            pytest.raises(OverloadedError, match="used up"),
            made.tokens_held(other, 1),
        ):
            pass
        with pytest.raises(OverloadedError, match="used up"):
            made.admit(headers)
    with made.tokens_held(other, 1):
        pass
    assert sum(made.refused.values()) == 2
