"""The serving examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from multiworld.serve.control.wanting import wanted_of
from multiworld.serve.loading import load_spec
from multiworld.serve.sources import build_model
from tests.serve.harness import ROOT, Served, served

EXAMPLES = ROOT / "examples" / "serve"

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_example_spec_is_right(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its model can be built."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    app = load_spec(path)
    for name, spec in app.models.items():
        assert len(build_model(spec).stages) == len(
            wanted_of(app).models[name].replicas
        )


def test_digits_are_recognised(tmp_path: Path) -> None:
    """By the client of the example, from the service of the example."""
    spec = yaml.safe_load((EXAMPLES / "digits.yaml").read_text())
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
