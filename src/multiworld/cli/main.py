"""The ``multiworld`` command. ``multiworld NAME`` is the function ``NAME`` in
``cli/NAME.py``, imported when it is called: ``--help`` needs no optional package."""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import logging
import os
import sys
from typing import Any

import click

from multiworld import __version__
from multiworld.errors import MultiWorldError
from multiworld.log_format import configure

# One line of help for each command, by group, in the order of ``--help``.
GROUPS = {
    "Run": {
        "demo": "Stream chats from a model in three stages, and inject faults.",
        "fetch": "Fetch a model before it is served.",
        "serve": "Serve the models of a spec, or one model, until Ctrl-C.",
        "chat": "Chat with a served model in the terminal.",
        "shutdown": "Shut a service down after it has answered the accepted requests.",
        "store": "Run the store at which members of worlds meet.",
        "doctor": "Check this installation and this machine.",
    },
    "Inspect": {
        "status": "Show the processes of a service and its last events.",
        "dashboard": "Show a service on a web page.",
        "explain": "Show what is wrong, and which process waits for which.",
        "streams": "Show the live streams, those in trouble first.",
        "logs": "Print the end of the logs of processes.",
        "nodes": "Show the machines of a service, or this machine if none runs.",
        "resources": "Show the resources that every replica books and uses.",
        "audit": "Show the last administrative operations and their outcomes.",
    },
    "Change": {
        "scale": "Set the number of replicas of a stage.",
        "update": "Update a running service to another spec, without a pause.",
        "cancel": "End the streams of a request.",
        "drain": "Replace one process without losing a request.",
        "tenants": "Manage tenants, their keys and limits; show their usage.",
        "chaos": "Inject a fault into a replica or a gateway.",
    },
    "Plan and measure": {
        "plan": "Show which replicas a spec would start, and where; start nothing.",
        "schema": "Print the JSON Schema of a spec, for editors.",
        "partition": "Measure each part of a model, and propose where to cut it.",
        "profile": "Measure the time and memory that the stages of a model need.",
        "simulate": "Replay a trace of requests against autoscaling policies.",
        "load": "Send requests at a steady rate, and summarise the answers.",
    },
}

COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}

EXAMPLES = """\b
Examples:
  multiworld demo                      chats that survive kills
  multiworld serve app.yaml            serve the models of a spec
  multiworld status                    what runs, and what happened last
  multiworld chaos kill m back         kill a replica of a stage
  multiworld chaos kill gateway        kill a gateway
  multiworld scale m back 3            three replicas of a stage"""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EIO}  # errors of a full or failing disk

# The extra of the package that a command needs; all other commands need ``serve``.
EXTRAS = {"demo": "demo"}


def _can_print() -> bool:
    """Return whether stdout accepts more; if so, the error came from another file."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return False
    return True


class Commands(click.Group):
    """The group of commands; prints errors of this package as messages."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MultiWorldError as error:
            raise click.ClickException(str(error)) from error
        except RuntimeError as error:
            # ``expanduser`` raises RuntimeError if the user has no home directory.
            if "home directory" not in str(error):
                raise
            raise click.ClickException(
                f"{error} A path begins with ~; give an absolute path instead"
            ) from error
        except OSError as error:
            if error.errno not in FULL or _can_print():
                if error.filename is None:
                    raise
                raise click.ClickException(
                    f"{str(error.filename)[:400]}: {error.strerror}"
                ) from error
            # Python flushes stdout again at exit, which would fail, too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise click.ClickException(
                f"cannot write the output: {error.strerror}"
            ) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        # Factories are importable from the current folder, as with `python -m`.
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            module = importlib.import_module(f"multiworld.cli.{cmd_name}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("multiworld"):
                raise
            extra = EXTRAS.get(cmd_name, "serve")
            raise click.ClickException(
                f"multiworld {cmd_name} needs {error.name}: "
                f"pip install 'multiworld-elastic[{extra}]'"
            ) from error
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown one, suggest similar names."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            close = difflib.get_close_matches(args[0], COMMANDS)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(n.ljust(width), text) for n, text in group.items()]
                )


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=EXAMPLES,
)
@click.version_option(__version__, prog_name="multiworld")
def cli() -> None:
    """Serve models whose requests and streams survive the loss of any worker."""
    # M8D_LOG_LEVEL is pymultiworld's variable; programs may already set it.
    level = os.environ.get("M8D_LOG_LEVEL", "WARNING").upper()
    known = logging.getLevelNamesMapping()
    configure(os.environ, "controller", known.get(level, logging.WARNING))


def _open_closed() -> None:
    """Open /dev/null in place of standard streams that are closed (``>&-``).

    Otherwise, the next file or socket would take their numbers.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def main() -> None:
    """Run the command line; entry point of the console script."""
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Escape characters that its encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    cli()


if __name__ == "__main__":
    main()
