"""The specs of every version known to a service. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from multiworld.errors import UnknownModelError
from multiworld.serve.controller.fleet.state import DesiredState
from multiworld.serve.controller.placement.replica_placement import Specs
from multiworld.serve.spec.schema import AppSpec, ModelSpec


class CurrentSpec:
    """The spec that a service follows now; an update replaces it."""

    def __init__(self, app: AppSpec) -> None:
        self.app = app
        self.dtypes: dict[str, str] = {}  # by model: its dtype, and why it was chosen

    def follow(self, app: AppSpec, dtypes: dict[str, str]) -> None:
        self.app, self.dtypes = app, dtypes


class Versions:
    """Specs by model and version: the desired versions and those that still run."""

    def __init__(self, specs: Specs | None = None) -> None:
        self.specs = {name: dict(found) for name, found in (specs or {}).items()}

    def add(self, app: AppSpec) -> None:
        for name, model in app.models.items():
            self.specs.setdefault(name, {})[model.version] = model

    def copy(self) -> Versions:
        return Versions(self.specs)

    def restore(self, other: Versions) -> None:
        self.specs.clear()
        self.specs.update(other.specs)

    def get(self, model: str, version: str) -> ModelSpec:
        return self.specs[model][version]

    def identities(self) -> dict[str, dict[str, str]]:
        """Return the names of the versions' identities, by model and version."""
        return {
            name: {v: s.identity.name for v, s in versions.items() if s.identity}
            for name, versions in self.specs.items()
        }

    def stage_name(self, model: str, version: str, stage: int) -> str:
        """Return a stage as commands accept it: its name, or else its number."""
        spec = self.specs.get(model, {}).get(version)
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
        return self.specs[model][found.version]

    def keep_only(self, needed: Iterable[tuple[str, str]]) -> None:
        """Remove all versions except these pairs of model and version."""
        kept = set(needed)
        for name, found in self.specs.items():
            for version in [v for v in found if (name, v) not in kept]:
                del found[version]
