"""The registry of a service: its tenants, their usage, and the audit log.

It is opened only through this module, and it outlives the service.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from multiworld.serve.tenants.directory import Tenant
from multiworld.serve.tenants.records import AuditEntry, UsageSum
from multiworld.serve.tenants.sqlite_registry import TenantDatabase
from multiworld.serve.tenants.usage_rows import UsageRow

FILE = "registry.db"  # in the folder of a service


class TenantRegistry(Protocol):
    """A database of tenants, their usage, and the audit log.

    Methods block, may be called from any thread, and raise ServeError if the database
    cannot be used. Times are epoch seconds; a minute is given by its start.
    """

    def close(self) -> None:
        """Close the connection."""

    def tenants(self) -> dict[str, Tenant]:
        """Return all tenants by name; log and skip those that cannot be read."""

    def save(self, tenant: Tenant) -> None:
        """Add a tenant, or replace the one with its name."""

    def delete(self, name: str) -> None:
        """Remove a tenant, but not its usage."""

    def add_usage(self, meter: str, number: int, rows: Sequence[UsageRow]) -> bool:
        """Add a batch of usage, in any order; return False if it was added before."""

    def tokens_since(self, minute: int) -> dict[str, int]:
        """Return the number of tokens that each tenant used since a minute."""

    def forget_meters(self) -> None:
        """Remove the batch numbers of all meters; no gateway may be running."""

    def usage(
        self, tenant: str | None, since: float, *, by_minute: bool
    ) -> list[UsageSum]:
        """Return usage since a time; ``tenant`` None: usage of all tenants."""

    def audit(self, who: str, act: str, what: dict[str, Any]) -> int:
        """Record an administrative action before it is done; return its number."""

    def audit_outcome(self, number: int, outcome: str) -> None:
        """Record how an administrative action ended."""

    def audited(self, last: int) -> list[AuditEntry]:
        """Return the ``last`` administrative actions, oldest first."""


def open_registry(folder: Path) -> TenantRegistry:
    """Open the registry in a service's folder; create it if there is none.

    Raises:
        ServeError: The registry cannot be used, or a later release wrote it.
    """
    return TenantDatabase(folder / FILE)


def has_registry(folder: Path) -> bool:
    """Return whether this host has the registry of a service's folder."""
    return (folder / FILE).exists()
