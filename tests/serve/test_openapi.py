"""The OpenAPI description, checked against the service by schemathesis."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.harness import served, spec_with
from tests.serve.texts import spec_of
from tests.tiny_decoder import save_decoder

SCHEMATHESIS = shutil.which("schemathesis")
HANG_S = 600.0


@pytest.mark.heavy
@pytest.mark.timeout(HANG_S + 120)
@pytest.mark.skipif(SCHEMATHESIS is None, reason="schemathesis is not on the PATH")
def test_answers_are_those_that_the_description_promises(tmp_path: Path) -> None:
    assert SCHEMATHESIS is not None
    models = spec_of(save_decoder(tmp_path / "decoder"))["models"]
    spec = spec_with()
    spec["models"] |= {"decoder": models["m"]}
    with served(tmp_path, spec) as service:
        done = subprocess.run(
            [SCHEMATHESIS, "run", f"{service.url}/openapi.json", "--max-examples=60"],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stdout[-4000:]
