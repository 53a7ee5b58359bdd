"""Models with an engine: fields that stand at the model, and what is refused."""

from __future__ import annotations

import pytest

from multiworld.errors import ServeError, SpecError
from multiworld.serve.controller.fleet.desired_state import (
    check_update,
    desired_state_of,
)
from multiworld.serve.spec.loader import parse_spec
from multiworld.serve.spec.schema import ENGINE_START_S, AppSpec, ModelSpec

GOOD = """\
app: demo
models:
  m:
    path: /folder
    engine: vllm
    engine_args:
      tensor_parallel_size: 2
    engine_python: /other/bin/python
    replicas: 2
    device: cuda
    cpus: 3
    memory_mb: 1000
    gpu_memory_mb: 2000
    compute_s: 12
    nodes: [a*]
"""
PLAIN = GOOD[: GOOD.index("    engine:")]


def model_of(text: str) -> ModelSpec:
    return parse_spec(text).models["m"]


def test_fields_of_a_stage_at_the_model_are_those_of_its_only_stage() -> None:
    model = model_of(GOOD)
    (stage,) = model.stages
    assert (stage.replicas, stage.device, stage.cpus) == (2, "cuda", 3)
    assert (stage.memory_mb, stage.gpu_memory_mb) == (1000, 2000)
    assert (stage.compute_s, stage.nodes) == (12, ["a*"])
    assert (model.replicas, model.device, model.nodes) == (None, None, None)
    assert model.engine_args == {"tensor_parallel_size": 2}


@pytest.mark.parametrize(("given", "count"), [("", 2), ("    replicas: 3\n", 3)])
def test_each_server_of_somebody_else_has_a_replica(given: str, count: int) -> None:
    """By default, each URL of an external server has one replica."""
    args = "    engine_args: {urls: ['http://a', 'http://b']}\n    exact: false\n"
    model = model_of(PLAIN + "    engine: openai\n" + args + given)
    assert model.stages[0].replicas == count
    again = type(model).model_validate(model.model_dump(mode="json"))
    assert again == model


def test_engine_alone_is_enough() -> None:
    model = model_of(PLAIN + "    engine: my.adapters:make\n")
    (stage,) = model.stages
    assert (stage.initial_count, stage.device, stage.nodes) == (1, "cpu", [])
    assert model.generation is not None
    assert model.start_s == ENGINE_START_S


@pytest.mark.parametrize(
    ("count", "first"),
    [
        ("replicas: {min_replicas: 2, max_replicas: 3}", 2),
        ("autoscaling_config: {min_replicas: 0, max_replicas: 3}", 0),
    ],
)
def test_number_of_replicas_may_be_a_range(count: str, first: int) -> None:
    (stage,) = model_of(GOOD.replace("replicas: 2", count)).stages
    assert stage.initial_count == first


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("engine: vllm", "engine: vllm\n    engine: vllm", 6, "engine is given twice"),
        ("replicas: 2", "replicas: 2\n    replicas: 2", 10, "replicas is given twice"),
        ("engine: vllm", "engine: a b", 5, "write vllm, llama.cpp, openai"),
        ("replicas: 2", "stages: [{}]", 3, "an engine has no stages"),
        ("nodes:", "stages: [{}, {}]\n    nodes:", 3, "an engine has no stages"),
        ("nodes:", "stages: []\n    nodes:", 3, "an engine has no stages"),
        ("nodes:", "stages: 3\n    nodes:", 3, "an engine has no stages"),
        ("nodes:", "stages: null\n    nodes:", 3, "an engine has no stages"),
        ("nodes:", "autoscaling_config: {max_replicas: 2}\n    nodes:", 3, "not both"),
        ("device: cuda", "device: cpu", 3, "add `device: cuda`"),
        ("device: cuda", "device: tpu", 10, "models.m.device is 'tpu'"),
        ("replicas: 2", "replicas: 0", 9, "models.m.replicas: input should be greater"),
        ("replicas: 2", "replicas: {max: 2}", 9, "did you mean max_replicas?"),
        ("replicas: 2", "threads: 2", 9, "models.m.threads is unknown"),
        ("engine: vllm", "engine: openai", 3, "remove engine_python"),
        ("engine: vllm", "engine: llama.cpp", 3, "llama.cpp needs generation"),
        ("nodes:", "exact: false\n    nodes:", 3, "exact: false has an effect"),
        ("path: /folder", "factory: a.b:c", 3, "an engine needs a path"),
        ("nodes:", "options: {a: 1}\n    nodes:", 3, "an engine needs a path"),
        ("nodes:", "cut: [1]\n    nodes:", 3, "no factory, options, cut or profile"),
        ("nodes:", "profile: x\n    nodes:", 3, "no factory, options, cut or profile"),
        ("nodes:", "start_s: 0\n    nodes:", 15, "greater than 0"),
    ],
)
def test_mistake_is_reported_where_it_is_written(
    old: str, new: str, line: int, words: str
) -> None:
    text = GOOD.replace(old, new)
    assert text != GOOD
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    assert any(
        problem.startswith(f"line {line}:") and words in problem
        for problem in caught.value.problems
    ), caught.value.problems


