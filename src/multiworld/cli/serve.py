"""``multiworld serve``: runs the service of a spec in the foreground."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape

from multiworld.cli import model_spec
from multiworld.cli.model_spec import ModelOptions
from multiworld.cli.options import JSON, STATE
from multiworld.errors import ConfigError, SpecError
from multiworld.log_format import FORMAT, FORMATS, LEVEL, LEVELS, configure
from multiworld.serve.controller.fleet.record import (
    StateFolder,
    already_served,
    state_root,
)
from multiworld.serve.controller.port import cannot_listen, check_free
from multiworld.serve.controller.process_one import leave_process_one
from multiworld.serve.spec.loader import load_spec, parse_spec
from multiworld.serve.spec.schema import NAME, PATTERNS, AppSpec, ModelSpec
from multiworld.serve.tracing.tracer import check as check_traces

if TYPE_CHECKING:
    from multiworld.serve.controller.controller import Controller
    from multiworld.serve.controller.startup import Startup


OWNER = "owner"  # tenant with the key of ``--api-key``


def _checked_name(
    context: click.Context, option: click.Parameter, name: str | None
) -> str | None:
    if name is not None and not re.fullmatch(NAME, name):
        raise click.BadParameter(f"{name!r}; {PATTERNS[NAME]}")
    return name


def _of_model(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a model that is served without a spec."""
    for option in reversed(
        [
            click.option(
                "--served-model-name",
                "name",
                callback=_checked_name,
                help="Name of the model that clients give as `model`.",
            ),
            click.option("--host", help="Address to listen on; 127.0.0.1 by default."),
            click.option(
                "--port", type=click.IntRange(0, 65535), help="Port; 8000 by default."
            ),
            click.option(
                "--api-key",
                envvar="MULTIWORLD_API_KEY",
                help="Key that every request needs, of 16 characters or more; safer in "
                "MULTIWORLD_API_KEY, which other users cannot see. Also for a SPEC "
                "with `authentication: keys`.",
            ),
            click.option(
                "--max-model-len",
                type=click.IntRange(2, 10_000_000),  # as in the spec
                help="Maximum tokens of a sequence.",
            ),
            click.option(
                "--max-num-seqs",
                type=click.IntRange(1, 4096),
                help="Maximum running sequences of a replica.",
            ),
            click.option(
                "--dtype",
                type=click.Choice(["float32", "bfloat16", "float16"]),
                help="Number format to compute in.",
            ),
            click.option(
                "--quantization",
                type=click.Choice(["int8"]),
                help="Number format of the weights, on CPUs.",
            ),
            click.option(
                "--engine", help="vllm or llama.cpp; multiworld's own by default."
            ),
            click.option(
                "--stages",
                type=click.IntRange(1, 26),
                help="Number of stages; 1 by default.",
            ),
            click.option(
                "--replicas",
                type=click.IntRange(1, 4096),
                help="Replicas of each stage.",
            ),
            click.option("--revision", help="Commit of a model on the hub."),
            click.option(
                "--print-spec",
                is_flag=True,
                help="Print the equivalent spec, and serve nothing.",
            ),
        ]
    ):
        command = option(command)
    return command


def _spec_of_model(
    model: str, revision: str | None, options: ModelOptions, console: Console
) -> tuple[str, Path]:
    """Return the spec of a model, and its folder; fetch it if needed."""
    from multiworld.serve.engine.models import hub
    from multiworld.serve.machines.inventory import this_node

    def tell(text: str) -> None:
        console.print(f"  {text}", soft_wrap=True, markup=False, highlight=False)

    path, commit = model_spec.found(model, revision, tell)
    if options.name is None and model == model_spec.DEMO:
        options = replace(options, name=model)
    folder = Path(hub.folder_of(path, commit))
    size = model_spec.weight_bytes_of(folder, options.dtype)
    machine = this_node()
    for why in model_spec.warnings_of(options, size, machine):
        tell(f"warning: {why}")
    return model_spec.text_of(path, commit, options, size, machine), folder


