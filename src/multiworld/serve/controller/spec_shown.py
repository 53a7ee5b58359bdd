"""The spec of a running service as text, and differences from it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from multiworld.serve.controller.answers import SpecShown, StatusAnswer
from multiworld.serve.spec.schema import AppSpec
from multiworld.serve.spec.yaml_numbers import RESOLVERS


class _Dumper(yaml.SafeDumper):
    """Also quotes texts that are numbers by the rules of the loader, such as 1e3."""


for tag, rule in RESOLVERS.items():
    _Dumper.add_implicit_resolver(tag, rule, list("-+.0123456789"))


def text_of(app: AppSpec) -> str:
    """Return a spec as YAML, without defaults and computed fields."""
    found = app.model_dump(
        mode="json",
        exclude_defaults=True,
        # The values of a profile are in the fields already, and its path is relative to
        # a folder that is not known here.
        exclude={"models": {"__all__": {"identity", "profile"}}},
    )
    return yaml.dump(found, Dumper=_Dumper, sort_keys=False)


def shown(app: AppSpec, before: str, status: StatusAnswer) -> SpecShown:
    return SpecShown(text_of(app), before, tuple(_differences(app, status)))


def _differences(app: AppSpec, status: StatusAnswer) -> Iterator[str]:
    """Yield a line for each difference between the running service and its spec."""
    for name, model in app.models.items():
        serving = status.active.get(name, "")
        if serving != model.version:
            which = f"version {serving} serves" if serving else "no version serves"
            yield f"{name}: {which}, not {model.version}"
        wanted = status.wanted.models.get(name)
        if wanted is not None and len(wanted.replicas) != len(model.stages):
            continue  # another version is wanted, with other stages
        for number, stage in enumerate(model.stages):
            ready = sum(
                p.phase == "ready" and p.version == model.version
                for p in status.processes
                if p.model == name and p.stage == number
            )
            count = stage.replicas if wanted is None else wanted.replicas[number]
            what = f"{name}/{stage.name or number}"
            if count != stage.replicas:
                yield f"{what}: scaled to {count}, the spec says {stage.replicas}"
            if ready != count:
                yield f"{what}: {ready} of {count} replicas are ready"
