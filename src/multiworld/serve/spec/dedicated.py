"""Copies of a model for one tenant. Pure.

``dedicated: [acme]`` adds a second model, ``model@acme``, with its own processes that
serve only this tenant's requests. Scaling, recovery and placement treat it like any
other model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from multiworld.serve.spec.schema import ModelSpec

SEPARATOR = "@"  # between the name of a model and the name of its tenant


def with_dedicated(models: Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
    """Return the models and the dedicated copies that they declare."""
    found: dict[str, ModelSpec] = {}
    for name, spec in models.items():
        found[name] = spec
        for tenant in spec.dedicated:
            title = f"{name}{SEPARATOR}{tenant}"
            if title not in models:
                found[title] = spec.model_copy(update={"dedicated": []})
    return found


def route_of(model: str, tenant: str, routes: Container[str]) -> str:
    """Return the name of the model that serves a tenant's requests."""
    own = f"{model}{SEPARATOR}{tenant}"
    return own if tenant and own in routes else model


def is_dedicated(name: str) -> bool:
    return SEPARATOR in name
