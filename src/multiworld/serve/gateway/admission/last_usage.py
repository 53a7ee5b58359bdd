"""Storage of the last usage of a gateway that exits while there is no controller."""

from __future__ import annotations

import asyncio
from pathlib import Path

from multiworld.serve.gateway.admission.usage_meter import UsageMeter
from multiworld.serve.tenants.registry import open_registry


async def store_rest(usage: UsageMeter, meter: str, folder: Path, now: float) -> None:
    """Store unconfirmed usage, each batch once; ServeError if the registry fails."""
    registry = await asyncio.to_thread(open_registry, folder)
    try:
        while not usage.is_all_confirmed:
            usage.resend_all()
            for number, rows in usage.take_due(now):
                await asyncio.to_thread(registry.add_usage, meter, number, rows)
                usage.confirmed(number)
    finally:
        await asyncio.to_thread(registry.close)
