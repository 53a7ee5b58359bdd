"""The spec that ``multiworld serve MODEL`` generates: one model, and a few options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from multiworld.errors import SpecError
from multiworld.serve.engine.models import hub

if TYPE_CHECKING:  # ``multiworld fetch`` needs no schema of specs
    from multiworld.serve.machines.amounts import Node

DEMO = "smollm2"

MAX_REPLICAS = 2  # maximum replicas of a stage by default: two, so that one may be lost
# Default memory for a replica's keys, values and cached prefixes.
KV_BYTES = 640 * 2**20
BASE_BYTES = 400 * 2**20  # memory of a process with torch and transformers
SHARE = 0.8  # share of a machine's memory that replicas may use


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of the command; None: not given."""

    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    engine: str | None = None
    stages: int = 1
    replicas: int | None = None
    has_key: bool = False


def is_model(text: str) -> bool:
    """Return whether an argument names a model rather than a spec file."""
    path = Path(text).expanduser()
    if text == DEMO:
        return not path.exists()
    if path.suffix in (".yaml", ".yml"):
        return False
    return (path / "config.json").exists() or hub.is_hub_name(text)


def found(
    text: str, revision: str | None, tell: Callable[[str], None]
) -> tuple[str, str | None]:
    """Return a model's ``path`` and ``revision`` in a spec; fetch the demo model."""
    path = Path(text).expanduser()
    if text == DEMO:
        from multiworld.demo import smollm2

        return str(smollm2.fetch(tell)), None
    if path.exists():
        return str(path.resolve()), None
    return text, revision or _latest(text, tell)


def _latest(name: str, tell: Callable[[str], None]) -> str:
    """Return a model's latest commit on the hub; replicas need a fixed one.

    If the hub does not answer, it is the latest that was fetched before.
    """
    try:
        from huggingface_hub import HfApi

        sha = HfApi().model_info(name, timeout=10).sha
    except Exception as error:  # several libraries raise their own errors here
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        if kept := hub.fetched(name):
            tell(f"{reason}; serving commit {kept.name[:12]}, which was fetched before")
            return kept.name
        raise SpecError(
            f"{name} is neither a file nor a folder, and looking it up on the Hugging "
            f"Face Hub failed: {reason}; give a folder, or --revision COMMIT of a "
            "model that was fetched before"
        ) from error
    return str(sha)


