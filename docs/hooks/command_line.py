"""Write the reference of the ``multiworld`` command from its own help.

The MkDocs hook replaces ``<!-- commands -->`` in a page. Commands are found through
``list_commands`` and ``get_command``, so a group may load them when they are needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import click

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the commands where the mark is."""
    if MARK not in markdown:
        return markdown
    from multiworld.cli.main import cli

    return markdown.replace(MARK, "\n".join(_group(cli, None, "multiworld", 2)))


def _group(
    group: click.Group, parent: click.Context | None, name: str, level: int
) -> Iterator[str]:
    context = click.Context(group, parent, info_name=name, show_default=True)
    for inner in group.list_commands(context):
        command = group.get_command(context, inner)
        if command is None or command.hidden:
            continue
        yield from _command(command, context, inner, level)
        if isinstance(command, click.Group):
            yield from _group(command, context, inner, level + 1)


def _command(
    command: click.Command, parent: click.Context, name: str, level: int
) -> Iterator[str]:
    context = click.Context(command, parent, info_name=name)
    words = context.command_path
    yield f"{'#' * level} {words} {{: #{words.replace(' ', '-')} }}\n"
    yield from _paragraphs(inspect.cleandoc(command.help or ""))
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{words} {usage}\n```\n"
    records = [
        record
        for option in command.get_params(context)
        if "--help" not in option.opts
        and (record := option.get_help_record(context)) is not None
    ]
    if records:
        yield "| option | meaning |\n|---|---|"
        for names, meaning in records:
            yield f"| `{' '.join(names.split())}` | {_cell(meaning)} |"
        yield ""


def _paragraphs(text: str) -> Iterator[str]:
    """Yield a help text as Markdown; ``\\b`` begins lines that stay as they are."""
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        if lines and lines[0].strip() == "\b":
            yield "```text\n" + "\n".join(lines[1:]) + "\n```\n"
        else:
            yield paragraph.replace("<", "&lt;") + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
