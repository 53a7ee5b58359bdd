"""Token budgets of tenants, per day and month, in UTC. Pure.

Each gateway adds its own latest usage to the controller's sums over all gateways. All
gateways together can exceed a budget by the usage of about a second, and by the rest of
the completions in flight, which are never cut short.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from multiworld.serve.gateway.admission.rate_limits import RateLimited
from multiworld.serve.tenants.directory import Tenant
from multiworld.serve.tenants.usage_rows import TokensUsed, UsageRow

DAY_S = 86400

LIMITS = ("tokens_per_day", "tokens_per_month")

KEPT = 3  # days (and months) to keep per tenant, in case a clock jumps and jumps back


def day_of(wall_s: float) -> int:
    """Return the start of the UTC day, in epoch seconds."""
    return int(wall_s) // DAY_S * DAY_S


def month_of(wall_s: float) -> int:
    found = datetime.fromtimestamp(wall_s, UTC)
    return int(datetime(found.year, found.month, 1, tzinfo=UTC).timestamp())


def next_month_of(wall_s: float) -> int:
    first = datetime.fromtimestamp(month_of(wall_s), UTC)
    return month_of((first + timedelta(days=31)).timestamp())


def has_budget(tenant: Tenant) -> bool:
    return (tenant.tokens_per_day, tenant.tokens_per_month) != (None, None)


def exhausted(tenant: Tenant, used: TokensUsed) -> str:
    """Return the name of a budget that is used up, or an empty string."""
    budgets = tenant.tokens_per_day, tenant.tokens_per_month
    spent = used.in_day, used.in_month
    for name, budget, count in zip(LIMITS, budgets, spent, strict=True):
        if budget is not None and count >= budget:
            return name
    return ""


class _Usage:
    """Tokens that each tenant used, by start of the day and by start of the month."""

    def __init__(self) -> None:
        self._days: dict[str, dict[int, int]] = {}
        self._months: dict[str, dict[int, int]] = {}

    def set(self, used: TokensUsed) -> None:
        for known, start, tokens in (
            (self._days, used.day, used.in_day),
            (self._months, used.month, used.in_month),
        ):
            spans = known.setdefault(used.tenant, {})
            spans[start] = tokens
            if len(spans) > KEPT:
                del spans[min(other for other in spans if other != start)]

    def used(self, tenant: str, wall_s: float) -> TokensUsed:
        day, month = day_of(wall_s), month_of(wall_s)
        in_day = self._days.get(tenant, {}).get(day, 0)
        in_month = self._months.get(tenant, {}).get(month, 0)
        return TokensUsed(tenant, day, in_day, month, in_month)


class TokenLedger(_Usage):
    def __init__(
        self, in_day: Mapping[str, int], in_month: Mapping[str, int], wall_s: float
    ) -> None:
        super().__init__()
        day, month = day_of(wall_s), month_of(wall_s)
        for name, count in in_month.items():
            self.set(TokensUsed(name, day, in_day.get(name, 0), month, count))

    def add(self, rows: Iterable[UsageRow]) -> set[str]:
        """Add usage; return the tenants that used any tokens."""
        changed = set()
        for row in rows:
            tokens = row.prompt_tokens + row.generated_tokens
            if not tokens:
                continue
            old = self.used(row.tenant, row.minute)
            more = old._replace(
                in_day=old.in_day + tokens, in_month=old.in_month + tokens
            )
            self.set(more)
            changed.add(row.tenant)
        return changed


class TokenBudgets(_Usage):
    def __init__(self) -> None:
        super().__init__()
        # By tenant and day: tokens that the controller's sums do not yet include.
        self._since: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def set_used(self, used: Iterable[TokensUsed]) -> None:
        for each in used:
            self.set(each)

    def count(self, tenant: str, tokens: int, wall_s: float) -> None:
        """Count tokens that the controller's sums do not yet include.

        A negative number takes back an earlier count.
        """
        self._add(tenant, day_of(wall_s), tokens)

    def stored(self, rows: Iterable[UsageRow]) -> None:
        """Stop counting tokens that the controller's sums now include."""
        for row in rows:
            tokens = row.prompt_tokens + row.generated_tokens
            self._add(row.tenant, day_of(row.minute), -tokens)

    def _add(self, tenant: str, day: int, tokens: int) -> None:
        days = self._since[tenant]
        days[day] += tokens
        if days[day] <= 0:
            del days[day]
        if not days:
            del self._since[tenant]

    def check(self, tenant: Tenant, wall_s: float) -> RateLimited | None:
        """Return a refusal if a token budget of the tenant is used up."""
        if not has_budget(tenant):
            return None
        used = self.used(tenant.name, wall_s)
        # Without a controller, the entries may be days old.
        since: Mapping[int, int] = self._since.get(tenant.name, {})
        in_month = sum(n for day, n in since.items() if month_of(day) == used.month)
        now = used._replace(
            in_day=used.in_day + since.get(used.day, 0),
            in_month=used.in_month + in_month,
        )
        limit = exhausted(tenant, now)
        if not limit:
            return None
        is_day = limit == "tokens_per_day"
        end = used.day + DAY_S if is_day else next_month_of(wall_s)
        until = datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%d %H:%M UTC")
        text = (
            f"your {limit} budget of {getattr(tenant, limit):,} tokens is used up; "
            f"it is renewed at {until}"
        )
        return RateLimited(limit, text, end - wall_s)
