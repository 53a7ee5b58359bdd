"""The numerics of this package, with the instruction sets of smaller processors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROCESSORS = {
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "SSE4.1": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
FILES = (
    "tests/unit/serve/engine/models/test_packed_linear.py",
    "tests/unit/serve/engine/models/test_bfloat16_products.py",
    "tests/unit/serve/engine/models/test_integer_linear.py",
    "tests/unit/serve/engine/compute/test_batch_invariance.py",
    "tests/unit/serve/engine/compute/test_compiled_attention.py",
    "tests/unit/serve/engine/compute/test_compiled_layers.py",
    "tests/unit/serve/engine/models/test_decoder.py",
    "tests/unit/serve/controller/test_dtypes.py",
)
SELECTED = (
    "test_packed_linear or test_bfloat16_products or test_integer_linear or "
    "test_compiled or "
    "test_dtypes or numbers or "
    "(test_decoder and llama) or (widths and 4864) or (neighbours and llama and True)"
)
"""All that depends on the processor, for one architecture; others take minutes."""

IS_SMALLER = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT"),
    reason="this processor has no more than AVX2, or not even that",
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "tier"),
    [
        pytest.param("AVX2", "not heavy", id="AVX2-few", marks=IS_SMALLER),
        pytest.param("AVX2", "", id="AVX2", marks=[IS_SMALLER, pytest.mark.heavy]),
        pytest.param("SSE4.1", "", id="SSE4.1", marks=pytest.mark.heavy),
    ],
)
def test_numerics_are_right_on_a_smaller_processor(
    name: str, tier: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-k", SELECTED, "-m", tier, *FILES]
    env = {**os.environ, **PROCESSORS[name], "MULTIWORLD_CACHE": str(tmp_path)}
    for given in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        env.pop(given, None)
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
