"""The tutorials and the how-to, run command by command."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

from multiworld.demo import smollm2
from tests.ports import free_port
from tests.serve.harness import ROOT
from tests.tiers import some
from tests.tiny_decoder import save_decoder

PAGES = {
    name: ROOT / "docs" / "serve" / f"{name}.md"
    for name in ("tutorial", "howto", "llm-tutorial")
}
PORT = "8000"
"""The port in the page; each run takes a free one instead."""

BLOCK_S = 90.0
"""Seconds that the commands of one block, and then their output, may take."""

LAYERS = 32
"""Layers of the small decoder: a token then takes some tens of milliseconds."""

END_S = 30.0
"""Seconds that the processes of the service may take to exit."""

LOOK_S = 0.05
"""Seconds between two checks of what has no event: files and other processes."""

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\w+\.\w+)\n")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
FRAME = str.maketrans(dict.fromkeys("│┃┌┐└┘├┤┬┴┼─━┏┓┗┛┡┩╇┳", " "))
"""Characters that tables are drawn with, as a translation to spaces."""

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True, slots=True)
class Step:
    """One block of commands, and the lines that the page shows as its output."""

    commands: str
    output: tuple[str, ...]


def steps_of(page: str) -> list[Step]:
    """Return the steps of a page, each with the output shown for it.

    Blocks of ``sh`` are run, a block of ``text`` is the output of the one before it,
    and any other block that begins with ``# NAME`` is a file that the reader writes.
    Commands that cannot run here are in ``bash``, and output that depends on the
    weights of a model in ``console``.
    """
    steps: list[Step] = []
    for kind, content in FENCE.findall(page):
        if kind == "sh":
            steps.append(Step(content, ()))
        elif kind == "text":
            assert steps, f"output of no command: {content}"
            steps[-1] = Step(steps[-1].commands, tuple(content.splitlines()))
        elif (name := FILE.match(content)) is not None:
            steps.append(
                Step(f"cat > {name[1]} <<'END OF FILE'\n{content}END OF FILE\n", ())
            )
    return steps


VALUE = re.compile(r'(?<=[: ])(?:"[^"\n]*"|\d+)(?=[,}])')


def pattern_of(line: str) -> re.Pattern[str]:
    """Return a pattern of a line of output in which figures and spaces may differ."""
    words = line.translate(FRAME).split()
    parts = [NUMBER.sub("\0", word) for word in words]
    return re.compile(
        r"\s+".join(re.escape(part).replace("\0", NUMBER.pattern) for part in parts)
    )


def missing_line(lines: tuple[str, ...], output: str) -> str | None:
    """Return the first line that the output lacks; their order counts."""
    output, at = output.translate(FRAME), 0
    for line in lines:
        found = pattern_of(line.removesuffix("…").strip()).search(output, at)
        if found is None:
            return line
        at = found.end()
    return None


class Terminal:
    """One bash in one folder, as the reader has it; it exits if a command fails.

    Every process that is started in it is known by its environment, however it was
    forked, and is killed at the end.
    """

    def __init__(self, folder: Path, home: Path | None = None) -> None:
        self._folder, self._count = folder, 0
        self._mark = f"MULTIWORLD_STATE={folder / 'state'}"
        work, tools = folder / "work", folder / "bin"
        work.mkdir()
        tools.mkdir()
        _program(
            tools / "multiworld",
            f'exec "{sys.executable}" -m multiworld.cli.main "$@"',
        )
        # What the page installs is what is tested; nothing is fetched.
        _program(tools / "python", f'exec "{sys.executable}" "$@"')
        _program(tools / "pip", "test \"$*\" = 'install CHECKOUT[demo]'")
        name, _, state = self._mark.partition("=")
        self._log = (folder / "terminal.txt").open("wb")
        self._bash = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=work,
            env={
                **os.environ,
                **({} if home is None else {"HOME": str(home)}),
                name: state,
                "PATH": f"{tools}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT / "src"),
                "COLUMNS": "80",
            },
            start_new_session=True,
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        limit = time.monotonic() + END_S
        while (found := list(self.processes())) and time.monotonic() < limit:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._bash.poll()
            time.sleep(LOOK_S)
        self._bash.wait(END_S)
        assert self._bash.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._bash.stdin.close()
        self._log.close()

    def run(self, step: Step) -> None:
        """Type the commands of a step, and wait for them and their output."""
        self._count += 1
        begin = len(self.output())
        block = self._folder / f"block{self._count}.sh"
        done = self._folder / f"block{self._count}.done"
        block.write_text(step.commands)
        assert self._bash.stdin is not None
        self._bash.stdin.write(f". '{block}' < /dev/null; touch '{done}'\n".encode())
        self._bash.stdin.flush()
        limit = time.monotonic() + BLOCK_S
        while not done.exists():
            assert self._bash.poll() is None, self._failed(step, "failed", begin)
            assert time.monotonic() < limit, self._failed(step, "hangs", begin)
            time.sleep(LOOK_S)
        # Commands in the background may print later.
        while (line := missing_line(step.output, self.output()[begin:])) is not None:
            said = f"does not print {line!r}"
            assert time.monotonic() < limit, self._failed(step, said, begin)
            time.sleep(LOOK_S)

    def output(self) -> str:
        return (self._folder / "terminal.txt").read_text(errors="replace")

    def close(self) -> None:
        """Leave the terminal; fail if a process that was started in it stays."""
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        limit = time.monotonic() + END_S
        while (found := list(self.processes())) or self._bash.poll() is None:
            assert time.monotonic() < limit, f"still there: {found}"
            time.sleep(LOOK_S)

    def processes(self) -> Iterator[int]:
        """Yield the ids of bash and of all that was started in it."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has just exited, or is another user's
            if self._mark.encode() in environment:
                yield int(entry.name)

    def _failed(self, step: Step, how: str, begin: int) -> str:
        return f"{step.commands}\n{how}; the terminal:\n{self.output()[begin:][-4000:]}"


