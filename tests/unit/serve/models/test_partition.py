"""Measurement of the parts of a model, and the best cut into stages."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from multiworld.cli.main import cli
from multiworld.errors import SpecError
from multiworld.serve import Model, Stage, StageContext, TensorSpec
from multiworld.serve.models import minilm
from multiworld.serve.models.partition import PartProfile, cut, profile
from multiworld.serve.spec.stage import Tensors


def sleeper(seconds: float) -> Stage:
    """Return a stage that takes this many seconds."""

    def run(tensors: Tensors) -> Tensors:
        time.sleep(seconds)
        return tensors

    return Stage(load=lambda context: run, name=str(seconds))


def test_profile_measures_time_and_output_size() -> None:
    """Bytes are those of the requested number of rows."""
    model = Model(
        stages=[sleeper(0.001), sleeper(0.02)],
        inputs=[TensorSpec("x", "FP32", (-1, 8))],
    )
    fast, slow = profile(model, rows=4, repeats=3)
    assert slow.seconds > 5 * fast.seconds
    assert fast.output_bytes == 4 * 8 * 4
    assert fast.parameter_bytes == 0


def test_cut_makes_the_slowest_stage_fast() -> None:
    """The stages have different numbers of parts."""
    parts = [PartProfile(str(n), s, 0, 0) for n, s in enumerate((5, 1, 1, 1, 1, 1))]
    found = cut(parts, 2)
    assert found.begins == (0, 1)
    assert found.seconds == (5, 5)
    assert cut(parts, 3).bottleneck == 0


def test_minilm_computes_the_same_however_it_is_cut() -> None:
    """Each stage holds only its own weights."""
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
    """The error has the rule for cuts."""
    with pytest.raises(SpecError, match="first layers of stages 1 to 2"):
        minilm.model(3, cut=where)


def test_command_prints_profile_cut_and_bottleneck(tmp_path: Path) -> None:
    """The command measures the model of a spec."""
    path = tmp_path / "app.yaml"
    path.write_text(
        "models:\n  minilm:\n    factory: multiworld.serve.models.minilm:model\n"
        "    options: {stages: 2}\n    stages: [{replicas: 2}, {}]\n"
    )
    done = CliRunner().invoke(cli, ["partition", str(path), "--repeats", "2", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["stages"]) == 2
    assert len(found["parts"]) == 6
    assert found["bottleneck"] == 1  # the other one has two replicas
    assert len(found["cut"]) == 1
    shown = CliRunner().invoke(cli, ["partition", str(path), "--repeats", "1"])
    assert "the bottleneck" in shown.stdout
    assert "proposed" in shown.stdout
