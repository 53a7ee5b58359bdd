"""Versions whose code or files change while they are served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from multiworld.errors import ServeError
from tests.serve.harness import WAIT_S, Served, served, spec_with
from tests.tiny_decoder import save_decoder

pytestmark = pytest.mark.timeout(120)

MODULE = """
from multiworld.serve.stage import Model, Stage, TensorSpec

def load(context):
    bias = float(open({file!r}).read())
    return lambda tensors: {{"y": tensors["x"] * {factor} + bias}}

def model():
    rows = [TensorSpec("x", "FP32", (-1,))]
    return Model(
        stages=[Stage(load=load)],
        inputs=rows,
        outputs=[TensorSpec("y", "FP32", (-1,))],
        files=[{file!r}],
    )
"""


def answer(service: Served) -> float:
    import httpx

    inputs = [{"name": "x", "datatype": "FP32", "shape": [1], "data": [2.0]}]
    url = f"{service.url}/v2/models/m/infer"
    found = httpx.post(url, json={"inputs": inputs}, timeout=30)
    assert found.status_code == 200, found.text
    value: float = found.json()["outputs"][0]["data"][0]
    return value


@pytest.mark.parametrize("what", ["code", "file"])
async def test_replica_does_not_load_what_is_not_its_version(
    tmp_path: Path, what: str
) -> None:
    bias, module = tmp_path / "bias.txt", tmp_path / f"served_{what}.py"
    bias.write_text("0.5")
    module.write_text(MODULE.format(file=str(bias), factor=10))
    spec = spec_with(
        models={
            "m": {
                "factory": f"served_{what}:model",
                "stages": [{"name": "only", "replicas": 2}],
            }
        },
        orphan_s=20.0,
    )
    with served(tmp_path, spec, tmp_path) as service:
        assert answer(service) == 20.5
        if what == "code":
            module.write_text(MODULE.format(file=str(bias), factor=11))
            service.kill_controller()
            await asyncio.to_thread(service.start)
            assert module.name in service.events("changed")[0].text
        else:
            bias.write_text("0.75")
        changed = module.name if what == "code" else bias.name
        service.break_replica("kill", "only")
        service.until(lambda: bool(service.events("refused")), "it is refused")
        (refused, *_) = service.events("refused")
        assert f"{changed} has changed since this version was made" in refused.text
        assert [answer(service) for _ in range(4)] == [20.5] * 4
        with pytest.raises(ServeError, match=f"{changed} has changed.*new version"):
            service.update(yaml.safe_dump(spec))
        if what == "file":
            spec["models"]["m"]["version"] = "2"
            service.update(yaml.safe_dump(spec))
            service.until(lambda: answer(service) == 20.75, "the new version answers")
            service.until(lambda: service.status().is_ready, "it is ready")
            service.until(
                lambda: set(service.status().identities["m"]) == {"2"},
                "the old version is gone",
            )


async def test_replica_loads_the_kept_copy_of_replaced_weights(tmp_path: Path) -> None:
    import httpx

    folder = save_decoder(tmp_path / "decoder")
    model = {
        "path": str(folder),
        "generation": {"kv_cache_memory_mb": 1},
        "stages": [{"name": "only"}],
    }
    spec = {"app": "kept", "models": {"m": model}, "gateway": {"port": 0}}
    asked = {"model": "m", "prompt": [5, 6], "max_tokens": 8, "temperature": 0}

    def tokens(service: Served) -> str:
        url = f"{service.url}/v1/completions"
        found = httpx.post(url, json=asked, timeout=WAIT_S)
        assert found.status_code == 200, found.text
        text: str = found.json()["choices"][0]["text"]
        return text

    with served(tmp_path, spec) as service:
        before = tokens(service)
        weights = folder / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-4096:] = bytes(4096)
        weights.write_bytes(content)
        service.break_replica("kill", "only")
        service.until(lambda: bool(service.events("changed")), "the copy is loaded")
        assert f"copy of the old files: {weights}" in service.events("changed")[0].text
        assert tokens(service) == before
