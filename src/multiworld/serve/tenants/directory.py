"""Directory of tenants and their API keys. Pure."""

from __future__ import annotations

import fnmatch
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from multiworld.serve.queueing.fair_queue import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Record of an API key, without the key itself. Times are epoch seconds."""

    id: str  # not secret
    digest: str  # SHA-256 of the whole key in hexadecimal
    made_at: float
    expires_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A client of the service, with its permissions and limits. None: no limit."""

    name: str
    # Models that it may use, with wildcards ``*`` and ``?``.
    models: tuple[str, ...] = ("*",)
    rpm_limit: int | None = None  # requests in any 60 seconds
    max_parallel_requests: int | None = None
    bytes_per_s: float | None = None  # in requests and answers, on average
    tpm_limit: int | None = None  # prompt and output tokens per minute, on average
    # Prompt and output tokens; days and months are UTC's.
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    weight: float = 1.0
    priority: int = 0  # higher priorities always run first
    is_operator: bool = False  # may read the metrics, which cover all tenants
    is_suspended: bool = False  # its keys are refused for now
    suspension: str = ""  # reason that its clients see, in the operator's words
    keys: tuple[Key, ...] = ()

    @property
    def share(self) -> Share:
        return Share(self.name, self.weight, self.priority)

    def may_use(self, model: str) -> bool:
        return any(
            pattern == "*" or fnmatch.fnmatchcase(model, pattern)
            for pattern in self.models
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_TENANT: TypeAdapter[Tenant] = TypeAdapter(Tenant)


def tenant_from_json(data: Any) -> Tenant:
    return _TENANT.validate_python(data)


ANONYMOUS = Tenant(name="")  # for clients without a key, if none is needed

# Compared for an unknown key id, so that the check takes the same time.
NO_DIGEST = "0" * 64


@dataclass(slots=True)
class TenantDirectory:
    tenants: dict[str, Tenant] = field(default_factory=dict)
    _keys: dict[str, tuple[Key, str]] = field(default_factory=dict)

    def put(self, tenants: Iterable[Tenant]) -> None:
        """Add tenants; they replace existing tenants of the same names."""
        for tenant in tenants:
            self.remove(tenant.name)
            self.tenants[tenant.name] = tenant
            for key in tenant.keys:
                self._keys[key.id] = key, tenant.name

    def remove(self, name: str) -> None:
        old = self.tenants.pop(name, None)
        for key in old.keys if old else ():
            self._keys.pop(key.id, None)

    def replace_all(self, tenants: Mapping[str, Tenant]) -> None:
        self.tenants.clear()
        self._keys.clear()
        self.put(tenants.values())

    def find(self, key_id: str, digest: str, now: float) -> Tenant | None:
        """Return a key's tenant, suspended or not; None if the key is not valid."""
        # The duration of this check reveals neither whether the id exists nor how much
        # of the digest matches.
        key, name = self._keys.get(key_id, (None, ""))
        is_valid = hmac.compare_digest(NO_DIGEST if key is None else key.digest, digest)
        if key is None or not is_valid:
            return None
        if key.expires_at is not None and now >= key.expires_at:
            return None
        return self.tenants[name]
