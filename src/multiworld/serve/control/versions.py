"""The specs of every version known to a service. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from multiworld.errors import UnknownModelError
from multiworld.serve.fleet.state import DesiredState
from multiworld.serve.placement.replica_bookings import Specs
from multiworld.serve.spec.schema import AppSpec, ModelSpec


class Versions:
    """Specs by model and version: the desired versions and those that still run."""

    def __init__(self, specs: Specs | None = None) -> None:
        self._specs = {name: dict(found) for name, found in (specs or {}).items()}

    @property
    def specs(self) -> Specs:
        return self._specs

    def add(self, app: AppSpec) -> None:
        for name, model in app.models.items():
            self._specs.setdefault(name, {})[model.version] = model

    def copy(self) -> Versions:
        return Versions(self._specs)

    def restore(self, other: Versions) -> None:
        self._specs = other._specs

    def get(self, model: str, version: str) -> ModelSpec:
        return self._specs[model][version]

    def stage_name(self, model: str, version: str, stage: int) -> str:
        """Return a stage as commands take it: by its name, or else its number."""
        spec = self._specs.get(model, {}).get(version)
        if spec is None or stage >= len(spec.stages):
            return str(stage)
        return spec.stages[stage].name or str(stage)

    def desired(self, desired: DesiredState, model: str) -> ModelSpec:
        """Return the spec of the desired version; after a rollback, of the old one."""
        found = desired.models.get(model)
        if found is None:
            known = ", ".join(desired.models)
            raise UnknownModelError(
                f"no model {model!r}; this service has {known or 'none'}"
            )
        return self._specs[model][found.version]

    def keep_only(self, needed: Iterable[tuple[str, str]]) -> None:
        """Remove all versions except these pairs of model and version."""
        kept = set(needed)
        self._specs = {
            name: {v: spec for v, spec in found.items() if (name, v) in kept}
            for name, found in self._specs.items()
        }
