"""Rate limits that several gateways of a host share."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiworld.serve.gateway.admission import shared_limits
from multiworld.serve.gateway.admission.rate_limits import RateLimiter
from multiworld.serve.gateway.admission.shared_limits import SharedLimits
from multiworld.serve.tenants.directory import Tenant


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[list[RateLimiter]]:
    made = [SharedLimits(tmp_path / "limits", b"boot") for _ in range(3)]
    yield [RateLimiter(shared) for shared in made]
    for shared in made:
        shared.close()


def admitted(
    gateways: list[RateLimiter], tenant: Tenant, count: int, now: float
) -> int:
    """Return how many of ``count`` requests are admitted by the gateways in turn."""
    turns = (gateways[n % len(gateways)] for n in range(count))
    return sum(turn.admit(tenant, len(gateways), now) is None for turn in turns)


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_requests_a_minute_are_exact(gateways: list[RateLimiter], limit: int) -> None:
    tenant = Tenant(name="a", rpm_limit=limit)
    assert admitted(gateways, tenant, limit + 5, 1000.5) == limit
    refused = gateways[1].admit(tenant, 3, 1030.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(31.0)
    assert admitted(gateways[:1], tenant, 1, 1030.0) == 0
    assert admitted(gateways, tenant, limit + 5, 1061.1) == limit


def test_requests_in_flight_are_exact(gateways: list[RateLimiter]) -> None:
    tenant = Tenant(name="a", max_parallel_requests=4)
    assert admitted(gateways, tenant, 9, 5.0) == 4
    gateways[0].release(tenant)
    assert gateways[2].admit(tenant, 3, 6.0) is None
    refused = gateways[1].admit(tenant, 3, 6.0)
    assert refused is not None
    assert "4 of your requests are in flight" in refused.text


def test_tenants_do_not_share_limits(gateways: list[RateLimiter]) -> None:
    for number in range(200):
        tenant = Tenant(name=f"tenant {number}", rpm_limit=3)
        assert admitted(gateways, tenant, 5, 7.0) == 3


def test_slots_are_used_again(
    gateways: list[RateLimiter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_limits, "SLOTS", 4)
    for number in range(40):
        tenant = Tenant(name=f"tenant {number}", rpm_limit=3)
        now = 1000.0 + 100 * number
        assert admitted(gateways, tenant, 5, now) == 3
        for gateway in gateways:
            gateway.release(tenant)


def test_requests_of_a_killed_gateway_are_not_in_flight(tmp_path: Path) -> None:
    """They still count towards the requests per minute."""
    tenant = Tenant(name="a", max_parallel_requests=2, rpm_limit=5)
    path = tmp_path / "limits"
    shared = SharedLimits(path, b"boot")
    here, (readable, writable) = RateLimiter(shared), os.pipe()
    pid = os.fork()
    if not pid:
        other = RateLimiter(SharedLimits(path, b"boot"))
        shared.close()  # the inherited lock; a real gateway is not forked
        assert admitted([other], tenant, 0, 0.0) == 0
        other.admit(tenant, 2, 10.0)
        other.admit(tenant, 2, 10.0)
        os.write(writable, b".")
        signal.pause()
    try:
        assert select.select([readable], [], [], 30.0)[0]
        assert here.admit(tenant, 2, 10.0) is not None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert here.admit(tenant, 2, 10.0) is None
    assert here.admit(tenant, 2, 10.0) is None
    here.release(tenant)
    assert here.admit(tenant, 2, 10.0) is None
    here.release(tenant)
    refused = here.admit(tenant, 2, 10.0)
    assert refused is not None
    assert refused.limit == "rpm_limit"
    shared.close()


def test_gateway_that_holds_a_lock_stops_no_other(
    tmp_path: Path, gateways: list[RateLimiter]
) -> None:
    """Meanwhile each gateway applies its own share of the limit."""
    tenant = Tenant(name="a", rpm_limit=6)
    stopped = SharedLimits(tmp_path / "limits", b"boot")
    with stopped.use("a", 1.0) as used:
        assert used is not None
        assert admitted(gateways, tenant, 12, 1.0) == 6
        assert gateways[0].admit(tenant, 3, 1.0) is not None
    stopped.close()


def test_counts_of_an_earlier_boot_are_forgotten(tmp_path: Path) -> None:
    """The clock restarts at boot."""
    tenant, path = Tenant(name="a", rpm_limit=2), tmp_path / "limits"
    for boot in (b"first", b"second"):
        shared = SharedLimits(path, boot)
        assert admitted([RateLimiter(shared)] * 2, tenant, 5, 9.0) == 2
        shared.close()


def test_without_a_file_each_gateway_has_its_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk or a missing folder must not refuse requests."""
    assert shared_limits.shared_limits(tmp_path / "gone" / "limits") is None
    assert "divided between the gateways" in caplog.text
