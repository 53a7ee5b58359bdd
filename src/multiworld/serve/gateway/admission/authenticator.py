"""Authenticator of a gateway: API keys, limits, quarantine and usage.

This module reads clocks and computes digests; the modules that it combines are pure,
except ``shared_limits``.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from multiworld import errors
from multiworld.backends.dtypes import memory_of, plain
from multiworld.serve.gateway.admission.budgets import TokenBudgets
from multiworld.serve.gateway.admission.quarantine import Quarantine
from multiworld.serve.gateway.admission.rate_limits import RateLimiter
from multiworld.serve.gateway.admission.timing import Timing
from multiworld.serve.gateway.admission.usage_meter import UsageMeter
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.tenants.directory import ANONYMOUS, Tenant, TenantDirectory
from multiworld.serve.tenants.keys import known_as
from multiworld.serve.tenants.usage_rows import UsageTotals
from multiworld.serve.wire.origin import NOWHERE, Origin

ModelVersion = tuple[str, str]

FORGET_S = 60.0  # seconds between removals of outdated limits and quarantines

NO_KEY = (
    "this service needs an API key: send it as `Authorization: Bearer KEY` or "
    "`X-API-Key: KEY`; `multiworld tenants create NAME` creates one"
)
NOT_OPERATOR = (
    "metrics need the API key of an operator, as `Authorization: Bearer KEY`; "
    "`multiworld tenants create NAME --operator` creates one"
)
BAD_KEY = "API key is unknown, expired or revoked; use a valid one"
SUSPENDED = "tenant of this API key is suspended"


@dataclass(slots=True, eq=False)
class AdmittedRequest:
    """A request that has been admitted, but not answered."""

    tenant: Tenant
    started_at: float  # monotonic time of its admission
    bytes_in: int = 0  # bytes of its body as received, before decompression
    bytes_out: int = 0
    rows: int = 0
    is_refused: bool = False
    timing: Timing = field(default_factory=Timing)
    origin: Origin = NOWHERE
    prompt_tokens: int = 0
    generated_tokens: int = 0
    model: str = ""  # model that the request names; empty until known
    counted_for: str | None = None  # model of its usage; None until it has finished
    is_resumed: bool = False  # another gateway admitted it before


class Authenticator:
    """Admits requests to one gateway, and counts their usage."""

    def __init__(
        self, *, needs_key: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.needs_key, self.clock = needs_key, clock
        self.directory = TenantDirectory()
        self.limiter = RateLimiter()
        self.quarantine = Quarantine()
        self.budgets = TokenBudgets()
        self.meter = UsageMeter()  # usage that the controller has not yet stored
        self.refused: Counter[tuple[str, str]] = Counter()
        self.gateways = 1  # number of gateways that share the limits
        self._forget_at = 0.0

    def identify(self, headers: Mapping[str, str]) -> Tenant:
        """Return a request's tenant; raise UnauthorizedError if its key is invalid."""
        key = _key_in(headers)
        if not key:
            if self.needs_key:
                self.count_refusal("", "no key")
                raise errors.UnauthorizedError(NO_KEY)
            return ANONYMOUS
        tenant = self.directory.find(*known_as(key), time.time())
        if tenant is not None and tenant.is_suspended:
            self.count_refusal(tenant.name, "suspended")
            words = f": {tenant.suspension}" if tenant.suspension else ""
            raise errors.UnauthorizedError(SUSPENDED + words)
        if tenant is not None:
            return tenant
        if not self.needs_key and not self.directory.tenants:
            return ANONYMOUS  # ignore the key: OpenAI's clients always send one
        self.count_refusal("", "wrong key")
        raise errors.UnauthorizedError(BAD_KEY)

    def admit(
        self, headers: Mapping[str, str], *, is_resumed: bool = False
    ) -> AdmittedRequest:
        """Admit a request within its tenant's limits; ``finish`` must follow.

        ``is_resumed``: another gateway has admitted the request, so it is not refused.
        """
        tenant, now = self.identify(headers), self.clock()
        if now >= self._forget_at:
            self._forget_at = now + FORGET_S
            self.limiter.prune(now)
            self.quarantine.prune(now)
        if is_resumed:
            self.limiter.readmit(tenant, self.gateways, now)
            return AdmittedRequest(tenant, now, is_resumed=True)
        refusal = self.budgets.check(tenant, time.time()) or self.limiter.admit(
            tenant, self.gateways, now
        )
        if refusal is not None:
            self.count_refusal(tenant.name, refusal.limit)
            raise errors.OverloadedError(
                refusal.text, retry_after_s=refusal.retry_after_s, limit=refusal.limit
            )
        return AdmittedRequest(tenant, now)

    def finish(self, admitted: AdmittedRequest, model: str, status: int | None) -> None:
        """Count a finished request, and release its share of the limits.

        ``status``: None if another gateway continues the request, and will count it.
        """
        self.limiter.release(admitted.tenant)
        admitted.counted_for = model
        sums = self.meter.at(admitted.tenant.name, model, time.time())
        if status is not None:
            sums.requests += 1
            sums.bytes_in += admitted.bytes_in
            sums.answered += status == 200
            sums.failed += status >= 400
        sums.rows += admitted.rows if status == 200 else 0
        sums.bytes_out += admitted.bytes_out
        sums.seconds += self.clock() - admitted.started_at if status == 200 else 0.0

    def count_bytes(
        self, admitted: AdmittedRequest, size: int, *, is_resumed: bool = False
    ) -> None:
        """Count received bytes of a body, whatever the request's outcome."""
        admitted.bytes_in += size
        if not is_resumed:  # else its first gateway has charged these bytes
            self.limiter.spend(admitted.tenant, size)

    def count_sent(self, admitted: AdmittedRequest, size: int) -> None:
        """Count bytes of an answer, as they are sent."""
        if admitted.counted_for is None:
            admitted.bytes_out += size
        else:  # a kept stream has ended, and its client still reads
            name, model = admitted.tenant.name, admitted.counted_for
            self.meter.at(name, model, time.time()).bytes_out += size
        self.limiter.spend(admitted.tenant, size)

    def check_tokens(self, admitted: AdmittedRequest) -> None:
        """Raise OverloadedError if the tenant's tokens are used up by now.

        Other requests may have used them since this one was admitted.
        """
        if admitted.is_resumed:
            return
        tenant = admitted.tenant
        refusal = self.budgets.check(tenant, time.time()) or self.limiter.check_tokens(
            tenant, self.gateways, self.clock()
        )
        if refusal is not None:
            self._count_refusal_once(admitted, refusal.limit)
            raise errors.OverloadedError(
                refusal.text, retry_after_s=refusal.retry_after_s, limit=refusal.limit
            )

    @contextmanager
    def tokens_held(self, admitted: AdmittedRequest, tokens: int) -> Iterator[None]:
        """Charge the limits for tokens while they are computed.

        The caller counts them afterwards if they were. Raise OverloadedError, and
        charge nothing, if the tenant's tokens are used up by now.
        """
        self.check_tokens(admitted)
        tenant, wall_s = admitted.tenant, time.time()
        self.limiter.spend_tokens(tenant, tokens)
        self.budgets.count(tenant.name, tokens, wall_s)
        try:
            yield
        finally:
            self.limiter.spend_tokens(tenant, -tokens)
            self.budgets.count(tenant.name, -tokens, wall_s)

    def count_prompt(self, admitted: AdmittedRequest, tokens: int) -> None:
        """Count the tokens of a request's prompts, whatever its outcome."""
        admitted.prompt_tokens += tokens
        self._spend_tokens(admitted, tokens).prompt_tokens += tokens

    def count_generated(self, admitted: AdmittedRequest) -> None:
        admitted.generated_tokens += 1
        self._spend_tokens(admitted, 1).generated_tokens += 1

    def _spend_tokens(self, admitted: AdmittedRequest, count: int) -> UsageTotals:
        # Report tokens before the stream ends, because other gateways share the budget,
        # and because this gateway may be lost.
        tenant, wall_s = admitted.tenant, time.time()
        self.limiter.spend_tokens(tenant, count)
        self.budgets.count(tenant.name, count, wall_s)
        return self.meter.at(tenant.name, admitted.model, wall_s)

    def stored(self, number: int) -> None:
        """Record that the controller has stored a batch of usage."""
        self.budgets.stored(self.meter.confirmed(number))

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Raise UnauthorizedError unless the sender may read data of all tenants."""
        if not self.needs_key:
            return
        if not _key_in(headers):
            self.count_refusal("", "no key")
            raise errors.UnauthorizedError(NOT_OPERATOR)
        tenant = self.identify(headers)
        if not tenant.is_operator:
            self.count_refusal(tenant.name, "not an operator")
            raise errors.UnauthorizedError(NOT_OPERATOR)

    def count_refusal(self, tenant: str, why: str) -> None:
        self.refused[tenant, why] += 1
        self.meter.at(tenant, "", time.time()).refused += 1

    def _count_refusal_once(self, admitted: AdmittedRequest, why: str) -> None:
        """Count a refused request only once, even if it has several inputs."""
        if not admitted.is_refused:
            admitted.is_refused = True
            self.count_refusal(admitted.tenant.name, why)

    # Poison requests.

    def check_poison(
        self, admitted: AdmittedRequest, model_version: ModelVersion, digest: str
    ) -> None:
        """Refuse poison requests, and all requests of a quarantined tenant."""
        tenant, now = admitted.tenant, self.clock()
        quarantine_s = self.quarantine.remaining_s(tenant.name, model_version, now)
        if quarantine_s:
            self._count_refusal_once(admitted, "quarantined")
            raise errors.QuarantinedError(
                f"your requests to model {model_version[0]!r} are quarantined: "
                f"several of them killed their replicas; retry in {quarantine_s:.0f} "
                "s, without those requests",
                retry_after_s=quarantine_s,
            )
        if self.quarantine.is_poison(tenant.name, model_version, digest, now):
            self._count_refusal_once(admitted, "poisonous")
            raise errors.RequestPoisonedError(
                f"this request to model {model_version[0]!r} is a poison request: it "
                "killed the replicas that computed it before; do not retry it"
            )

    def add_poison(
        self, tenant: str, model_version: ModelVersion, digest: str, age_s: float = 0.0
    ) -> bool:
        """Record a poison request; return whether this quarantines its tenant."""
        at = self.clock() - age_s
        return self.quarantine.add(tenant, model_version, digest, at) > age_s


def digest_of(tensors: Tensors) -> str:
    """Return a digest of a request's inputs: names, dtypes, shapes and values."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = plain(tensors[name])
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(memory_of(tensor))
    return found.hexdigest()


def _key_in(headers: Mapping[str, str]) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip()
