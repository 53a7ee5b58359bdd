"""Tenants and their keys, as a gateway and the controller know them. Pure."""

from __future__ import annotations

import fnmatch
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from multiworld.serve.tenants.fair_queue import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API key: never the key itself, only what it is checked with.

    Attributes:
        id: The part of it that is no secret.
        digest: SHA-256 of the whole key, as hexadecimal digits.
        made_at: Seconds since the epoch.
        expires_at: From when it is not taken any more; None: never.
    """

    id: str
    digest: str
    made_at: float
    expires_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One who shares the service.

    Attributes:
        models: Those it may use (``*`` and ``?`` stand for any characters).
        rpm_limit: Most requests in any minute; None: no limit.
        max_parallel_requests: Most that are under way at a time.
        bytes_per_s: Bytes of requests and answers, in the long run.
        weight: Of its share where the service is saturated.
        priority: Requests of a higher one are computed first, always.
        is_operator: Whether it may read the metrics of all.
        is_suspended: Whether its keys are refused for now.
    """

    name: str
    models: tuple[str, ...] = ("*",)
    rpm_limit: int | None = None
    max_parallel_requests: int | None = None
    bytes_per_s: float | None = None
    weight: float = 1.0
    priority: int = 0
    is_operator: bool = False
    is_suspended: bool = False
    keys: tuple[Key, ...] = ()

    @property
    def share(self) -> Share:
        """What its work counts."""
        return Share(self.name, self.weight, self.priority)

    def may_use(self, model: str) -> bool:
        """Return whether a model is one of those it may use."""
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)

    def with_key(self, key: Key) -> Tenant:
        """Return it with one key more."""
        return replace(self, keys=(*self.keys, key))

    def to_json(self) -> dict[str, Any]:
        """Return what ``tenant_from_json`` reads."""
        return asdict(self)

    def shown(self) -> dict[str, Any]:
        """Return it for people: without what its keys are checked with."""
        found = asdict(self)
        for key in found["keys"]:
            del key["digest"]
        return found


_TENANT: TypeAdapter[Tenant] = TypeAdapter(Tenant)


def tenant_from_json(data: Any) -> Tenant:
    """Read a tenant.

    Raises:
        ValueError: It is none.
    """
    return _TENANT.validate_python(data)


ANONYMOUS = Tenant(name="")
"""Whoever asks where no key is needed."""

NO_DIGEST = "0" * 64
"""The digest of no key: compared with, so that an unknown key takes as long."""


@dataclass(slots=True)
class TenantDirectory:
    """All tenants, found by their keys."""

    tenants: dict[str, Tenant] = field(default_factory=dict)
    _keys: dict[str, tuple[Key, str]] = field(default_factory=dict)

    def put(self, tenants: Iterable[Tenant]) -> None:
        """Enter tenants, in place of those of the same names."""
        for tenant in tenants:
            self.remove(tenant.name)
            self.tenants[tenant.name] = tenant
            for key in tenant.keys:
                self._keys[key.id] = key, tenant.name

    def remove(self, name: str) -> None:
        """Forget a tenant and its keys."""
        old = self.tenants.pop(name, None)
        for key in old.keys if old else ():
            self._keys.pop(key.id, None)

    def replace_all(self, tenants: Mapping[str, Tenant]) -> None:
        """Forget all, and enter these."""
        self.tenants.clear()
        self._keys.clear()
        self.put(tenants.values())

    def find(self, key_id: str, digest: str, now: float) -> Tenant | None:
        """Return whose key it is; None if it is nobody's, or not valid any more.

        The comparison takes as long whether there is such a key or not, and however
        much of it is right.

        Args:
            digest: Of the whole key, as hexadecimal digits.
            now: Seconds since the epoch.
        """
        key, name = self._keys.get(key_id, (None, ""))
        is_valid = hmac.compare_digest(NO_DIGEST if key is None else key.digest, digest)
        if key is None or not is_valid:
            return None
        if key.expires_at is not None and now >= key.expires_at:
            return None
        tenant = self.tenants[name]
        return None if tenant.is_suspended else tenant
