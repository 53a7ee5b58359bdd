"""Specs that ``multiworld serve MODEL`` stands for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import CliRunner

from multiworld.cli.main import cli
from multiworld.cli.model_spec import (
    BASE_BYTES,
    KV_BYTES,
    ModelOptions,
    curl_of,
    found,
    has_chat_template,
    is_model,
    name_of,
    replicas_that_fit,
    text_of,
    warnings_of,
)
from multiworld.cli.serve import store_key
from multiworld.errors import SpecError
from multiworld.serve.controller.fleet.record import StateFolder
from multiworld.serve.machines.amounts import Gpu, Node
from multiworld.serve.spec.loader import parse_spec
from multiworld.serve.spec.schema import AppSpec
from multiworld.serve.tenants.directory import Key, Tenant, TenantDirectory
from multiworld.serve.tenants.keys import known_as, make_key
from multiworld.serve.tenants.registry import open_registry
from tests.tiny_decoder import save_decoder

GIB = 2**30


def machine_of(memory_bytes: int = 64 * GIB, cpus: float = 8.0, gpus: int = 0) -> Node:
    found = tuple(Gpu(index, "l4", 24 * GIB) for index in range(gpus))
    return Node("here", cpus, memory_bytes, found)


LARGE = machine_of()


def spec_of(options: ModelOptions, machine: Node = LARGE) -> AppSpec:
    return parse_spec(text_of("/models/My Model.v2", None, options, GIB, machine))


def test_spec_has_what_was_asked() -> None:
    options = ModelOptions(
        name="chat",
        host="0.0.0.0",
        port=9000,
        max_model_len=512,
        max_num_seqs=4,
        dtype="float32",
        quantization="int8",
        stages=3,
        replicas=2,
    )
    app = spec_of(options)
    model = app.models["chat"]
    generation = model.generation
    assert generation is not None
    assert (generation.max_model_len, generation.max_num_seqs) == (512, 4)
    assert (generation.dtype, generation.quantization) == ("float32", "int8")
    assert [stage.replicas for stage in model.stages] == [2, 2, 2]
    assert [stage.threads for stage in model.stages] == [1, 1, 1]
    assert (app.gateway.host, app.gateway.port) == ("0.0.0.0", 9000)
    assert (app.app, model.path) == ("chat", "/models/My Model.v2")


def test_defaults_fit_the_machine() -> None:
    (stage,) = spec_of(ModelOptions()).models["my-model.v2"].stages
    assert (stage.replicas, stage.threads) == (2, 4)
    need = GIB + KV_BYTES + BASE_BYTES
    count, why = replicas_that_fit(GIB, machine_of(int(1.9 * need / 0.8), 2.0))
    assert count == 1
    assert "one replica only" in why
    assert replicas_that_fit(GIB, machine_of(GIB, 2.0))[0] == 1, "the start will tell"


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_gpus_are_used_where_there_are_any(engine: str | None) -> None:
    options = ModelOptions(engine=engine)
    for gpus, replicas in ((1, 1), (2, 2), (8, 2)):
        app = spec_of(options, machine_of(gpus=gpus))
        ((model,),) = (app.models.values(),)
        assert [s.device for s in model.stages] == ["cuda"]
        assert model.stages[0].replicas == replicas


def test_quantized_model_is_for_cpus_though_there_are_gpus() -> None:
    app = spec_of(ModelOptions(quantization="int8"), machine_of(gpus=1))
    (model,) = app.models.values()
    assert [stage.device for stage in model.stages] == ["cpu"]


def test_engine_without_a_name_is_not_our_own() -> None:
    """A variable of a script may be empty."""
    with pytest.raises(SpecError, match="engine"):
        spec_of(ModelOptions(engine=""), LARGE)


def test_long_name_ends_with_a_letter() -> None:
    path = "/m/" + "a" * 63 + "-b"
    assert name_of(path) == "a" * 63
    parse_spec(text_of(path, None, ModelOptions(), GIB, LARGE))


def test_one_gpu_is_not_for_two_stages() -> None:
    app = spec_of(ModelOptions(stages=2), machine_of(gpus=1))
    (model,) = app.models.values()
    assert [s.device for s in model.stages] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (["--api-key", "short"], True),
        (["--api-key", "sk-with a space in it"], True),
        (["--api-key", "sk-schlüssel-schlüssel"], True),
        (["--api-key", "sk-0123456789-abc\n"], False),
    ],
)
def test_keys_that_cannot_be_sent_are_refused(
    words: list[str], is_refused: bool, tmp_path: Path
) -> None:
    folder = save_decoder(tmp_path / "Tiny")
    asked = ["serve", str(folder), "--print-spec", *words]
    found = CliRunner().invoke(cli, asked)
    assert ("printable ASCII" in found.output) is is_refused, found.output


def test_key_of_the_environment_is_the_clients_for_a_spec(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("models: {}")
    words = ["serve", str(tmp_path / "app.yaml"), "--port", "1"]
    env = {"MULTIWORLD_API_KEY": "sk-0123456789-abc"}
    found = CliRunner().invoke(cli, words, env=env)
    assert "--api-key" not in found.output
    assert "--port needs a model" in " ".join(found.output.split())


@pytest.mark.parametrize(
    ("options", "machine", "words"),
    [
        (ModelOptions(replicas=2), LARGE, []),
        (ModelOptions(), machine_of(GIB, 1.0), []),
        (ModelOptions(replicas=8, stages=2), LARGE, ["16 processes"]),
        (ModelOptions(replicas=40), LARGE, ["40 replicas need about", "40 processes"]),
        (ModelOptions(replicas=40), machine_of(gpus=1), []),
    ],
)
def test_more_replicas_than_the_machine_bears_are_warned_of(
    options: ModelOptions, machine: Node, words: list[str]
) -> None:
    found = warnings_of(options, GIB, machine)
    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert text.startswith(word)


def test_used_port_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "Tiny")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["serve", str(folder), "--port", port, "--state", str(tmp_path / "s")]
        found = CliRunner().invoke(cli, words)
    assert "Address already in use" in " ".join(found.output.split())
    assert "starting" not in found.output
    assert not (tmp_path / "s").exists()


def test_running_service_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "s")
    state.make()
    held = state.lock()
    folder = save_decoder(tmp_path / "Tiny")
    words = ["serve", str(folder), "--port", "0", "--state", str(tmp_path / "s")]
    # Another process, because this one's lock would also be seen as free from here.
    command = [sys.executable, "-m", "multiworld", *words]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    os.close(held)
    assert "a controller already runs" in found.stderr
    assert "starting" not in found.stdout


def test_hub_that_does_not_answer_is_replaced_by_what_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "c" * 40
    said: list[str] = []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SpecError, match="neither a file nor a folder"):
        found("some/model", None, said.append)
    kept = tmp_path / "models--some--model"
    save_decoder(kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    assert found("some/model", None, said.append) == ("some/model", commit)
    assert "serving commit cccccccccccc" in said[-1]


def test_engine_gets_no_threads() -> None:
    app = spec_of(ModelOptions(engine="vllm"))
    (model,) = app.models.values()
    assert model.engine == "vllm"
    assert model.stages[0].replicas == 2


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("smollm2", True),
        ("some/model", True),
        ("app.yaml", False),
        ("specs/app.yaml", False),
        ("./x", False),
        ("a/b/c", False),
    ],
)
def test_models_are_distinguished_from_files(text: str, is_one: bool) -> None:
    assert is_model(text) is is_one


def test_names_have_only_what_names_may_have() -> None:
    assert name_of("/x/Qwen2.5 Instruct (4 bit)/") == "qwen2.5-instruct-4-bit"
    assert name_of("///") == "model"


def test_folder_is_served_without_a_spec(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "Tiny")
    assert has_chat_template(folder)
    words = ["serve", str(folder), "--print-spec", "--max-model-len", "64"]
    found = CliRunner().invoke(cli, words)
    assert found.exit_code == 0, found.output
    app = parse_spec(found.stdout)
    assert app.models["tiny"].path == str(folder)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["app.yaml", "--port", "1"], "--port needs a model"),
        (["app.yaml", "--print-spec"], "this option needs a model"),
        (["none.yaml", "--port", "1"], "is neither a file nor a model"),
        (["empty", "--port", "1"], "neither the config.json"),
        (["none.yaml"], "is neither a file nor a model"),
        (["empty"], "neither the config.json"),
        (["Tiny", "--max-model-len", "100000000"], "--max-model-len"),
        (["Tiny", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["cut"], "is not a complete model: "),
        (["list"], "is not a complete model: config.json has no object"),
        (["dangling"], "is not a complete model: "),
        (["Tiny", "--served-model-name", "a b"], "--served-model-name"),
        (
            ["open.yaml", "--api-key", "sk-0123456789-abc"],
            "needs `authentication: keys`",
        ),
    ],
)
def test_mistakes_are_named(words: list[str], text: str, tmp_path: Path) -> None:
    save_decoder(tmp_path / "Tiny")
    (tmp_path / "app.yaml").write_text("models: {}")
    open_spec = text_of("/m", None, ModelOptions(), GIB, LARGE)
    (tmp_path / "open.yaml").write_text(open_spec)
    for name in ("empty", "cut", "list", "dangling"):
        (tmp_path / name).mkdir()
    (tmp_path / "cut" / "config.json").write_text('{"model_type": "lla')
    (tmp_path / "list" / "config.json").write_text("[]")
    (tmp_path / "dangling" / "config.json").write_text("{}")
    (tmp_path / "dangling" / "model.safetensors").symlink_to(tmp_path / "none")
    found = CliRunner().invoke(cli, ["serve", str(tmp_path / words[0]), *words[1:]])
    assert found.exit_code != 0
    assert text in " ".join(found.output.split())


@pytest.mark.parametrize("name", ["on", "no", "null", "true", "41e2"])
def test_names_that_yaml_reads_as_other_values_are_quoted(name: str) -> None:
    app = parse_spec(text_of(name, None, ModelOptions(), GIB, LARGE))
    assert list(app.models) == [name]


def test_key_of_the_command_is_that_of_a_tenant(tmp_path: Path) -> None:
    text, key_id, digest = make_key()
    registry = open_registry(tmp_path)
    own = Key(id=key_id, digest=digest, made_at=0.0)
    registry.save(Tenant(name="owner", keys=(own,), rpm_limit=7))
    registry.close()
    for given in ("sk-the-first-of-two", "sk-the-second-of-two"):
        store_key(tmp_path, given)
    registry = open_registry(tmp_path)
    directory = TenantDirectory()
    directory.put(list(registry.tenants().values()))
    registry.close()
    for key, is_known in (
        (text, True),
        ("sk-the-second-of-two", True),
        ("sk-the-first-of-two", False),
        ("sk-the-third-of-two", False),
    ):
        found = directory.find(*known_as(key), 0.0)
        assert (found is not None) is is_known, key
        assert found is None or found.rpm_limit == 7
    app = spec_of(ModelOptions(has_key=True))
    assert app.gateway.authentication == "keys"


def test_curl_command_has_the_route_of_the_model() -> None:
    command = curl_of("http://localhost:1", "m", is_chat=True)
    assert command.startswith("curl http://localhost:1/v1/chat/completions -H ")
    assert "/v1/completions" in curl_of("http://localhost:1", "m", is_chat=False)
