"""Arguments of engines, which become flags or are refused when the spec is read."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from multiworld.errors import SpecError
from multiworld.serve.engine.external import vllm
from multiworld.serve.engine.external.engine_args import (
    flags_of,
    gpu_environment,
    refuse_reserved,
)
from multiworld.serve.engine.external.vllm import (
    VllmEngine,
    has_argument,
    lora_arguments,
    memory_arguments,
)
from multiworld.serve.engine.external.whole_engine import (
    EngineLostError,
    EngineSettings,
    Run,
    WholeEngine,
)
from multiworld.serve.engine.models.factory import build_model, modules_of
from multiworld.serve.spec.schema import AppSpec, ModelSpec
from multiworld.serve.wire.generation_messages import Sampling
from tests.tiny_decoder import VOCABULARY, save_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_decoder(tmp_path_factory.mktemp("decoder")))


def test_values_become_flags() -> None:
    args = {
        "max_model_len": 5,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "dtype": None,
        "lora_modules": ["a=/a", "b=/b"],
        "override_generation_config": {"top_k": 3},
    }
    assert flags_of(args) == [
        *("--max-model-len", "5"),
        "--enforce-eager",
        "--no-enable-prefix-caching",
        *("--lora-modules", "a=/a", "b=/b"),
        *("--override-generation-config", '{"top_k": 3}'),
    ]


@pytest.mark.parametrize(
    ("text", "has_it"),
    [("enable_scale_out: bool", True), ("tokens_only: bool", False), (None, True)],
)
def test_argument_is_looked_up_in_the_release_of_vllm(
    text: str | None, has_it: bool, tmp_path: Path
) -> None:
    """An older release would refuse it; without a source, a new one is assumed."""
    if text is not None:
        place = tmp_path / "lib/python3.11/site-packages/vllm/entrypoints/openai"
        place.mkdir(parents=True)
        (place / "cli_args.py").write_text(text)
    python = str(tmp_path / "bin" / "python")
    assert has_argument(python, "enable_scale_out") is has_it


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("max-model-len", "generation: max_model_len"), ("port", "remove it")],
)
def test_arguments_that_the_service_sets_are_refused(
    name: str, remedy: str, folder: str
) -> None:
    spec = ModelSpec.model_validate(
        {"path": folder, "engine": "vllm", "engine_args": {name: 5}}
    )
    with pytest.raises(SpecError, match=name) as caught:
        build_model(spec)
    assert remedy in str(caught.value)


def test_engine_that_is_not_known_is_refused(folder: str) -> None:
    spec = ModelSpec.model_validate({"path": folder, "engine": "vlm"})
    with pytest.raises(SpecError, match="vllm"):
        build_model(spec)


def test_model_has_the_facts_of_its_folder(folder: str) -> None:
    data = {"path": folder, "engine": "vllm"}
    facts = build_model(ModelSpec.model_validate(data)).generation
    args = {**data, "engine_args": {"enforce_eager": True}}
    other = build_model(ModelSpec.model_validate(args)).generation
    assert facts is not None
    assert other is not None
    assert facts.vocabulary == VOCABULARY
    assert facts.tokenizer().fast.get_vocab_size() <= VOCABULARY
    assert facts.weights() == facts.weights() != other.weights()


@pytest.mark.parametrize(
    ("engine", "args", "text"),
    [
        ("llama.cpp", {}, "GGUF file"),
        ("llama.cpp", {"model": "/nowhere.gguf"}, "no file /nowhere.gguf"),
        ("llama.cpp", {"ctx-size": 5}, "generation: max_model_len"),
        ("openai", {}, "urls"),
        ("openai", {"urls": []}, "at least one"),
        ("openai", {"urls": ["localhost:80"]}, "not an http"),
        ("openai", {"urls": ["http://a"], "temperature": 1}, "temperature"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(
    engine: str, args: dict[str, object], text: str, folder: str
) -> None:
    data = {"path": folder, "engine": engine, "engine_args": args}
    spec = ModelSpec.model_validate({**data, "generation": {"max_model_len": 64}})
    with pytest.raises(SpecError, match=text):
        build_model(spec)


@pytest.mark.parametrize(
    ("gpus", "visible", "names"),
    [
        ((), None, ""),
        ((1,), None, "1"),
        ((0, 2), None, "0,2"),
        ((0, 2), ["5", "6", "7"], "5,7"),
        ((1,), ["GPU-a", "GPU-b"], "GPU-b"),
    ],
)
def test_engine_sees_the_gpus_of_its_replica_only(
    gpus: tuple[int, ...], visible: list[str] | None, names: str
) -> None:
    """Indexes count the GPUs that the replica sees."""
    settings = EngineSettings(replica="r", path="", vocabulary=1, gpus=gpus)
    found = gpu_environment(settings, visible)
    assert found["CUDA_VISIBLE_DEVICES"] == names
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


async def test_vllm_gets_the_booked_gpus_and_their_memory(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    seen = tmp_path / "seen.json"
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "names = 'CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS'\n"
        "variables = [os.environ[name] for name in names]\n"
        f"open({str(seen)!r}, 'w').write(json.dumps([*variables, *sys.argv]))\n"
    )
    python.chmod(0o700)
    engine = VllmEngine(
        EngineSettings(
            replica="m/0/1",
            path=folder,
            vocabulary=VOCABULARY,
            python=str(python),
            args={"tensor_parallel_size": 2},
            device="cuda:1",
            gpus=(1, 2),
            gpu_memory_share=0.25,
            cpus=3.5,
        )
    )
    with pytest.raises(EngineLostError):
        await engine.start()
    gpus, threads, *argv = json.loads(seen.read_text())
    assert (gpus, threads) == ("5,6", "3")
    flags = dict(itertools.pairwise(argv))
    assert flags["--gpu-memory-utilization"] == "0.25"
    assert flags["--tensor-parallel-size"] == "2"


@pytest.mark.parametrize(
    ("more", "variable", "wanted"),
    [
        ({}, "", {"kv_cache_memory_bytes": 4 * 2**30}),
        ({"memory_mb": 8000.0}, "", {"gpu_memory_utilization": 0.6}),
        # Its other processes need the rest, however small it is.
        ({"memory_mb": 4000.0}, "", {"gpu_memory_utilization": 0.23}),
        ({"memory_mb": 1000.0}, "", {"gpu_memory_utilization": 0.025}),
        ({"memory_mb": 4000.0}, "2", {}),
        ({"args": {"gpu-memory-utilization": 0.5}}, "", {}),
        ({"args": {"kv_cache_memory_bytes": 5}, "memory_mb": 9.0}, "", {}),
        ({"device": "cuda:0"}, "", {"gpu_memory_utilization": None}),
        (
            {
                "device": "cuda:0",
                "gpu_memory_share": 0.5,
                "args": {"kv_cache_memory_bytes": 5},
            },
            "",
            {"gpu_memory_utilization": 0.5},  # vLLM requires this much free in any case
        ),
    ],
)
def test_replicas_of_vllm_on_cpus_leave_memory_to_others(
    more: dict[str, Any],
    variable: str,
    wanted: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default, a replica would take nearly all memory of the machine."""
    monkeypatch.setattr(vllm, "numa_node_bytes", lambda: 10_000 * 2**20)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", variable)
    settings = EngineSettings(replica="m/0/1", path="/m", vocabulary=9, **more)
    assert memory_arguments(settings) == wanted


