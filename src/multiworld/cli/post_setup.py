"""``m8d-post-setup``, which patched PyTorch in pymultiworld and does nothing here."""

from __future__ import annotations

import click

from multiworld.cli.doctor import examine, report


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("patch_file", required=False)
def command(patch_file: str | None) -> None:
    """Report that no patch is needed, and check the installation.

    PATCH_FILE is accepted, for scripts that pass one, and ignored.
    """
    click.echo("multiworld works with PyTorch as it is: no patch is needed.")
    report(examine())


def main() -> None:
    """Run the command; entry point of the console script; exits with 0."""
    command()
