"""Speed of bfloat16 matmuls on this machine, compared with float32.

oneDNN has fast kernels only for some processors (AVX512, or dedicated instructions). On
others, our compiled code computes these matmuls if it is available; otherwise oneDNN
emulates them, several times slower than float32.
"""

from __future__ import annotations

import os
import time

import torch

from multiworld.serve.engine.compute.hardware_fingerprint import known
from multiworld.serve.engine.models.bfloat16_products import instructions
from multiworld.serve.engine.models.packed_linear import packed_product

# Width and rows of the timed matmul, and number of its runs.
SIZE, ROWS, RUNS = 1024, 16, 9
EMULATED = 100.0  # the result if oneDNN cannot even pack the weights
# Environment variables that restrict the instructions in use.
VARIABLES = (
    "MULTIWORLD_COMPILE",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
)


def bfloat16_cost() -> float:
    """Return the time of a bfloat16 matmul as a multiple of the float32 time."""
    # Measure once per hardware fingerprint, in about 0.1 s, on one thread.
    played = ", ".join(f"{name}={os.environ.get(name, '')}" for name in VARIABLES)
    (percent,) = known(
        f"bfloat16 beside float32 in percent, products {instructions()}, {played}",
        1,
        lambda: [round(100 * _measured())],
    )
    return percent / 100


def _measured() -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _best_s(torch.bfloat16) / _best_s(torch.float32)
    except RuntimeError:  # no kernel takes packed bfloat16 weights
        return EMULATED
    finally:
        torch.set_num_threads(threads)


def _best_s(dtype: torch.dtype) -> float:
    with torch.inference_mode():
        product = packed_product(torch.ones(SIZE, SIZE, dtype=dtype))
        given = torch.ones(ROWS, SIZE, dtype=dtype)
        found = []
        for _ in range(RUNS):
            began = time.perf_counter()
            product(given)
            found.append(time.perf_counter() - began)
    return min(found)
