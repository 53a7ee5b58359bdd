"""The tenants of a running service: changes, storage, updates for gateways."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from multiworld.errors import ServeError
from multiworld.net.rare_log import RareLog
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.gateway.admission import budgets
from multiworld.serve.gateway.admission.quarantine import POISON_S
from multiworld.serve.spec.schema import NAME, PATTERNS
from multiworld.serve.tenants.directory import Key, Tenant, tenant_from_json
from multiworld.serve.tenants.keys import known_as, make_key
from multiworld.serve.tenants.registry import TenantRegistry
from multiworld.serve.tenants.usage_rows import TokensUsed
from multiworld.serve.wire import control_messages as messages

logger = logging.getLogger("multiworld.serve")
rare_log = RareLog(logger)

CHUNK = 500  # maximum number of tenants in one message to a gateway
POISON = 1024  # maximum number of poison requests to remember for later gateways
CLOSE_S = 5.0  # maximum seconds to store usage when the service ends

T = TypeVar("T")
Send = Callable[[str, messages.Order], None]  # sends an order to the named gateway


class UnknownTenantError(ServeError):
    status = 404


class TenantManager:
    """The tenants of one service, their usage and their poison requests."""

    def __init__(
        self,
        registry: TenantRegistry,
        history: History,
        gateways: Callable[[], list[str]],
        send: Send,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry, self._clock = registry, clock
        self._history, self._gateways, self._send = history, gateways, send
        self.tenants = registry.tenants()
        now = time.time()
        in_day = registry.tokens_since(budgets.day_of(now))
        in_month = registry.tokens_since(budgets.month_of(now))
        self._ledger = budgets.TokenLedger(in_day, in_month, now)
        self._exhausted: dict[str, tuple[str, int, int]] = {}
        # Operations run one at a time. If an operation is cancelled, its change may be
        # stored without having taken effect; repeating the operation applies it.
        self._lock = asyncio.Lock()
        self._poison: deque[tuple[float, messages.PoisonFound]] = deque(maxlen=POISON)
        self._writing: set[asyncio.Task[None]] = set()
        # Batches of usage that are being stored: meter and number.
        self._storing: set[tuple[str, int]] = set()
        # Its own thread, because the threads that all others share would wait, too,
        # while another program locks the database.
        self._writer = ThreadPoolExecutor(1, "multiworld usage")

    async def close(self) -> None:
        """Store what is reported, for at most ``CLOSE_S``, and close the registry.

        Gateways report again what is not confirmed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.settled()
        for task in self._writing:
            task.cancel()
        self._writer.shutdown(wait=False, cancel_futures=True)
        try:
            await asyncio.to_thread(self.registry.close)
        except ServeError as error:
            logger.warning("%s", error)

    async def settled(self) -> None:
        """Wait until all reported usage is stored, or its storage has failed."""
        if self._writing:
            await asyncio.wait(self._writing)

    # To and from gateways.

    def greeting(self) -> Iterator[messages.Order]:
        everybody = tuple(self.tenants.values())
        count = max(1, len(everybody))
        for begin in range(0, count, CHUNK):
            yield messages.AllTenants(
                everybody[begin : begin + CHUNK],
                is_first=begin == 0,
                is_last=begin + CHUNK >= count,
            )
        yield messages.BudgetsUsed(self._uses(self.tenants.values()))
        now = self._clock()
        for at, found in self._poison:
            if now - at < POISON_S:
                yield msgspec.structs.replace(found, age_s=now - at)

    def _send_changes(self, tenants: Sequence[Tenant], removed: Sequence[str]) -> None:
        for name in self._gateways():
            self._send(name, messages.TenantsChanged(tuple(tenants), tuple(removed)))
        self._send_uses(tenants)

    def _send_uses(self, tenants: Iterable[Tenant]) -> None:
        uses = self._uses(tenants)
        for name in self._gateways() if uses else ():
            self._send(name, messages.BudgetsUsed(uses))

    def _uses(self, tenants: Iterable[Tenant]) -> tuple[TokensUsed, ...]:
        now = time.time()
        return tuple(
            self._ledger.used(tenant.name, now)
            for tenant in tenants
            if budgets.has_budget(tenant)
        )

    def budgets(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return the tokens used and allowed, by tenant and limit."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for used in self._uses(self.tenants.values()):
            tenant = self.tenants[used.tenant]
            limits = {
                "tokens_per_day": (used.in_day, tenant.tokens_per_day),
                "tokens_per_month": (used.in_month, tenant.tokens_per_month),
            }
            found[tenant.name] = {
                name: (count, limit)
                for name, (count, limit) in limits.items()
                if limit is not None
            }
        return found

    def used(self, gateway: str, usage: messages.UsageReport) -> None:
        """Store the usage that a gateway reports, then confirm it."""
        key = usage.meter, usage.number
        if key not in self._storing:  # else the gateway has become impatient
            self._storing.add(key)
            self._spawn(self._keep(gateway, usage))

    async def _keep(self, gateway: str, usage: messages.UsageReport) -> None:
        meter, number = usage.meter, usage.number
        try:
            is_new = await self._write(
                self.registry.add_usage, meter, number, usage.rows
            )
        except ServeError as error:
            rare_log.error("the usage of tenants cannot be stored", error)
            return  # without a confirmation, the gateway reports it again
        finally:
            self._storing.discard((meter, number))
        changed = self._ledger.add(usage.rows) if is_new else set()
        known = [self.tenants[name] for name in changed if name in self.tenants]
        self._send(gateway, messages.UsageStored(usage.number))
        self._send_uses(known)
        for tenant in known:
            await self._note_exhausted(tenant)

    async def _note_exhausted(self, tenant: Tenant) -> None:
        """Log that a tenant has exhausted a budget, once per period and limit."""
        used = self._ledger.used(tenant.name, time.time())
        limit = budgets.exhausted(tenant, used)
        before = self._exhausted.pop(tenant.name, None)
        if not limit:
            return
        since = used.day if limit == "tokens_per_day" else used.month
        now = self._exhausted[tenant.name] = limit, since, getattr(tenant, limit)
        if before == now:
            return
        self._history.say("budget", f"{tenant.name} has used up its {limit}")
        act = f"{limit} of {tenant.name} is used up"
        try:
            usage = partial(self.registry.usage, by_minute=False)
            found = await self._write(usage, tenant.name, since)
            what = {
                "budget": getattr(tenant, limit),
                "prompt_tokens": sum(row.prompt_tokens for row in found),
                "generated_tokens": sum(row.generated_tokens for row in found),
            }
            number = await self._write(self.registry.audit, "the service", act, what)
            await self._write(self.registry.audit_outcome, number, "done")
        except ServeError as error:
            rare_log.error("the audit log cannot be written", error)

    async def _write(self, call: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, partial(call, *args))

    def _spawn(self, body: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(body)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    def poisonous(self, gateway: str, found: messages.PoisonFound) -> None:
        """Remember a poison request, and notify the other gateways."""
        self._poison.append((self._clock(), found))
        whose = found.tenant or "a client without a key"
        text = f"a request of {whose} to {found.model} ({found.version})"
        self._history.say("quarantined", f"{text} is not retried")
        for name in self._gateways():
            if name != gateway:
                self._send(name, found)

    # Operations of administrators.

    def _known(self, name: str) -> Tenant:
        tenant = self.tenants.get(name)
        if tenant is None:
            raise UnknownTenantError(
                f"no tenant {name!r}; see `multiworld tenants list`"
            )
        return tenant

    async def _save(self, tenant: Tenant) -> None:
        await asyncio.to_thread(self.registry.save, tenant)
        self.tenants[tenant.name] = tenant
        self._send_changes([tenant], [])

    async def create(
        self, name: str, said: Mapping[str, object], valid_s: float | None = None
    ) -> tuple[Tenant, str]:
        """Create a tenant; return it with its first key, which is not stored."""
        async with self._lock:
            if not re.fullmatch(NAME, name) or "\n" in name:
                raise ServeError(f"tenant name {name!r}: {PATTERNS[NAME]}")
            if name in self.tenants:
                raise ServeError(f"tenant {name!r} already exists")
            text, key = _fresh(valid_s)
            tenant = _checked(Tenant(name=name, keys=(key,)), said)
            # If this is cancelled, the caller does not get the key, and must rotate it.
            await self._save(tenant)
        return tenant, text

    async def change(self, name: str, said: Mapping[str, object]) -> Tenant:
        async with self._lock:
            tenant = _checked(self._known(name), said)
            await self._save(tenant)
        return tenant

    async def rotate(
        self, name: str, grace_s: float, valid_s: float | None = None
    ) -> tuple[Tenant, str]:
        async with self._lock:
            tenant = self._known(name)
            text, key = _fresh(valid_s)
            end = time.time() + grace_s
            old = [
                dataclasses.replace(k, expires_at=min(end, k.expires_at or end))
                for k in tenant.keys
                if (k.expires_at is None or k.expires_at > time.time()) and grace_s > 0
            ]
            tenant = dataclasses.replace(tenant, keys=(*old, key))
            await self._save(tenant)
        return tenant, text

    async def revoke(self, name: str, key_id: str | None) -> Tenant:
        async with self._lock:
            tenant = self._known(name)
            known = {key.id for key in tenant.keys}
            is_key = key_id is not None and key_id not in known
            if key_id is not None and is_key:  # ``key_id`` may be the whole, secret key
                key_id = known_as(key_id)[0]
            kept = tuple(k for k in tenant.keys if key_id not in (None, k.id))
            if key_id is not None and len(kept) == len(tenant.keys):
                ids = ", ".join(k.id for k in tenant.keys) or "none"
                raise UnknownTenantError(
                    f"tenant {name!r} has no key with that id; its keys are: {ids}"
                )
            tenant = dataclasses.replace(tenant, keys=kept)
            await self._save(tenant)
        return tenant

    async def delete(self, name: str) -> None:
        """Remove a tenant but keep its usage."""
        async with self._lock:
            self._known(name)
            await asyncio.to_thread(self.registry.delete, name)
            del self.tenants[name]
            self._send_changes([], [name])


def _fresh(valid_s: float | None) -> tuple[str, Key]:
    text, key_id, digest = make_key()
    now = time.time()
    end = None if valid_s is None else now + valid_s
    return text, Key(id=key_id, digest=digest, made_at=now, expires_at=end)


def _checked(tenant: Tenant, said: Mapping[str, object]) -> Tenant:
    try:
        return tenant_from_json({**tenant.to_json(), **said})
    except ValidationError as error:  # the admin interface normally rejects it earlier
        raise ServeError(f"tenant {tenant.name!r}: {error}") from error