def _load(
    target: str,
    revision: str | None,
    is_shown: bool,
    given: dict[str, Any],
    console: Console,
) -> tuple[AppSpec | None, Path | None]:
    """Return the spec to serve, None if it was printed; and a model's folder."""
    if model_spec.is_model(target):
        has_key = given.pop("api_key", None) is not None
        options = ModelOptions(**given, has_key=has_key)
        text, folder = _spec_of_model(target, revision, options, console)
        if is_shown:
            click.echo(text, nl=False)
            return None, folder
        return parse_spec(text, target), folder
    path = Path(target).expanduser()
    if not path.exists():
        raise SpecError(
            f"{target} is neither a file nor a model; give a spec (a YAML file), the "
            "folder of a model, OWNER/NAME of one on the Hugging Face Hub, or smollm2"
        )
    # For a folder, report that it is no spec before any problem with the options.
    spec = load_spec(Path(target)) if path.is_dir() else None
    api_key = given.pop("api_key", None)
    if given or revision or is_shown:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(
            f"{names or 'this option'} needs a model (a folder, OWNER/NAME or "
            f"smollm2), and {target} is not one; in a spec, set the fields instead"
        )
    spec = spec or load_spec(Path(target))
    if api_key is not None and spec.gateway.authentication != "keys":
        raise click.UsageError(
            f"--api-key needs `authentication: keys` in the section gateway of {target}"
        )
    return spec, None


def _check_start(app: AppSpec, folder: StateFolder) -> None:
    """Raise an error if a start cannot succeed, before torch is imported (seconds)."""
    if folder.is_controlled():
        raise already_served(folder.path)
    # A running gateway, or a keeper that waits for this service, may hold the port.
    may_be_held = folder.has_record() or folder.keeper.exists()
    if app.gateway.port and not may_be_held:
        try:
            check_free(app.gateway.host, app.gateway.port)
        except OSError as error:
            raise cannot_listen(app.gateway.host, app.gateway.port, error) from error


def _curl(models: dict[str, ModelSpec], url: str, *, has_key: bool) -> str:
    """Return a command that asks the first model that generates text; "" if none."""
    from multiworld.serve.engine.models import hub

    for name, model in models.items():
        if model.generation is None or model.path is None:
            continue
        folder: Path | None = Path(model.path)
        if hub.is_hub_name(model.path):
            folder = hub.fetched(model.path, model.revision)
        try:
            if folder is not None:
                is_chat = model_spec.has_chat_template(folder)
                return model_spec.curl_of(url, name, is_chat=is_chat, has_key=has_key)
        except (OSError, ValueError):
            pass  # the files are on other machines, or damaged: then no command
    return ""


def store_key(folder: Path, api_key: str) -> None:
    """Store the owner's key in a service's registry, replacing one given earlier."""
    from multiworld.serve.tenants.directory import Key, Tenant
    from multiworld.serve.tenants.keys import GIVEN, known_as
    from multiworld.serve.tenants.registry import open_registry

    registry = open_registry(folder)
    try:
        key_id, digest = known_as(api_key)
        key = Key(id=key_id, digest=digest, made_at=time.time())
        owner = registry.tenants().get(OWNER, Tenant(name=OWNER, is_operator=True))
        others = [each for each in owner.keys if not each.id.startswith(GIVEN)]
        registry.save(replace(owner, keys=(*others, key)))
    finally:
        registry.close()


def _checked_key(api_key: str | None) -> str | None:
    from multiworld.serve.tenants.keys import check_given

    if api_key is None:
        return None
    try:
        check_given(api_key.strip())
    except ValueError as error:
        raise click.UsageError(f"--api-key: {error}") from error
    return api_key.strip()


