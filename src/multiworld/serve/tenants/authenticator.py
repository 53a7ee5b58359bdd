"""Who comes to a gateway: whose key it is, what is left of its limits, what it uses.

Shell: reads clocks and makes digests; decides nothing that its parts do not.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from multiworld.backends.dtypes import memory_of, plain
from multiworld.errors import (
    OverloadedError,
    QuarantinedError,
    RequestPoisonedError,
    UnauthorizedError,
)
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.tenants.directory import ANONYMOUS, Tenant, TenantDirectory
from multiworld.serve.tenants.keys import parse_key
from multiworld.serve.tenants.quarantine import Quarantine
from multiworld.serve.tenants.rate_limits import RateLimiter
from multiworld.serve.tenants.usage_meter import UsageMeter

Post = tuple[str, str]
"""Model and version."""

FORGET_S = 60.0

NO_KEY = (
    "this service needs an API key: send it as `Authorization: Bearer KEY` (or "
    "X-API-Key); `multiworld tenants create NAME` makes one"
)
NOT_OPERATOR = "metrics are for operators (multiworld tenants create --operator)"
BAD_KEY = "this API key is not known here, or not any more"


@dataclass(slots=True, eq=False)
class AdmittedRequest:
    """One request, from when it is let in until it is answered."""

    tenant: Tenant
    started_at: float
    bytes_in: int = 0
    bytes_out: int = 0
    rows: int = 0
    is_refused: bool = False


class Authenticator:
    """The entrance of one gateway.

    Args:
        needs_key: Whether nobody gets in without one.

    Attributes:
        refused: How many were not let in, by tenant and reason.
        gateways: Between which limits are divided.
    """

    def __init__(self, *, needs_key: bool) -> None:
        self.needs_key = needs_key
        self.book = TenantDirectory()
        self.limiter = RateLimiter()
        self.quarantine = Quarantine()
        self.meter = UsageMeter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.gateways = 1
        self._forget_at = 0.0

    def identify(self, headers: Mapping[str, str]) -> Tenant:
        """Return whose request it is.

        Raises:
            UnauthorizedError: It has no key, or none that is known.
        """
        key = _key_in(headers)
        if not key:
            if self.needs_key:
                self._count_refusal("", "no key")
                raise UnauthorizedError(NO_KEY)
            return ANONYMOUS
        tenant = self.book.find(*parse_key(key), time.time())
        if tenant is not None:
            return tenant
        if not self.needs_key and not self.book.tenants:
            return ANONYMOUS  # clients send one by habit: OpenAI's insist
        self._count_refusal("", "wrong key")
        raise UnauthorizedError(BAD_KEY)

    def admit(self, headers: Mapping[str, str]) -> AdmittedRequest:
        """Let a request in; ``leave`` must follow.

        Raises:
            UnauthorizedError: It has no key, or none that is known.
            OverloadedError: Its tenant has used up what it may.
        """
        tenant, now = self.identify(headers), time.monotonic()
        if now >= self._forget_at:
            self._forget_at = now + FORGET_S
            self.limiter.prune(now)
            self.quarantine.prune(now)
        refusal = self.limiter.admit(tenant, self.gateways, now)
        if refusal is not None:
            self._count_refusal(tenant.name, refusal.limit)
            raise OverloadedError(refusal.text, retry_after_s=refusal.retry_after_s)
        return AdmittedRequest(tenant, now)

    def finish(self, admitted: AdmittedRequest, model: str, status: int) -> None:
        """Take note of how a request ended."""
        self.limiter.release(admitted.tenant)
        self.limiter.spend(admitted.tenant, admitted.bytes_out)
        sums = self.meter.at(admitted.tenant.name, model, time.time())
        sums.requests += 1
        sums.answered += status == 200
        sums.failed += status >= 400
        sums.rows += admitted.rows if status == 200 else 0
        sums.bytes_in += admitted.bytes_in
        sums.bytes_out += admitted.bytes_out
        sums.seconds += time.monotonic() - admitted.started_at if status == 200 else 0.0

    def count_bytes(self, admitted: AdmittedRequest, size: int) -> None:
        """Take note of bytes that have come, whatever becomes of them."""
        admitted.bytes_in += size
        self.limiter.spend(admitted.tenant, size)

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Let only those in who may see what concerns everybody.

        Raises:
            UnauthorizedError: Keys are needed, and this is not an operator's.
        """
        if not self.needs_key:
            return
        tenant = self.identify(headers)
        if not tenant.is_operator:
            self._count_refusal(tenant.name, "not an operator")
            raise UnauthorizedError(NOT_OPERATOR)

    def _count_refusal(self, tenant: str, why: str) -> None:
        self.refused[tenant, why] += 1
        self.meter.at(tenant, "", time.time()).refused += 1

    def _count_refusal_once(self, admitted: AdmittedRequest, why: str) -> None:
        """Count a request that is refused, however many texts it had."""
        if not admitted.is_refused:
            admitted.is_refused = True
            self._count_refusal(admitted.tenant.name, why)

    def count_model_refusal(self, tenant: Tenant) -> None:
        """Count that somebody asked for a model that it may not use."""
        self._count_refusal(tenant.name, "model")

    # Poison.

    def needs_digest(self, tenant: Tenant, post: Post) -> bool:
        """Return whether ``check`` needs a digest."""
        model_key = f"{post[0]} {post[1]}"
        return self.quarantine.has_records(tenant.name, model_key)

    def check_poison(self, admitted: AdmittedRequest, post: Post, digest: str) -> None:
        """Refuse what is known to kill replicas.

        Args:
            post: Model and version.
            digest: Of the request.

        Raises:
            QuarantinedError: Too much of this tenant's does.
            RequestPoisonedError: This very request does.
        """
        tenant, now = admitted.tenant, time.monotonic()
        model_key = f"{post[0]} {post[1]}"
        quarantine_s = self.quarantine.remaining_s(tenant.name, model_key, now)
        if quarantine_s:
            self._count_refusal_once(admitted, "quarantined")
            raise QuarantinedError(
                f"several of your requests to model {post[0]!r} have killed the "
                f"replicas that computed them; none is taken for {quarantine_s:.0f} s",
                retry_after_s=quarantine_s,
            )
        if self.quarantine.is_poison(tenant.name, model_key, digest, now):
            self._count_refusal_once(admitted, "poisonous")
            raise RequestPoisonedError(
                f"this request to model {post[0]!r} has killed the replicas that "
                "computed it before; it is not tried again"
            )

    def add_poison(self, tenant: str, post: Post, digest: str) -> float:
        """Take note of a poisonous request, found here or at another gateway.

        Returns:
            For how long all requests of its tenant to that model are refused.
        """
        model_key = f"{post[0]} {post[1]}"
        return self.quarantine.add(tenant, model_key, digest, time.monotonic())


def digest_of(tensors: Tensors) -> str:
    """Return what tells a request from others."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = plain(tensors[name])
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(memory_of(tensor))
    return found.hexdigest()


def _key_in(headers: Mapping[str, str]) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key", "").strip()
