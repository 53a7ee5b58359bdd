"""Stub with which vLLM's runner V2 runs on a CPU, by Triton's interpreter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.tiny_decoder import VOCABULARY, save_tokenizer

HERE = Path(__file__).parent

ENTRY_POINTS = """[triton.backends]
cpu = triton_cpu
[vllm.general_plugins]
interpreted = interpreted_kernels:register
"""

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "TRITON_DEFAULT_BACKEND": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
}


def save_model(folder: Path) -> Path:
    """Save a small decoder with random weights that vLLM computes on a CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,  # heads of 64: vLLM's kernel takes few sizes
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
    )
    model: Any = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(4)  # so that tokens are not all equally likely
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def write(folder: Path) -> dict[str, str]:
    """Write the stub; return the environment in which vLLM uses it.

    No package on PyPI has a backend of Triton for CPUs. The interpreter runs kernels
    without compiling them, and asks a backend for no more than a device. A plugin of
    vLLM replaces what the interpreter cannot run. A token takes about 0.3 s.
    """
    shutil.copytree(HERE / "triton_cpu", folder / "triton_cpu")
    shutil.copyfile(HERE / "interpreted_kernels.py", folder / "interpreted_kernels.py")
    about = folder / "interpreted_kernels-1.0.dist-info"
    about.mkdir()
    text = "Metadata-Version: 2.1\nName: interpreted-kernels\nVersion: 1.0\n"
    (about / "METADATA").write_text(text)
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return {**ENVIRONMENT, "PYTHONPATH": str(folder)}