@pytest.mark.parametrize(
    "field",
    [
        "engine_args: {a: 1}",
        "engine_python: /bin/python",
        "exact: false",
        "replicas: 2",
        "autoscaling_config: {max_replicas: 2}",
        "device: cpu",
        "cpus: 1",
        "memory_mb: 1",
        "gpu_memory_mb: 1",
        "compute_s: 1",
        "nodes: [a]",
    ],
)
def test_fields_of_an_engine_need_one(field: str) -> None:
    """A model with stages sets them at its stages."""
    text = f"{PLAIN}    stages: [{{}}]\n"
    assert model_of(text).engine is None
    name = field.partition(":")[0]
    with pytest.raises(SpecError, match=f"m: {name}.* engine"):
        parse_spec(f"{text}    {field}\n")


@pytest.mark.parametrize(
    "field",
    [
        "max_num_batched_tokens: 8",
        "block_size: 8",
        "kv_cache_memory_mb: 8",
        "backup_memory_mb: 8",
        "enable_prefix_caching: false",
        "prefix_cache_memory_mb: 8",
        "quantization: int8",
        "deterministic: true",
    ],
)
def test_setting_of_generation_without_effect_is_refused_by_name(field: str) -> None:
    """The user would think that the engine follows it."""
    name = field.partition(":")[0]
    with pytest.raises(SpecError, match=f"generation: {name} has no effect"):
        parse_spec(f"{GOOD}    generation: {{{field}}}\n")


def test_settings_of_generation_that_the_service_follows_are_allowed() -> None:
    """Defaults that are written out are allowed, too."""
    text = """\
    generation:
      max_model_len: 100
      max_num_seqs: 5
      dtype: bfloat16
      generation_config: none
      control_tokens_in_messages: true
      tool_call_parser: hermes
      ttft_ms: 100
      tpot_ms: 10
      first_token_s: 5
      between_tokens_s: 2
      block_size: 16
"""
    generation = model_of(GOOD + text).generation
    assert generation is not None
    assert (generation.max_num_seqs, generation.ttft_ms) == (5, 100)


@pytest.mark.parametrize("more", ["", "    start_s: 7\n", "    generation: null\n"])
def test_spec_survives_json(more: str) -> None:
    """Replicas receive the spec as JSON, with the stage written out."""
    spec = parse_spec(GOOD + more)
    again = AppSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert AppSpec.model_validate_json(again.model_dump_json()) == spec
    model = ModelSpec.model_validate_json(spec.models["m"].model_dump_json())
    assert model == spec.models["m"]


def test_copy_for_a_tenant_has_the_engine() -> None:
    spec = parse_spec(GOOD + "    dedicated: [t]\n")
    copy, model = spec.models["m@t"], spec.models["m"]
    assert copy.engine == "vllm"
    assert copy.stages == model.stages
    assert copy.start_s == model.start_s


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (GOOD, ENGINE_START_S),
        (GOOD + "    start_s: 7\n", 7.0),
        (GOOD + "    start_s: null\n", ENGINE_START_S),
        (PLAIN + "    stages: [{}]\n", None),
        (PLAIN + "    stages: [{}]\n    start_s: 7\n", 7.0),
    ],
)
def test_limit_to_become_ready_is_that_of_the_model(
    text: str, limit: float | None
) -> None:
    """None means the limit of the service."""
    spec = parse_spec(text)
    found = desired_state_of(spec).models["m"]
    assert found.start_s == spec.models["m"].start_s == limit


def test_limit_and_replicas_can_change_without_a_new_version() -> None:
    old = parse_spec(GOOD)
    specs = {"m": {old.models["m"].version: old.models["m"]}}
    for more in (GOOD + "    start_s: 7\n", GOOD.replace("replicas: 2", "replicas: 3")):
        check_update(old, parse_spec(more), specs)
    for changed in (
        GOOD.replace("tensor_parallel_size: 2", "tensor_parallel_size: 4"),
        GOOD.replace("/other/bin/python", "/bin/python"),
        GOOD.replace("engine: vllm", "engine: a.b:make"),
    ):
        with pytest.raises(ServeError, match="give it a new version"):
            check_update(old, parse_spec(changed), specs)