def _program(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


def run_page(name: str, folder: Path, home: Path | None = None) -> None:
    page = PAGES[name].read_text().replace(PORT, str(free_port()))
    steps = steps_of(page)
    assert len(steps) > 10
    with Terminal(folder, home) as terminal:
        for step in steps:
            terminal.run(step)
        terminal.close()


@pytest.mark.parametrize("name", some(["tutorial", "howto"], 1))
def test_page_runs(name: str, tmp_path: Path) -> None:
    run_page(name, tmp_path)


@pytest.mark.heavy
def test_tutorial_of_a_language_model_runs(tmp_path: Path) -> None:
    """A random decoder stands in for SmolLM2, so slow that kills come mid-stream."""
    home = tmp_path / "home"
    save_decoder(
        home / ".cache" / "multiworld" / "models" / smollm2.NAME,
        num_hidden_layers=LAYERS,
        max_position_embeddings=1024,
    )
    run_page("llm-tutorial", tmp_path, home)


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not (smollm2.folder() / "config.json").exists(),
    reason="needs SmolLM2; `multiworld demo` fetches it",
)
def test_tutorial_of_a_language_model_runs_with_smollm2(tmp_path: Path) -> None:
    """The output differs by processor, but not its form."""
    run_page("llm-tutorial", tmp_path)
    page = PAGES["llm-tutorial"].read_text()
    shown = [content for kind, content in FENCE.findall(page) if kind == "console"]
    assert len(shown) == 3
    printed = (tmp_path / "terminal.txt").read_text(errors="replace")
    for content in shown:
        form = re.escape(VALUE.sub("\0", content)).replace("\0", VALUE.pattern)
        assert re.search(form, printed), content


@pytest.mark.parametrize("name", ["tutorial", "llm-tutorial"])
def test_every_command_of_a_tutorial_is_run(name: str) -> None:
    page = PAGES[name].read_text()
    assert {kind for kind, _ in FENCE.findall(page)} <= {"sh", "text", "console"}
    assert page.count("```") == 2 * len(FENCE.findall(page))
    assert not re.findall(r"^ {4}\S", FENCE.sub("", page), re.MULTILINE)


@pytest.mark.parametrize(
    ("commands", "output", "said"),
    [
        ("false\n", "", "failed"),
        ("false | true\n", "", "failed"),
        ("echo ready &\n", "never ready", "does not print"),
        ("sleep 60\n", "", "hangs"),
    ],
)
def test_step_that_is_wrong_is_found(
    commands: str,
    output: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{__name__}.BLOCK_S", 1.0)
    with Terminal(tmp_path) as terminal:
        step = Step(f"sleep 60 &\n{commands}", tuple(output.splitlines()))
        with pytest.raises(AssertionError, match=said):
            terminal.run(step)
    assert not list(terminal.processes())


def test_figures_of_the_output_may_differ() -> None:
    """Words may not differ."""
    shown = ("│ failed │ 0 │", "minilm/1/4: 2.5 ms")
    assert missing_line(shown, "failed   7\nx\nminilm/2/11:\n 3 ms") is None
    assert missing_line(shown, "answered 7\nminilm/2/11: 3 ms") == shown[0]
    assert missing_line(shown, "minilm/2/11: 3 ms\nfailed 7") == shown[1]
