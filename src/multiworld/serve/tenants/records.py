"""Records that the database of tenants returns: usage, and the audit log. Pure."""

from __future__ import annotations

from typing import Any

import msgspec


class UsageSum(msgspec.Struct, frozen=True):
    """Usage of one tenant and model over a range of minutes (epoch seconds)."""

    first_minute: int
    last_minute: int
    tenant: str
    model: str
    requests: int
    answered: int
    failed: int
    refused: int
    rows: int
    bytes_in: int
    bytes_out: int
    seconds: float
    prompt_tokens: int = 0
    generated_tokens: int = 0


class AuditEntry(msgspec.Struct, frozen=True):
    """One administrative action; ``at`` is its start, in epoch seconds."""

    number: int
    at: float
    who: str
    act: str  # method and path of the request
    # The body of the request as it arrived, even if no route accepts it.
    what: dict[str, Any]
    outcome: str  # "begun", "done", "failed" or "refused (STATUS)"
