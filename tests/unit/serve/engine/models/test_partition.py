"""Measurement of the parts of a model, and the best cut into stages."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from multiworld.cli.main import cli
from multiworld.demo import minilm
from multiworld.errors import SpecError
from multiworld.serve import Model, Stage, StageContext, TensorSpec
from multiworld.serve.engine.models.meter import BatchMeter, measured_stages
from multiworld.serve.engine.models.partition import Part, cut
from multiworld.serve.spec.loader import load_spec
from multiworld.serve.spec.stage import Tensors
from tests.tiny_decoder import VOCABULARY, save_decoder


def sleeper(seconds: float) -> Stage:
    def run(tensors: Tensors) -> Tensors:
        time.sleep(seconds)
        return tensors

    return Stage(load=lambda context: run, name=str(seconds))


def test_meter_measures_time_and_output_size() -> None:
    """The output size is that of one row."""
    model = Model(
        stages=[sleeper(0.001), sleeper(0.02)],
        inputs=[TensorSpec("x", "FP32", (-1, 8))],
    )
    fast, slow = measured_stages(BatchMeter(model, [4], 3), 2)
    assert slow.seconds[4] > 5 * fast.seconds[4]
    assert fast.out_bytes == 8 * 4
    assert fast.weight_bytes == 0


def test_meter_takes_one_row_of_the_example_and_keeps_it() -> None:
    """An example may have several rows, and stages may change their inputs in place."""
    rows: list[int] = []

    def run(tensors: Tensors) -> Tensors:
        rows.append(len(tensors["x"]))
        assert tensors["x"].eq(1).all()
        return {"x": tensors["x"].add_(1)}

    model = Model(
        stages=[Stage(load=lambda context: run)],
        inputs=[TensorSpec("x", "FP32", (-1, 8))],
        example=lambda: {"x": torch.ones(8, 8)},
    )
    (found,) = measured_stages(BatchMeter(model, [2], 3), 1)
    assert set(rows) == {2}
    assert found.out_bytes == 8 * 4


def test_cut_makes_the_slowest_stage_fast() -> None:
    parts = [Part(seconds) for seconds in (5, 1, 1, 1, 1, 1)]
    found = cut(parts, 2)
    assert found.begins == (0, 1)
    assert found.seconds == (5, 5)
    assert cut(parts, 3).bottleneck == 0


def test_partition_leaves_room_for_kv_where_it_costs_no_time() -> None:
    """Of cuts that are about as fast, the one with the smallest KV size wins."""
    parts = [Part(1.0, 10.0)] * 2 + [Part(0.01, 10.0)] * 2 + [Part(2.0, 10.0)]
    assert cut(parts, 2).begins == (0, 2)
    without = [Part(part.seconds) for part in parts]
    assert cut(without, 2).seconds[0] < cut(parts, 2).seconds[1] <= 1.05 * 2.02


def test_minilm_computes_the_same_however_it_is_cut() -> None:
    whole = minilm.model(1)
    assert whole.text is not None
    tensors = whole.text().encode("one sentence, cut in every way")
    wanted = whole.stages[0].load(StageContext())(tensors)["embedding"]
    weights = []
    for stages, where in ((3, None), (2, [1]), (6, None)):
        model = minilm.model(stages, cut=where)
        flowing = tensors
        for stage in model.stages:
            function = stage.load(StageContext())
            assert isinstance(function, torch.nn.Module)
            weights.append(sum(p.numel() for p in function.parameters()))
            with torch.inference_mode():
                flowing = function(flowing)
        assert torch.allclose(flowing["embedding"], wanted, atol=1e-6)
    assert max(weights[1:3]) < weights[0] / 3


@pytest.mark.parametrize("where", [[2], [4, 2], [0, 3], [3, 6]])
def test_impossible_cut_is_reported(where: list[int]) -> None:
    with pytest.raises(SpecError, match="first layers of stages 1 to 2"):
        minilm.model(3, cut=where)


def test_command_prints_profile_cut_and_bottleneck(tmp_path: Path) -> None:
    path = tmp_path / "app.yaml"
    path.write_text(
        "models:\n  minilm:\n    factory: multiworld.demo.minilm:model\n"
        "    options: {stages: 2}\n    stages: [{replicas: 8}, {}]\n"
    )
    done = CliRunner().invoke(cli, ["partition", str(path), "--repeats", "2", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["stages"]) == 2
    assert len(found["parts"]) == 6
    assert found["bottleneck"] == 1  # the other one has eight replicas
    assert len(found["cut"]) == 1
    shown = CliRunner().invoke(cli, ["partition", str(path), "--repeats", "1"])
    assert "the bottleneck" in shown.stdout
    assert "proposed" in shown.stdout


def test_decoder_is_measured_and_cut(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "decoder")
    path = tmp_path / "app.yaml"
    path.write_text(
        f"models:\n  m:\n    path: {folder}\n"
        "    generation: {kv_cache_memory_mb: 1}\n    stages: [{}, {}]\n"
    )
    given = ["partition", str(path), "--repeats", "1"]
    done = CliRunner().invoke(cli, [*given, "--rows", "3", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["parts"]) == 4
    kept = found["stages"][0]["kv_bytes"]
    assert kept == 2 * found["parts"][0]["kv_bytes"] > 0
    assert found["parts"][0]["output_bytes"] == 3 * 64 * 4
    assert found["stages"][1]["output_bytes"] == 0
    head = found["parts"][-1]["parameter_bytes"] - found["parts"][1]["parameter_bytes"]
    assert head == VOCABULARY * 64 * 4 + 64 * 4, "the embedding's weights, and a norm"
    shown = CliRunner().invoke(cli, given)
    assert "kv_cache_memory_mb: 1 has room for" in " ".join(shown.stdout.split())

    profile = tmp_path / "needs.json"
    given = ["profile", str(path), "--repeats", "1", "--batch", "2", "--context", "40"]
    done = CliRunner().invoke(cli, [*given, "--out", str(profile)])
    assert done.exit_code == 0, done.output
    first, last = json.loads(profile.read_text())["stages"]
    assert list(first["seconds"]) == ["2", "40"]
    assert first["kv_bytes"] == last["kv_bytes"] == kept
    path.write_text(path.read_text() + f"    profile: {profile}\n")
    stages = load_spec(path).models["m"].stages
    assert all(stage.memory_mb and stage.item_ms for stage in stages)
    trace = "poisson:rate=2,seconds=5"
    done = CliRunner().invoke(cli, ["simulate", str(path), "--generate", trace])
    assert done.exit_code == 0, done.output
