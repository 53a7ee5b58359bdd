"""The page's modules, checked by TypeScript's compiler where there is npm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from multiworld.serve.dashboard.server import PAGE

HANG_S = 240.0
COMPILER = "typescript@5.6.3"
OPTIONS = (
    *("--noEmit", "--allowJs", "--checkJs", "--noUnusedLocals"),
    *("--target", "es2022", "--module", "es2022", "--moduleResolution", "bundler"),
    *("--lib", "dom,dom.iterable,es2022"),
)

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm here"),
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiler")
    command = ["npm", "install", "--silent", "--no-save", COMPILER]
    done = subprocess.run(command, cwd=folder, timeout=HANG_S, check=False)
    if done.returncode:
        pytest.skip("npm cannot fetch the compiler")
    return folder / "node_modules" / ".bin" / "tsc"


def checked(compiler: Path, page: Path) -> str:
    """Return what the compiler says of the page's modules."""
    files = sorted(map(str, page.glob("*.js")))
    done = subprocess.run(
        [str(compiler), *OPTIONS, *files],
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    return done.stdout


def test_modules_have_no_wrong_names_and_types(compiler: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    shutil.copytree(PAGE, page)
    types = Path(__file__).with_name("htm-preact.d.ts")
    shutil.copy(types, page / "vendor" / types.name)
    assert checked(compiler, page) == ""
    main = page / "main.js"
    main.write_text(main.read_text().replace("seconds(", "second("))
    assert "Cannot find name 'second'" in checked(compiler, page)
