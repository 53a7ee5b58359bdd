"""Profiles: measured costs of a model, which complete a spec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from multiworld.config import MIB
from multiworld.errors import SpecError
from multiworld.serve.spec.schema import AppSpec, ModelSpec, StageSpec

MARGIN = 1.25  # bytes to book per measured byte; some requests may need more memory
WIDE = "float32"  # a model that was profiled in this dtype is also served in it

Count = Annotated[float, Field(ge=0, le=1e15)]


class StageProfile(BaseModel):
    """Measured costs of one stage."""

    model_config = ConfigDict(frozen=True)

    name: str
    weight_bytes: NonNegativeInt  # bytes of the parameters; 0: not an ``nn.Module``
    loaded_bytes: NonNegativeInt  # memory growth from loading the stage
    peak_bytes: NonNegativeInt  # peak memory growth while loading and computing
    out_bytes: Count  # bytes sent to the next stage, per row
    # Median seconds of a batch, by number of rows. For generated text: median seconds
    # of a step, by number of tokens.
    seconds: dict[PositiveInt, Count]
    kv_bytes: Count = 0.0  # bytes of keys and values per token, for generated text


def item_s_of(seconds: Mapping[int, float], max_batch_size: float) -> float:
    """Return the minimum seconds per row; ``seconds``: batch times by row count."""
    rows = [n for n in seconds if n <= max_batch_size] or [min(seconds)]
    return min(seconds[n] / n for n in rows)


class ModelProfile(BaseModel):
    """Measured costs of a model; ``base_bytes``: memory of a process without stages."""

    model_config = ConfigDict(frozen=True)

    model: str
    version: str
    device: str
    threads: int
    base_bytes: NonNegativeInt
    dtype: str = ""
    stages: list[StageProfile]

    def memory_mb(self, stage: int) -> float:
        """Return the memory to book for a replica of a stage, in MiB."""
        return round((self.base_bytes + self.stages[stage].peak_bytes) * MARGIN / MIB)


def load_profile(path: Path) -> ModelProfile:
    """Read a file that ``multiworld profile`` wrote."""
    try:
        found = ModelProfile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SpecError(f"cannot read profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise SpecError(
            f"{path} is not a profile; write one with `multiworld profile --out {path}`"
        ) from error
    if not all(stage.seconds for stage in found.stages):
        raise SpecError(
            f"profile {path} lacks measurements of a stage; write it again with "
            f"`multiworld profile --out {path}`"
        )
    return found


def with_profiles(app: AppSpec, folder: Path) -> AppSpec:
    """Fill in undeclared values from profiles, at paths relative to ``folder``."""
    models = {
        name: _with_profile(name, spec, folder) for name, spec in app.models.items()
    }
    return app.model_copy(update={"models": models})


def _with_profile(name: str, spec: ModelSpec, folder: Path) -> ModelSpec:
    if spec.profile is None:
        return spec
    found = load_profile(folder / Path(spec.profile).expanduser())
    if len(found.stages) != len(spec.stages):
        raise SpecError(
            f"models.{name}.profile: {spec.profile} has {len(found.stages)} stages, "
            f"but the model has {len(spec.stages)}; measure it again with "
            "`multiworld profile`"
        )
    generation = spec.generation
    stages = [
        _declared(stage, found, k, is_text=generation is not None)
        for k, stage in enumerate(spec.stages)
    ]
    if generation is not None and generation.dtype is None and found.dtype == WIDE:
        # bfloat16 was slow on the profiled machine, so memory was measured in float32.
        generation = generation.model_copy(update={"dtype": WIDE})
    return spec.model_copy(update={"stages": stages, "generation": generation})


def _declared(
    stage: StageSpec, found: ModelProfile, k: int, *, is_text: bool
) -> StageSpec:
    most = math.inf if is_text else stage.max_batch_size
    measured = {
        "memory_mb": found.memory_mb(k),
        "item_ms": item_s_of(found.stages[k].seconds, most) * 1000,
        "out_kb": found.stages[k].out_bytes / 1024,
    }
    missing = {n: v for n, v in measured.items() if getattr(stage, n) is None}
    return stage.model_copy(update=missing)
