"""Usage of tenants, as it is counted, sent and stored. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

MINUTE_S = 60  # seconds that one row covers
MAX_UNCONFIRMED = 16  # maximum unconfirmed batches of a gateway


@dataclass(slots=True)
class UsageTotals:
    """Usage of one tenant and model in one minute."""

    requests: int = 0  # admitted and finished
    answered: int = 0  # with status 200
    failed: int = 0
    refused: int = 0  # by a limit, a quarantine or missing permission
    rows: int = 0  # of answered requests
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0  # total duration of the answered requests
    prompt_tokens: int = 0
    generated_tokens: int = 0


# Names of the totals in a row, in order.
FIELDS = tuple(field.name for field in fields(UsageTotals))


class UsageRow(NamedTuple):
    """``UsageTotals`` of a tenant and model; ``minute``: its start in epoch seconds."""

    minute: int
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


class TokensUsed(NamedTuple):
    """Tokens used by a tenant; ``day`` and ``month``: their starts in epoch seconds."""

    tenant: str
    day: int
    in_day: int
    month: int
    in_month: int
