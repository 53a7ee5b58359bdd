"""Examples of serving, run unchanged."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import torch
import yaml

from multiworld.serve.controller.fleet.desired_state import desired_state_of
from multiworld.serve.controller.launchers.base import began_at
from multiworld.serve.engine.models.factory import build_model
from multiworld.serve.spec.loader import load_spec
from tests.serve.harness import ROOT, WAIT_S, Served, served
from tests.tiny_decoder import save_tokenizer

EXAMPLES = ROOT / "examples" / "serve"

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    "path",
    [*sorted(EXAMPLES.glob("*.yaml")), EXAMPLES.parent / "cluster" / "app.yaml"],
    ids=lambda p: p.stem,
)
def test_example_spec_is_right(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    app = load_spec(path)
    for name, spec in app.models.items():
        assert len(build_model(spec).stages) == len(
            desired_state_of(app).models[name].replicas
        )


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["digits", pytest.param("digits_uncut", marks=pytest.mark.heavy)]
)
def test_digits_are_recognised(name: str, tmp_path: Path) -> None:
    spec = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    spec["gateway"]["port"] = 0
    with served(tmp_path, spec, cwd=EXAMPLES) as service:
        assert isinstance(service, Served)
        done = subprocess.run(
            [sys.executable, "digits.py", "--url", service.url],
            cwd=EXAMPLES,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    accuracy = float(done.stdout.split()[1])
    assert accuracy > 0.95, done.stdout


def test_tensor_parallel_stage_survives_the_loss_of_either_rank(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        example = importlib.import_module("tensor_parallel")
    finally:
        sys.path.remove(str(EXAMPLES))
    spec = yaml.safe_load((EXAMPLES / "tensor_parallel.yaml").read_text())
    spec["gateway"]["port"] = 0
    x = torch.randn(3, example.WIDTH)
    body = {"name": "x", "datatype": "FP32", "shape": list(x.shape)}
    asked = {"inputs": [{**body, "data": x.flatten().tolist()}]}

    def answer(service: Served) -> None:
        url = f"{service.url}/v2/models/layer/infer"
        got = httpx.post(url, json=asked, timeout=WAIT_S)
        assert got.status_code == 200, got.text
        y = torch.tensor(got.json()["outputs"][0]["data"]).view(x.shape)
        assert torch.allclose(y, example.whole(x), atol=1e-3)

    def workers(service: Served) -> dict[str, int]:
        found = service.status().processes
        return {p.name: p.pid for p in found if p.model and p.pid}

    def replaced(service: Served, name: str) -> None:
        def is_so() -> bool:
            return service.status().is_ready and name not in workers(service)

        service.until(is_so, f"{name} is replaced")

    with served(tmp_path, spec, cwd=EXAMPLES) as service:
        for _ in range(4):
            answer(service)
        for is_leader in (False, True):
            name, leader = next(iter(workers(service).items()))
            (follower,) = followers_of(leader)
            title = psutil.Process(follower).cmdline()[:1]
            assert title == [f"multiworld {name} rank 1"]
            os.kill(leader if is_leader else follower, signal.SIGKILL)
            for _ in range(4):
                answer(service)
            replaced(service, name)
            assert began_at(follower) is None
            assert began_at(leader) is None


def test_own_decoder_continues_after_a_loss(tmp_path: Path) -> None:
    code = (EXAMPLES / "decoder.py").read_text()
    page = (ROOT / "docs" / "serve" / "generation.md").read_text()
    assert code.split('"""\n\n', 1)[1] in page
    sys.path.insert(0, str(EXAMPLES))
    try:
        example = importlib.import_module("decoder")
    finally:
        sys.path.remove(str(EXAMPLES))
    spec = yaml.safe_load((EXAMPLES / "decoder.yaml").read_text())
    spec["gateway"]["port"] = 0
    save_tokenizer(tmp_path)
    spec["models"]["own"]["options"]["folder"] = str(tmp_path)
    count, prompt = 40, [7, 8, 9]
    asked = {"model": "own", "prompt": prompt, "max_tokens": count, "temperature": 0}
    more = {"stream": True, "ignore_eos": True, "return_token_ids": True}
    tokens: list[int] = []
    with (
        served(tmp_path / "service", spec, cwd=EXAMPLES) as service,
        httpx.stream(
            "POST",
            f"{service.url}/v1/completions",
            json={**asked, **more},
            timeout=WAIT_S,
        ) as got,
    ):
        for line in got.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                tokens += choice["token_ids"]
            if len(tokens) == 5:
                found = service.status().processes
                for process in found:
                    if process.model and process.stage == 1 and process.pid:
                        os.kill(process.pid, signal.SIGKILL)
    text = list(prompt)
    front, back = example.front(None), example.back(None)
    with torch.inference_mode():
        for _ in range(count):
            rows, at = torch.tensor(text), torch.arange(len(text))
            last = torch.tensor([len(text) - 1])
            hidden = front(rows, at, WholeText(), last)
            text.append(int(back(hidden, at, WholeText(), last).argmax()))
    assert tokens == text[len(prompt) :]


class WholeText:
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return what each row attends to, [rows, heads, size]."""
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=True).transpose(0, 1)


def followers_of(pid: int) -> list[int]:
    """Return the processes that a leader has forked, without its heartbeat helper."""
    found = subprocess.run(
        ["pgrep", "-P", str(pid), "-a"], capture_output=True, text=True, check=True
    ).stdout
    return [int(row.split()[0]) for row in found.splitlines() if "heartbeat" not in row]
