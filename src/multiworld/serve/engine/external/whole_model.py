"""A model that a whole engine computes: its properties, and its engine's adapter."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from multiworld.config import MIB
from multiworld.errors import MultiWorldError, SpecError
from multiworld.serve.deadlines import HUNG_S
from multiworld.serve.engine.external import engine_encoder
from multiworld.serve.engine.external.engine_encoder import EngineEncoder
from multiworld.serve.engine.external.llama_cpp import weights_of
from multiworld.serve.engine.external.registry import maker_of, wrong_in
from multiworld.serve.engine.external.whole_engine import EngineSettings
from multiworld.serve.engine.models import folder_facts, huggingface, weights
from multiworld.serve.engine.models.factory import folder_of
from multiworld.serve.machines import inventory
from multiworld.serve.spec.schema import LLAMA_CPP, OPENAI, GenerationSpec, ModelSpec
from multiworld.serve.spec.stage import (
    Generation,
    Model,
    Stage,
    StageContext,
    StageFunction,
)
from multiworld.serve.text import tokenizer_files
from multiworld.serve.text.folder_json import read_json

# Suffix of the file names of a GGUF file in several parts.
PART = re.compile(r"-\d+-of-\d+$")


def model(path: str, spec: ModelSpec) -> Model:
    """Return the model in a folder with one stage, which a whole engine computes."""
    assert spec.engine is not None
    folder = Path(path).expanduser()
    if spec.embeddings:
        load = functools.partial(_load_encoder, spec)
        load(StageContext())  # raises if the arguments are invalid
        return engine_encoder.model(folder, spec.engine, spec.engine_args, load)
    config = read_json(folder / "config.json")
    folder_facts.check_tokenizer(folder)
    generation = spec.generation or GenerationSpec()
    parts = [spec.engine, spec.engine_args, generation.dtype]
    what = json.dumps([*parts, _identity_of(spec.adapters)], sort_keys=True)
    facts = Generation(
        tokenizer=functools.partial(folder_facts.tokenizer, folder),
        end_tokens=tokenizer_files.end_tokens(config, folder),
        vocabulary=huggingface.number_of(config, ("vocab_size",), folder),
        max_tokens=huggingface.configured_length(config, folder_facts.MAX_TOKENS),
        kv_bytes=[0],
        weights=functools.partial(_name_of, spec, folder, what),
        defaults=folder_facts.defaults(folder, generation.generation_config),
    )
    make, settings = maker_of(spec.engine), settings_of("", spec, facts)
    try:
        made = make(settings)  # raises if the arguments are invalid
    except MultiWorldError:
        raise
    except Exception as error:
        # An adapter, which may be someone else's code, may raise anything.
        raise SpecError(
            f"engine: {spec.engine} raised {type(error).__name__}: {error}"
        ) from error
    if wrong := wrong_in(made):
        raise SpecError(f"engine: the object that {spec.engine} returned {wrong}")
    if spec.adapters and not getattr(made, "has_adapters", False):
        raise SpecError(
            f"engine {spec.engine} does not support LoRA adapters; remove `adapters`"
        )
    return Model(stages=[Stage(load=_load, name=spec.engine)], generation=facts)


def _load_encoder(spec: ModelSpec, context: StageContext) -> EngineEncoder:
    """Return the encoder of an engine that embeds, which is not started yet."""
    assert spec.engine is not None
    settings = settings_of("", spec, None, context.device, context.gpus)
    return EngineEncoder(spec.engine, settings)


def _load(context: StageContext) -> StageFunction:
    raise SpecError("a whole engine is started by its replica, not loaded as a stage")


def _identity_of(adapters: Mapping[str, str]) -> list[object]:
    """Return sizes and times of files, which change with the adapters' weights."""
    found: list[object] = []
    for name, path in adapters.items():
        place = Path(path).expanduser()
        files = sorted(place.glob("adapter_*")) if place.is_dir() else [place]
        states = [(f.name, f.stat()) for f in files if f.is_file()]
        found.append((name, path, [(n, s.st_size, s.st_mtime_ns) for n, s in states]))
    return found


def _name_of(spec: ModelSpec, folder: Path, what: str) -> str:
    """Return a name for the weights together with the engine's options."""
    try:
        if spec.engine == OPENAI:
            # The weights are not in the folder, but at the servers.
            files = [folder / "config.json", folder / "tokenizer.json"]
            return weights.name_of_files(filter(Path.is_file, files), what)
        if spec.engine == LLAMA_CPP:
            first = Path(weights_of(settings_of("", spec, None)))
            parts = first.parent.glob(f"{PART.sub('', first.stem)}*.gguf")
            files = [folder / "config.json", *sorted(parts)]
            return weights.name_of_files(files, what)
        return weights.name_of(folder, what)
    except SpecError:
        return ""  # only the engine knows the format of the weights


def settings_of(
    replica: str,
    spec: ModelSpec,
    facts: Generation | None,
    device: str = "cpu",
    gpus: tuple[int, ...] = (),
) -> EngineSettings:
    """Return the settings of a replica's engine; ``facts`` None: for an encoder."""
    generation, path = spec.generation or GenerationSpec(), folder_of(spec)
    assert path is not None
    return EngineSettings(
        replica=replica,
        path=str(Path(path).expanduser()),
        vocabulary=0 if facts is None else facts.vocabulary,
        end_tokens=() if facts is None else facts.end_tokens,
        args=spec.engine_args,
        python=os.path.expanduser(spec.engine_python or ""),
        device=device,
        gpus=gpus,
        adapters=spec.adapters,
        cpus=spec.stages[0].cpus,
        memory_mb=spec.stages[0].memory_mb,
        gpu_memory_share=_share_of_gpus(spec, gpus),
        max_model_len=generation.max_model_len,
        longest=generation.max_model_len or (facts.max_tokens if facts else 0),
        max_num_seqs=generation.max_num_seqs,
        dtype=generation.dtype,
        exact=spec.exact,
        hung_s=spec.stages[0].compute_s or HUNG_S,
    )


def _share_of_gpus(spec: ModelSpec, gpus: tuple[int, ...]) -> float | None:
    """Return the share of its GPUs' memory that a replica has booked."""
    booked_mb = spec.stages[0].gpu_memory_mb
    if booked_mb is None:
        return None
    found = [gpu.memory_bytes for gpu in inventory.gpus(inventory.visible_gpus())]
    sizes = [found[gpu] for gpu in gpus if gpu < len(found)]
    return min(1.0, booked_mb * MIB / min(sizes)) if sizes else None
