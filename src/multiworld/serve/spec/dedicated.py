"""Replicas of a model for one tenant only. Pure.

``dedicated: [acme]`` of a model makes a second one, ``model@acme``, with processes of
its own, which nobody else's requests get to. Everything that scales, heals and places
models does the same for it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from multiworld.serve.spec.schema import ModelSpec

SEPARATOR = "@"


def with_dedicated(models: Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
    """Return models, and those that tenants have for themselves."""
    found: dict[str, ModelSpec] = {}
    for name, spec in models.items():
        found[name] = spec
        for tenant in spec.dedicated:
            title = f"{name}{SEPARATOR}{tenant}"
            if title not in models:
                found[title] = spec.model_copy(update={"dedicated": []})
    return found


def route_of(model: str, tenant: str, routes: Container[str]) -> str:
    """Return the name under which a tenant's requests for a model are served."""
    own = f"{model}{SEPARATOR}{tenant}"
    return own if tenant and own in routes else model


def is_dedicated(name: str) -> bool:
    """Return whether a name is that of a model that one tenant has for itself."""
    return SEPARATOR in name