@pytest.mark.parametrize(
    ("engine", "adapters", "text"),
    [
        ("vllm", {"a": "/nowhere"}, "adapter_config.json"),
        ("vllm", {"a": "{tmp}/unranked"}, "no rank"),
        ("vllm", {"a": "{tmp}/huge"}, "a rank of 4096"),
        ("llama.cpp", {"a": "/nowhere.gguf"}, "no file /nowhere.gguf"),
        (
            "tests.unit.serve.engine.external.test_engine_args:Plain",
            {"a": "b"},
            "no",
        ),
    ],
)
def test_adapters_that_cannot_be_used_are_refused(
    engine: str, adapters: dict[str, str], text: str, folder: str, tmp_path: Path
) -> None:
    for name, config in (("unranked", "{}"), ("huge", '{"r": 4096}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(config)
    (tmp_path / "w.gguf").touch()
    args = {"model": str(tmp_path / "w.gguf")} if engine == "llama.cpp" else {}
    paths = {name: path.format(tmp=tmp_path) for name, path in adapters.items()}
    data = {"path": folder, "engine": engine, "engine_args": args, "adapters": paths}
    spec = ModelSpec.model_validate({**data, "generation": {"max_model_len": 64}})
    with pytest.raises(SpecError, match=text):
        build_model(spec)


class Plain(WholeEngine):
    """An adapter of an engine without LoRA adapters."""

    usage, phase = 0.0, ""

    def __init__(self, settings: EngineSettings) -> None:
        pass


class CheckAwaited(Plain):
    """An adapter whose check would never be awaited."""

    async def check(self, sampling: Sampling) -> None:  # type: ignore[override]
        pass


class TokensReturned(Plain):
    """An adapter that returns tokens instead of yielding them."""

    async def generate(self, run: Run) -> Any:  # type: ignore[override]
        pass


def nothing(settings: EngineSettings) -> None:
    """Forget to return the adapter."""


async def awaited(settings: EngineSettings) -> None:
    pass


def without_phase(settings: EngineSettings) -> Any:
    found: Any = SimpleNamespace(**dict.fromkeys(METHODS, print))
    found.usage = 0.0
    return found


METHODS = "start", "check", "generate", "wait_lost", "stopped_s", "close", "kill"


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        ("nothing", "is a NoneType without the method start"),
        ("awaited", "is a coroutine without the method start"),
        ("without_phase", "has no attribute phase"),
        ("CheckAwaited", "has an `async def check`$"),
        ("TokensReturned", "has an `async def generate` without a yield"),
    ],
)
def test_invalid_adapter_of_an_engine_is_refused(
    make: str, text: str, folder: str
) -> None:
    """The spec is refused, instead of replicas that die one after another."""
    engine = f"tests.unit.serve.engine.external.test_engine_args:{make}"
    spec = ModelSpec.model_validate({"path": folder, "engine": engine})
    with pytest.raises(SpecError, match=text):
        build_model(spec)