@click.command()
@click.argument("target", metavar="SPEC|MODEL")
@_of_model
@STATE
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print what happens to the processes of the service.",
)
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    envvar=FORMAT,
    default="text",
    show_default=True,
    help="Format of all log lines: text, or one JSON object per line.",
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS, case_sensitive=False),
    envvar=LEVEL,
    help="Minimum severity of lines in all logs.  [default: info; of this command's "
    "own lines: warning]",
)
@JSON
def serve(
    target: str,
    revision: str | None,
    print_spec: bool,
    state: Path | None,
    verbose: bool,
    log_format: str,
    log_level: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve the models of SPEC (a YAML file), or one MODEL, until Ctrl-C.

    MODEL is a Hugging Face folder, OWNER/NAME on the hub, or smollm2. The options from
    --served-model-name to --print-spec apply to a MODEL only, except --api-key, which
    also works with a SPEC that has `authentication: keys`.

    If the controller of a running service was lost, this takes over its processes,
    which have kept answering requests.
    """
    leave_process_one()
    console = Console(stderr=as_json)
    os.environ[FORMAT] = log_format  # all processes of the service read it
    if log_level is not None:
        os.environ[LEVEL] = log_level
    configure(os.environ, "controller", logging.getLogger().level)
    if verbose:
        logging.getLogger("multiworld.serve").setLevel(logging.INFO)
    try:
        check_traces(os.environ)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    given = {name: value for name, value in options.items() if value is not None}
    source = click.get_current_context().get_parameter_source("api_key")
    if source is ParameterSource.ENVIRONMENT and not model_spec.is_model(target):
        # The environment variable is meant for clients; a spec has its own keys.
        given.pop("api_key")
    api_key = _checked_key(given.get("api_key"))
    # Progress goes to stderr, because --print-spec prints the spec on stdout.
    err = Console(stderr=True)
    app, fetched = _load(target, revision, print_spec, given, err)
    if app is None:
        return
    fetched_at = None if fetched is None else time.monotonic()
    folder = StateFolder(state or state_root() / app.app)
    _check_start(app, folder)
    if not as_json:
        console.print(f"starting {app.app} …")
    # Imported late, because importing torch takes a second or more.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a thread of OpenBLAS would prevent forks
    from multiworld.serve.controller.answers import plain
    from multiworld.serve.controller.launchers.fork_server import fork_waiting
    from multiworld.serve.controller.launchers.registry import LAUNCHERS
    from multiworld.serve.controller.service import run_service

    def up(controller: Controller, startup: Startup) -> None:
        if as_json:
            click.echo(json.dumps(plain(controller.status())))
            return
        console.print(f"[green]{app.app} is ready[/] at {escape(controller.url)}")
        console.print(f"  after {startup}", soft_wrap=True)
        # Show the desired state, not the file: an earlier update may have changed it.
        desired = controller.fleet.desired.models
        specs = {n: controller.specs[n][m.version] for n, m in desired.items()}
        for name, model in desired.items():
            counts = zip(specs[name].stages, model.replicas, strict=True)
            stages = " → ".join(
                f"{stage.name or n} x{count}" for n, (stage, count) in enumerate(counts)
            )
            line = f"  model {name} (version {model.version}): {stages}"
            if name in controller.dtypes:
                line += f", in {controller.dtypes[name]}"
            console.print(line, soft_wrap=True, markup=False)
        console.print(
            f"  docs {controller.url}/docs · metrics {controller.url}/metrics · "
            f"logs {folder.logs}",
            soft_wrap=True,
            markup=False,
        )
        has_key = app.gateway.authentication == "keys"
        if line := _curl(specs, controller.url, has_key=has_key):
            with_key = ", with the key in MULTIWORLD_API_KEY" if has_key else ""
            console.print(f"  try{with_key}: {line}", soft_wrap=True, markup=False)
        where = "" if state is None else f" --state {shlex.quote(str(state))}"
        console.print(
            f"  Ctrl-C ends the service; `multiworld status{where}` shows its "
            "processes",
            soft_wrap=True,
            markup=False,
        )

    def progress(text: str) -> None:
        if not as_json and not verbose:
            console.print(f"  {text}", soft_wrap=True, markup=False, highlight=False)

    def prepare() -> None:
        if api_key is not None:
            store_key(folder.path, api_key)

    waiting = fork_waiting() if app.launcher in LAUNCHERS else None
    code = asyncio.run(
        run_service(app, folder, up, progress, waiting, fetched_at, prepare)
    )
    if not as_json:
        console.print(f"{app.app} has ended")
    sys.exit(code)
