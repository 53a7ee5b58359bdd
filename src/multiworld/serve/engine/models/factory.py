"""The model factory: builds a model and its stages from a spec."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multiworld.errors import MultiWorldError, SpecError
from multiworld.serve.engine.models import hub, identity, imported_sources
from multiworld.serve.engine.models.modules import Module, cut_module
from multiworld.serve.spec.schema import AppSpec, ModelSpec
from multiworld.serve.spec.stage import Model, Stage

HUGGINGFACE = (
    # The factory of models with a ``path``.
    "multiworld.serve.engine.models.huggingface:model"
)
# The factory of models that generate text.
DECODER = "multiworld.serve.engine.models.decoder:model"

# The factory of models that a whole engine computes.
ENGINE = "multiworld.serve.engine.external.whole_model:model"

# The fields of a model's spec that are part of its identity, besides files and code.
SETTINGS = {
    "factory",
    "options",
    "generation",
    "engine",
    "engine_args",
    "adapters",
    "embeddings",
    "exact",
    "cut",
}


def build_model(spec: ModelSpec) -> Model:
    count = len(spec.stages)
    factory = _factory_of(spec)
    function = import_factory(factory)
    _check_version(spec)
    if spec.engine is not None:
        model: Model = function(folder_of(spec), spec)
        _check_limits(model, spec)
        return model
    # The factory gets ``options``, and each of these arguments for which it has a
    # parameter.
    offered: dict[str, Any] = {
        "path": folder_of(spec),
        "stages": count,
        "cut": spec.cut,
    }
    if spec.generation is not None:
        for name in ("dtype", "deterministic", "quantization", "generation_config"):
            offered[name] = getattr(spec.generation, name)
    taken = {k: v for k, v in offered.items() if v is not None and _takes(function, k)}
    if offered.get("quantization") and "quantization" not in taken:
        raise SpecError(
            f"factory {factory!r} has no parameter 'quantization'; quantize the "
            "weights in the factory, or remove `quantization:` from the spec"
        )
    if offered.get("dtype") and "dtype" not in taken:
        raise SpecError(
            f"factory {factory!r} has no parameter 'dtype'; choose the dtype in the "
            "factory, or remove `dtype:` from the spec"
        )
    made = _call_factory(function, factory, {**taken, **spec.options})
    if isinstance(made, Module):
        made = cut_module(made, count, spec.cut)
    elif spec.cut is not None and "cut" not in taken:
        raise SpecError(
            f"factory {factory!r} returns stages and has no parameter 'cut', so `cut:` "
            "has no effect; add the parameter, or remove `cut:` from the spec"
        )
    model = _as_model(made, factory)
    if (model.generation is None) != (spec.generation is None):
        raise SpecError(
            f"factory {factory!r} returned a model that generates "
            + (
                "text; add `generation: {}`"
                if model.generation
                else "no text; remove `generation:`"
            )
        )
    if len(model.stages) != count:
        names = ", ".join(s.name or str(n) for n, s in enumerate(model.stages))
        raise SpecError(
            f"the model has {len(model.stages)} stages ({names}), but `stages:` in the "
            f"spec has {count}; list every stage there"
        )
    _check_limits(model, spec)
    return model


def takes_dtype(spec: ModelSpec) -> bool:
    """Return whether a model's factory can be asked for a dtype."""
    return spec.engine is not None or _takes(import_factory(_factory_of(spec)), "dtype")


def _check_version(spec: ModelSpec) -> None:
    """Raise SpecError unless code and files match the spec's version."""
    if spec.identity is None:
        return
    path = imported_sources.changed(spec.identity.code)
    path = path or identity.changed_beside(spec.identity)
    if path:
        raise SpecError(identity.refusal(path))


def _check_limits(model: Model, spec: ModelSpec) -> None:
    """Raise SpecError if sequences may be longer than the model supports."""
    if model.generation is None or spec.generation is None:
        return
    asked, maximum = spec.generation.max_model_len, model.generation.max_tokens
    if asked is not None and asked > maximum:
        raise SpecError(
            f"`max_model_len: {asked}` exceeds the model's maximum, {maximum} tokens; "
            "lower it"
        )


def fetch(app: AppSpec) -> None:
    """Fetch all models on the Hugging Face Hub before a service's processes start."""
    for spec in app.models.values():
        folder_of(spec)


def folder_of(spec: ModelSpec) -> str | None:
    """Return the folder of a model given by ``path``; fetch it if needed."""
    if spec.path is None:
        return None
    folder = hub.folder_of(spec.path, spec.revision)
    if spec.identity is None:
        return folder
    return identity.usable_folder(spec.identity, str(Path(folder).expanduser()))