def test_module_of_an_adapter_is_imported_once_for_all_replicas(folder: str) -> None:
    """Code that changes meanwhile must not change a stream."""
    engine = "tests.unit.serve.engine.external.test_engine_args:Plain"
    spec = ModelSpec.model_validate({"path": folder, "engine": engine})
    assert engine.partition(":")[0] in modules_of(spec, build_model(spec))


def test_adapter_that_changes_changes_the_name_of_the_weights(
    folder: str, tmp_path: Path
) -> None:
    """A stream must not continue with another adapter."""
    config = tmp_path / "adapter_config.json"
    config.write_text('{"r": 8}')
    data = {"path": folder, "engine": "vllm", "adapters": {"a": str(tmp_path)}}
    names = []
    for text in ('{"r": 8}', '{"r": 16}'):
        config.write_text(text)
        facts = build_model(ModelSpec.model_validate(data)).generation
        assert facts is not None
        names.append(facts.weights())
    assert names[0] != names[1]


@pytest.mark.parametrize("name", ["m", "b"])
def test_name_of_an_adapter_is_its_own(name: str) -> None:
    models = {
        "m": {"path": "p", "engine": "vllm", "adapters": {name: "x"}},
        "n": {"path": "p", "engine": "vllm", "adapters": {"b": "y"}},
    }
    if name == "m":
        del models["n"]
    with pytest.raises(ValidationError, match="two models or adapters"):
        AppSpec.model_validate({"models": models})


def test_adapters_are_passed_to_vllm(tmp_path: Path) -> None:
    """On CPUs, one adapter slot stays empty, because vLLM misuses the last one."""
    for name, rank in (("a", 12), ("b", 4)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    adapters = {name: str(tmp_path / name) for name in "ab"}
    assert lora_arguments(adapters, is_cpu=False)["max_loras"] == 2
    found = lora_arguments(adapters, is_cpu=True)
    assert found["max_loras"] == 3
    assert found["max_lora_rank"] == 16
    assert found["lora_modules"] == [f"a={tmp_path}/a", f"b={tmp_path}/b"]


@pytest.mark.parametrize("name", ["served_model_name", "ssl-keyfile", "root_path"])
def test_arguments_that_put_a_server_elsewhere_are_refused(name: str) -> None:
    """The service would not find the server, or its model."""
    with pytest.raises(SpecError, match=f"{name} is decided by the service"):
        refuse_reserved({name: "x"}, {})
