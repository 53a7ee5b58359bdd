"""``multiworld plan`` for engines with several GPUs a replica."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from multiworld.cli.main import cli
from tests.tiny_decoder import save_decoder

SPEC = """
models:
  small:
    factory: tests.serve.models:model
    stages:
    - {device: cuda, gpu_memory_mb: 20}
    - {}
    - {}
  wide:
    path: FOLDER
    engine: vllm
    engine_args: {tensor_parallel_size: 2}
    device: cuda
    replicas: REPLICAS
    generation: {}
"""
GPUS = [{"index": n, "kind": "L4", "memory_bytes": 2**34} for n in range(5)]
NODE = {"name": "g", "cpus": 8, "memory_bytes": 2**35, "gpus": GPUS}


def planned(folder: Path, replicas: int) -> tuple[int, dict[str, Any]]:
    model, spec, nodes = folder / "model", folder / "app.yaml", folder / "nodes.json"
    save_decoder(model)
    spec.write_text(
        SPEC.replace("FOLDER", str(model)).replace("REPLICAS", str(replicas))
    )
    nodes.write_text(json.dumps([NODE]))
    done = CliRunner().invoke(cli, ["plan", str(spec), "--nodes", str(nodes), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_replicas_with_several_gpus_have_them_for_themselves(tmp_path: Path) -> None:
    """Other replicas go to the GPUs that are left, as when the service starts."""
    code, shown = planned(tmp_path, 2)
    where = {(s["model"], s["stage"]): s["where"] for s in shown["stages"]}
    assert code == 0
    assert where["wide", 0] == {"g/gpu0+1": 1, "g/gpu2+3": 1}
    assert where["small", 0] == {"g/gpu4": 1}
    assert where["small", 1] == {"g/cpu": 1}


def test_more_demand_than_the_replicas_carry_is_no_lack_of_room(tmp_path: Path) -> None:
    """Brackets in a name are no markup."""
    spec = tmp_path / "app.yaml"
    spec.write_text("""
models:
  m:
    factory: tests.serve.models:model
    demand: 200
    stages:
    - {name: "first[/a]", item_ms: 20}
    - {name: "second[embed]", item_ms: 1}
    - {item_ms: 1}
""")
    done = CliRunner().invoke(cli, ["plan", str(spec)])
    assert done.exit_code == 0, done.output
    assert "not all replicas fit" not in done.output
    assert "first[/a]" in done.output
    assert "second[embed]" in done.output
    assert "of 200 rows/s" in done.output


def test_stage_that_is_scaled_to_zero_needs_room_too(tmp_path: Path) -> None:
    """It is started for the first request."""
    spec = tmp_path / "app.yaml"
    spec.write_text("""
models:
  m:
    factory: tests.serve.models:model
    stages:
    - {memory_mb: 100000000, autoscaling_config: {min_replicas: 0, max_replicas: 1}}
    - {autoscaling_config: {min_replicas: 0, max_replicas: 1}}
    - {autoscaling_config: {min_replicas: 0, max_replicas: 1}}
""")
    done = CliRunner().invoke(cli, ["plan", str(spec)])
    assert done.exit_code == 1, done.output
    assert "not all replicas fit" in done.output


@pytest.mark.parametrize("replicas", [3, 4])
def test_too_many_replicas_with_several_gpus(tmp_path: Path, replicas: int) -> None:
    code, shown = planned(tmp_path, replicas)
    (wide,) = (model for model in shown["models"] if model["model"] == "wide")
    assert code == 1
    assert f"2 of {replicas} replicas" in wide["short"]
    assert "only 1 of the 2 GPUs needed has room" in wide["short"]


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("{device: 'cuda:7'}", "no GPU 7"),
        ("{device: cuda, gpu_memory_mb: 20, cpus: 64}", "cpus short"),
        ("{device: cuda, gpu_memory_mb: 20, memory_mb: 100000}", "MiB short"),
    ],
)
def test_what_the_service_refuses_is_short(
    tmp_path: Path, stage: str, said: str
) -> None:
    """Solvers know neither the number of a GPU, nor cores and memory beside it."""
    spec, nodes = tmp_path / "app.yaml", tmp_path / "nodes.json"
    factory = "tests.serve.models:model"
    stages = f"[{stage}, {{}}, {{}}]"
    spec.write_text(f"models: {{m: {{factory: '{factory}', stages: {stages}}}}}")
    nodes.write_text(json.dumps([NODE]))
    done = CliRunner().invoke(cli, ["plan", str(spec), "--nodes", str(nodes), "--json"])
    (model,) = json.loads(done.stdout)["models"]
    assert done.exit_code == 1
    assert said in model["short"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cpus": float("inf")}, "cpus is out of range"),
        ({"memory_bytes": 8 * 10**31}, "memory_bytes is out of range"),
        ({"price": float("nan")}, "price is out of range"),
        ({"bandwith": 1e9}, "unknown field bandwith"),
        ({"name": "other"}, "two machines have the same name"),
    ],
)
def test_wrong_machines_are_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    """A misspelt field must not be ignored."""
    spec, nodes = tmp_path / "app.yaml", tmp_path / "nodes.json"
    spec.write_text("models: {m: {factory: 'tests.serve.models:model', stages: [{}]}}")
    nodes.write_text(json.dumps([{**NODE, "name": "other"}, {**NODE, **change}]))
    done = CliRunner().invoke(cli, ["plan", str(spec), "--nodes", str(nodes)])
    assert done.exit_code == 1
    assert said in done.output