def identified(spec: ModelSpec, copies: Path | None) -> ModelSpec:
    """Return a version's spec with its identity, computed from the current files."""
    bare = spec.model_copy(update={"identity": None})
    folder = folder_of(bare)
    own = [spec.factory, spec.engine]
    settings = bare.model_dump(mode="json", include=SETTINGS)
    made = identity.identity_of(
        None if folder is None else str(Path(folder).expanduser()),
        _files_beside(bare),
        imported_sources.digests(filter(None, own)),
        [settings, len(spec.stages)],
        copies,
    )
    return spec.model_copy(update={"identity": made})


def changed_since(spec: ModelSpec) -> str:
    """Return a file that has changed since a version was made; empty: none has."""
    assert spec.identity is not None
    if path := imported_sources.changed(spec.identity.code):
        return path
    bare = spec.model_copy(update={"identity": None})
    folder = folder_of(bare)
    found = (
        ""
        if folder is None
        else identity.difference(spec.identity, Path(folder).expanduser())
    )
    return found or identity.changed_beside(spec.identity)


def _files_beside(spec: ModelSpec) -> dict[str, Path]:
    """Return files outside the folder: of adapters, arguments and the factory."""
    given = [*spec.adapters.values(), *spec.engine_args.values()]
    if spec.path is None:
        given += build_model(spec).files
    places = [Path(text).expanduser() for text in given if isinstance(text, str)]
    found: dict[str, Path] = {}
    for place in places:
        with contextlib.suppress(OSError, ValueError):
            files = [place]
            if place.is_dir():
                files = [*place.glob("adapter_*"), *place.glob("*.safetensors*")]
            found.update((str(f.resolve()), f) for f in files if f.is_file())
    return found


def modules_of(spec: ModelSpec, model: Model) -> list[str]:
    """Return the modules that replicas need, for the fork server to import."""
    adapter, colon, _ = (spec.engine or "").partition(":")
    own = [adapter] if colon else []
    return [_factory_of(spec).partition(":")[0], *own, *model.preload]


def _factory_of(spec: ModelSpec) -> str:
    if spec.engine is not None:
        return ENGINE
    default = HUGGINGFACE if spec.generation is None else DECODER
    return spec.factory or default


def stage_name(spec: ModelSpec, model: Model, number: int) -> str:
    return spec.stages[number].name or model.stages[number].name or str(number)


def import_factory(factory: str) -> Callable[..., Any]:
    """Import a function by its name, ``package.module:function``."""
    module, _, name = factory.partition(":")
    try:
        imported = importlib.import_module(module)
        found: Callable[..., Any] = getattr(imported, name)
        imported_sources.note(imported)
    except Exception as error:
        # Importing runs the user's code, which may raise anything.
        raise SpecError(
            f"factory {factory!r} cannot be imported: {error}; give "
            "package.module:function, importable from where the service is started"
        ) from error
    if not callable(found):
        raise SpecError(
            f"factory {factory!r} is not a function; give the name of a function"
        )
    return found


def import_new(app: AppSpec, known: Mapping[str, Mapping[str, ModelSpec]]) -> None:
    """Build versions that are not ``known``, and import all policies."""
    # Ignore errors here: they are reported where the code is used.
    for name, spec in app.models.items():
        if spec.version not in known.get(name, {}):
            with contextlib.suppress(Exception):
                build_model(spec)
    for policy in _policies_of(app):
        with contextlib.suppress(Exception):
            import_factory(policy)


def check_policies(app: AppSpec) -> None:
    for policy in _policies_of(app):
        import_factory(policy)


def _policies_of(app: AppSpec) -> list[str]:
    policies = [app.placement, *(spec.scaling for spec in app.models.values())]
    return [policy for policy in policies if policy is not None]


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _call_factory(
    function: Callable[..., Any], factory: str, options: Mapping[str, Any]
) -> Any:
    try:
        return function(**options)
    except MultiWorldError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise SpecError(
            f"factory {factory!r} failed with {dict(options)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _as_model(made: Any, factory: str) -> Model:
    model = made if isinstance(made, Model) else Model(stages=_as_stages(made, factory))
    if not model.stages:
        raise SpecError(f"factory {factory!r} returned no stage; return at least one")
    return model


def _as_stages(made: Any, factory: str) -> list[Stage]:
    if not isinstance(made, Sequence):
        raise SpecError(
            f"factory {factory!r} returned a {type(made).__name__}; return a "
            "multiworld.serve.Module, a multiworld.serve.Model or a list of stages"
        )
    return [_as_stage(one, factory) for one in made]


def _as_stage(made: Any, factory: str) -> Stage:
    if isinstance(made, Stage):
        return made
    if not callable(made):
        raise SpecError(
            f"factory {factory!r} returned a stage that cannot be called; return "
            "functions or multiworld.serve.Stage objects"
        )
    return Stage(load=lambda context: made, name=getattr(made, "__name__", ""))
