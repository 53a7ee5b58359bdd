"""Choice of the policy that scales a model's stages."""

from __future__ import annotations

from multiworld.serve.controller.scaling import (
    default_policy,
    reference_policies,
    token_policy,
)
from multiworld.serve.controller.scaling.snapshot import Policy
from multiworld.serve.engine.models.factory import import_factory
from multiworld.serve.spec.schema import ModelSpec

# Policies by the names that ``multiworld simulate --policy`` knows.
BUILT_IN: dict[str, Policy] = {
    "fixed": reference_policies.fixed,
    "queued": reference_policies.queued,
    "threshold": reference_policies.threshold,
}


def policy_of(spec: ModelSpec) -> Policy:
    """Return the policy that a spec names, or the default of its kind of model."""
    if spec.scaling is not None:
        found: Policy = import_factory(spec.scaling)
        return found
    if spec.generation is not None:
        return token_policy.decide
    return default_policy.decide
