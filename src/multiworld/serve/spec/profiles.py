"""What was measured of a model, as a file; and a spec completed with it."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from multiworld.errors import SpecError
from multiworld.serve.spec.schema import AppSpec, ModelSpec, StageSpec

MIB = 2**20

MARGIN = 1.25
"""What is booked for each byte that was measured: requests differ."""


class StageProfile(BaseModel):
    """One stage, measured.

    Attributes:
        weight_bytes: Of its parameters; 0 where it is no ``nn.Module``.
        loaded_bytes: What the process grew by when it was loaded.
        peak_bytes: The most that it grew by while it computed, loading included.
        out_bytes: What goes to the next stage for an item (a row).
        seconds: Of one batch, median, by batch size.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    weight_bytes: int
    loaded_bytes: int
    peak_bytes: int
    out_bytes: float
    seconds: dict[int, float]

    @property
    def item_s(self) -> float:
        """Seconds for an item in the batch size that is best for it."""
        return min(seconds / rows for rows, seconds in self.seconds.items())


class ModelProfile(BaseModel):
    """A model, measured.

    Attributes:
        base_bytes: What a process takes that has loaded no stage.
        threads: Of torch, for one operation.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    version: str
    device: str
    threads: int
    base_bytes: int
    stages: list[StageProfile]

    def memory_mb(self, stage: int) -> float:
        """Return what to book for a replica of a stage, in MiB."""
        return round((self.base_bytes + self.stages[stage].peak_bytes) * MARGIN / MIB)


def load_profile(path: Path) -> ModelProfile:
    """Read what ``multiworld profile`` has written.

    Raises:
        SpecError: It cannot be read, or is something else.
    """
    try:
        return ModelProfile.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise SpecError(f"cannot read profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise SpecError(
            f"{path} is no profile; write one with `multiworld profile --out {path}`"
        ) from error


def with_profiles(app: AppSpec, folder: Path) -> AppSpec:
    """Return a spec whose stages have what was measured, where they declare nothing.

    Args:
        folder: Where relative paths of profiles begin.

    Raises:
        SpecError: A profile cannot be read, or has another number of stages.
    """
    models = {
        name: _with_profile(name, spec, folder) for name, spec in app.models.items()
    }
    return app.model_copy(update={"models": models})


def _with_profile(name: str, spec: ModelSpec, folder: Path) -> ModelSpec:
    if spec.profile is None:
        return spec
    found = load_profile(folder / spec.profile)
    if len(found.stages) != len(spec.stages):
        raise SpecError(
            f"models.{name}.profile: {spec.profile} has {len(found.stages)} stages, "
            f"the model {len(spec.stages)}; measure it again"
        )
    stages = [_declared(stage, found, k) for k, stage in enumerate(spec.stages)]
    return spec.model_copy(update={"stages": stages})


def _declared(stage: StageSpec, found: ModelProfile, k: int) -> StageSpec:
    measured = {
        "memory_mb": found.memory_mb(k),
        "item_ms": found.stages[k].item_s * 1000,
        "out_kb": found.stages[k].out_bytes / 1024,
    }
    missing = {n: v for n, v in measured.items() if getattr(stage, n) is None}
    return stage.model_copy(update=missing)
