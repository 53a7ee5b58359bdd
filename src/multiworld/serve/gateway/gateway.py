"""What the routes of a gateway share: its models, its door, its dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from multiworld.errors import (
    InvalidRequestError,
    NoReplicaError,
    RequestPoisonedError,
    UnknownModelError,
)
from multiworld.serve.gateway.metrics import Metrics
from multiworld.serve.routing.dispatcher import NO_MODEL, Dispatcher
from multiworld.serve.spec.dedicated import is_dedicated, route_of
from multiworld.serve.spec.stage import Model, Tensors
from multiworld.serve.tenants.authenticator import (
    AdmittedRequest,
    Authenticator,
    Post,
    digest_of,
)
from multiworld.serve.tenants.directory import ANONYMOUS, Tenant
from multiworld.serve.transport.collation import rows_of

LARGE_BYTES = 256 * 1024


class Gateway:
    """What the routes need.

    Attributes:
        models: By name and version.
        fleet: What the controller last told of replicas and events, for the metrics.
        on_poison: Called with a tenant, a model and its version, and the digest of a
            request that has killed replicas.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        max_body_bytes: int,
        authenticator: Authenticator | None = None,
    ) -> None:
        self.dispatcher, self.max_body_bytes = dispatcher, max_body_bytes
        self.authenticator = authenticator or Authenticator(needs_key=False)
        self.on_poison: Callable[[str, Post, str], None] = lambda *_: None
        self.models: dict[str, dict[str, Model]] = {}
        self.texts: dict[tuple[str, str], Any] = {}
        self.metrics = Metrics(dispatcher.name)
        self.fleet: dict[str, Any] = {}
        self.is_ending = False

    def may_use(self, tenant: Tenant, name: str) -> bool:
        """Return whether a model is served that a tenant may use."""
        is_served = name in self.dispatcher.table.routes and not is_dedicated(name)
        return is_served and tenant.may_use(name)

    def names(self, tenant: Tenant) -> list[str]:
        """Return the models that a tenant may use."""
        routes = self.dispatcher.table.routes
        return sorted(name for name in routes if self.may_use(tenant, name))

    def route(self, name: str, tenant: Tenant) -> str:
        """Return the name under which a model is served to a tenant."""
        return route_of(name, tenant.name, self.dispatcher.table.routes)

    def model(
        self, name: str, version: str | None = None, tenant: Tenant = ANONYMOUS
    ) -> tuple[str, Model]:
        """Return the version that answers, and its model.

        Raises:
            UnknownModelError: There is none that this tenant may use, or another
                version answers.
        """
        routes = self.dispatcher.table.routes
        if not self.may_use(tenant, name):
            if name in routes:
                self.authenticator.count_model_refusal(tenant)
            known = ", ".join(self.names(tenant)) or "none"
            raise UnknownModelError(NO_MODEL.format(name, known))
        name = self.route(name, tenant)
        route = routes[name]
        if version is not None and version != route.version:
            raise UnknownModelError(
                f"this model has version {route.version!r} now, not {version!r}"
            )
        model = self.models.get(name, {}).get(route.version)
        if model is None:
            raise NoReplicaError(f"model {name!r} is not loaded here yet; try again")
        return route.version, model

    def forget_versions(self) -> None:
        """Forget the versions that are not in the table any more."""
        routes = self.dispatcher.table.routes
        for name, versions in list(self.models.items()):
            kept = routes[name].stages.keys() if name in routes else ()
            for version in versions.keys() - kept:
                del versions[version]
                self.texts.pop((name, version), None)

    def is_ready(self, name: str) -> bool:
        """Whether every stage of a model has a replica that is ready."""
        return not self.missing_stages(name)

    def missing_stages(self, name: str) -> list[int]:
        """Return the stages of a model without a replica that should have one.

        Those that have none while nobody asks are not meant.
        """
        on_demand = self.dispatcher.table.routes[name].on_demand
        return [s for s in self.dispatcher.missing(name) if s not in on_demand]

    async def infer(
        self,
        admitted: AdmittedRequest,
        name: str,
        version: str,
        tensors: Tensors,
        deadline_s: float | None,
        session: str | None = None,
    ) -> Tensors:
        """Return the answer to one request of a tenant.

        Raises:
            ServeError: Its kinds say what happened.

        Cancellation: the request is withdrawn, wherever it is.
        """
        tenant, post = admitted.tenant, (name, version)
        if self.authenticator.needs_digest(tenant, post):
            self.authenticator.check_poison(admitted, post, await _digest(tensors))
        admitted.rows += rows_of(tensors)
        served = self.route(name, tenant)
        try:
            return await self._infer(tenant, served, tensors, deadline_s, session)
        except UnknownModelError:
            # Replicas that it had for itself were taken away meanwhile, or the model.
            if served == name or name not in self.dispatcher.table.routes:
                known = ", ".join(self.names(tenant)) or "none"
                raise UnknownModelError(NO_MODEL.format(name, known)) from None
            return await self._infer(tenant, name, tensors, deadline_s, session)
        except RequestPoisonedError:
            digest = await _digest(tensors)
            self.poisonous(tenant.name, post, digest)
            self.on_poison(tenant.name, post, digest)
            raise

    def poisonous(self, tenant: str, post: Post, digest: str) -> None:
        """Take note of a poisonous request; of many, nothing more is tried."""
        if self.authenticator.add_poison(tenant, post, digest):
            self.dispatcher.quarantine(tenant, post[0])

    async def _infer(
        self,
        tenant: Tenant,
        served: str,
        tensors: Tensors,
        deadline_s: float | None,
        session: str | None,
    ) -> Tensors:
        return await self.dispatcher.infer(
            served,
            tensors,
            deadline_s=deadline_s,
            session=None if session is None else f"{tenant.name}\0{session}",
            share=tenant.share,
        )

    async def text(self, name: str, version: str, model: Model) -> Any:
        """Return what turns text into inputs, loaded once.

        Raises:
            InvalidRequestError: The model takes no text.
        """
        if model.text is None:
            raise InvalidRequestError(
                f"model {name!r} takes no text; use /v2/models/{name}/infer"
            )
        if (name, version) not in self.texts:
            self.texts[name, version] = await asyncio.to_thread(model.text)
        return self.texts[name, version]


async def _digest(tensors: Tensors) -> str:
    """Return a request's digest; that of a large one is made in a thread."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size < LARGE_BYTES:
        return digest_of(tensors)
    return await asyncio.to_thread(digest_of, tensors)
