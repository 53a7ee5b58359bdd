"""Records that the database of tenants returns: usage, and the audit log. Pure."""

from __future__ import annotations

from typing import Any

import msgspec


class UsageSum(msgspec.Struct, frozen=True):
    """Usage of one tenant and model from one minute to another.

    Attributes:
        first_minute: Start of the first minute, in seconds since the epoch.
        last_minute: Start of the last minute, in seconds since the epoch.
        tenant: Name of the tenant; empty for clients without a key.
        model: Name of the model; empty for requests that named none.

    The other fields are those of ``UsageTotals``.
    """

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
    """One administrative action.

    Attributes:
        number: Number of the action, from 1.
        at: Time of its begin, in seconds since the epoch.
        who: The user.
        act: Name of the action: method and path of the request.
        what: Its parameters.
        outcome: "begun", "done", "failed" or "refused (STATUS)".
    """

    number: int
    at: float
    who: str
    act: str
    # The body of a request as it arrived, also one that no route knows.
    what: dict[str, Any]
    outcome: str