def replicas_that_fit(weight_bytes: int, machine: Node) -> tuple[int, str]:
    """Return the number of replicas that fit, but at least 1, and why not more."""
    need = weight_bytes + KV_BYTES + BASE_BYTES
    room = int(SHARE * machine.memory_bytes)
    count = max(1, min(MAX_REPLICAS, room // need))
    if count == MAX_REPLICAS:
        return count, "two replicas, so that streams continue when one of them dies"
    gib = 2**30
    return count, (
        f"one replica only: each needs about {need / gib:.1f} GiB, and the machine has "
        f"{machine.memory_bytes / gib:.1f} GiB; after a loss, streams wait until "
        "another replica has started"
    )


def warnings_of(options: ModelOptions, weight_bytes: int, machine: Node) -> list[str]:
    """Return why the replicas that were asked for may be too many for the machine."""
    if options.replicas is None or (machine.gpus and options.quantization is None):
        return []
    count, found, gib = options.replicas, [], 2**30
    need = count * (weight_bytes + options.stages * (KV_BYTES + BASE_BYTES))
    if need > SHARE * machine.memory_bytes:
        found.append(
            f"{count} replicas need about {need / gib:.1f} GiB, and the machine has "
            f"{machine.memory_bytes / gib:.1f} GiB; the kernel may kill some of them"
        )
    processes = count * options.stages
    if processes > machine.cpus:
        found.append(
            f"{processes} processes compute on {machine.cpus:g} cores, so each is slow"
        )
    return found


def text_of(
    path: str,
    revision: str | None,
    options: ModelOptions,
    weight_bytes: int,
    machine: Node,
) -> str:
    """Return the spec as YAML, with a comment for each field."""
    name = options.name or name_of(path)
    replicas, why = replicas_that_fit(weight_bytes, machine)
    gpus = len(machine.gpus)
    is_for_cpus = options.quantization is not None
    has_gpus = gpus >= options.stages * (options.replicas or 1) and not is_for_cpus
    if has_gpus:
        # Do not check whether the model fits the GPUs: if not, it fails to load.
        replicas = max(1, min(MAX_REPLICAS, gpus // options.stages))
        why = f"each stage on a GPU of its own; the machine has {gpus}"
    if options.replicas is not None:
        replicas, why = options.replicas, "replicas of each stage"
    threads = max(1, int(machine.cpus) // (replicas * options.stages))
    lines = [
        f"app: {_quoted(name)}  # name of the service, for `multiworld status --app`",
        "models:",
        f"  {_quoted(name)}:  # name that clients give as `model`",
        f"    path: {_quoted(path)}  # Hugging Face folder, or name on the hub",
    ]
    if revision is not None:
        lines.append(f"    revision: {_quoted(revision)}  # commit on the hub")
    if options.engine is not None:
        lines.append(
            f"    engine: {_quoted(options.engine)}  # computes the whole model"
        )
    fields = {
        "max_model_len": (options.max_model_len, "tokens of a prompt and its answer"),
        "max_num_seqs": (options.max_num_seqs, "sequences that a replica computes"),
        "dtype": (options.dtype, "to compute in"),
        "quantization": (options.quantization, "of the weights, on CPUs"),
    }
    given = {key: each for key, each in fields.items() if each[0] is not None}
    if given:
        lines.append("    generation:  # the model generates text")
        for key, (value, note) in given.items():
            lines.append(f"      {key}: {value}  # {note}")
    else:
        lines.append("    generation: {}  # the model generates text")
    threaded = "" if options.engine else f", threads: {threads}"
    if has_gpus:
        threaded = ", device: cuda"
    lines.append("    stages:  # parts of the model, each in processes of its own")
    for number in range(options.stages):
        note = f"  # {why}" if number == 0 else ""
        lines.append(
            f"      - {{name: {'abcdefghijklmnopqrstuvwxyz'[number]}, "
            f"replicas: {replicas}{threaded}}}{note}"
        )
    lines += [
        "gateway:",
        f"  host: {_quoted(options.host)}  # address to listen on",
        f"  port: {options.port}",
    ]
    if options.has_key:
        lines.append(
            "  authentication: keys  # of tenants (`multiworld tenants`), and --api-key"
        )
    return "\n".join(lines) + "\n"


def name_of(path: str) -> str:
    """Return a name for a model, made of the characters that names may contain."""
    last = path.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._")[:64].strip("-._") or "model"


def weight_bytes_of(folder: Path, dtype: str | None) -> int:
    """Return the bytes of a model's weights in memory, approximately."""
    files = [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    try:
        size = sum(file.stat().st_size for file in files)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("config.json has no object")
    except (OSError, ValueError) as error:
        text = f"{folder} is not a complete model: {error}; fetch it again"
        raise SpecError(text) from error
    stored = config.get("dtype") or config.get("torch_dtype")
    return 2 * size if dtype == "float32" and stored != "float32" else size


def has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists():
        return True
    config = folder / "tokenizer_config.json"
    return config.exists() and '"chat_template"' in config.read_text(encoding="utf-8")


def curl_of(url: str, name: str, *, is_chat: bool, has_key: bool = False) -> str:
    """Return a curl command that sends the model a request."""
    if is_chat:
        route = "chat/completions"
        body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
    else:
        route, body = "completions", {"model": name, "prompt": "Once upon a time"}
    text = json.dumps({**body, "max_tokens": 60, "temperature": 0})
    key = ' -H "authorization: Bearer $MULTIWORLD_API_KEY"' if has_key else ""
    return f"curl {url}/v1/{route} -H 'content-type: application/json'{key} -d '{text}'"


def _quoted(text: str) -> str:
    # YAML reads words such as "on" and "null" as other values.
    is_plain = re.fullmatch(r"[a-zA-Z/][\w/.-]*", text) and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text)
