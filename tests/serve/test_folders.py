"""Decoders from Hugging Face folders, served over HTTP while workers are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
import torch

from tests.serve.harness import WAIT_S, Served, served
from tests.tiny_decoder import save_decoder
from tests.unit.serve.engine.models.test_transformer_stage import saved

pytestmark = pytest.mark.timeout(240)


def test_folder_is_served_without_a_spec(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "Tiny")
    target = [str(folder), "--port", "0", "--served-model-name", "m", "--replicas", "2"]
    asked = {"model": "m", "prompt": [5, 6], "max_tokens": 8, "temperature": 0}
    with served(tmp_path / "service", {}, target=target) as service:

        def text() -> str:
            answer = httpx.post(f"{service.url}/v1/completions", json=asked)
            assert answer.status_code == 200, answer.text
            found: str = answer.json()["choices"][0]["text"]
            return found

        before = text()
        assert service.stages()[0] == 2
        service.break_replica("kill", "a")
        assert text() == before


@pytest.mark.heavy
def test_decoder_answers_as_the_whole_model_does(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    whole = saved("llama", folder)
    spec = {
        "app": "decoder",
        "models": {"llama": {"path": str(folder), "cut": [1], "stages": [{}, {}]}},
        "gateway": {"port": 0},
    }
    ids = torch.randint(3, 200, (2, 7))
    inputs = [
        {"name": n, "datatype": "INT64", "shape": [2, 7], "data": t.flatten().tolist()}
        for n, t in (("input_ids", ids), ("attention_mask", torch.ones_like(ids)))
    ]
    with torch.inference_mode():
        wanted = whole(input_ids=ids).last_hidden_state

    def check(service: Served) -> None:
        url = f"{service.url}/v2/models/llama/infer"
        got = httpx.post(url, json={"inputs": inputs}, timeout=WAIT_S)
        assert got.status_code == 200, got.text
        (output,) = got.json()["outputs"]
        found = torch.tensor(output["data"]).view(output["shape"])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)

    with served(tmp_path, spec) as service:
        check(service)
        for stage in range(2):
            found = service.status().processes
            pids = [p.pid for p in found if p.model and p.stage == stage and p.pid]
            os.kill(pids[0], signal.SIGKILL)
            check(service)
