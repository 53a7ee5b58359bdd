"""The last usage of a gateway without a controller."""

from __future__ import annotations

from pathlib import Path

from multiworld.serve.gateway.admission.last_usage import store_rest
from multiworld.serve.gateway.admission.usage_meter import UsageMeter
from multiworld.serve.tenants.registry import open_registry


async def test_what_no_controller_confirmed_is_stored_once(tmp_path: Path) -> None:
    """A batch that the controller stored without confirming it is not added again."""
    controller = open_registry(tmp_path)
    usage = UsageMeter()
    usage.at("acme", "m", 60.0).requests += 2
    ((number, rows),) = usage.take_due(0.0)
    assert controller.add_usage("meter", number, rows)
    for _ in range(100):  # more batches than may be unconfirmed
        usage.at("acme", "m", 120.0).requests += 1
        usage.take_due(0.0)
    usage.at("acme", "m", 180.0).requests += 1
    await store_rest(usage, "meter", tmp_path, 0.0)
    assert usage.is_all_confirmed
    found = controller.usage(None, 0.0, by_minute=False)
    assert sum(row.requests for row in found) == 103
    controller.close()
