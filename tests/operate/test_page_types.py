"""The page's modules, checked by TypeScript's compiler where there is npm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from multiworld.serve.dashboard.server import PAGE
from tests.operate.typescript import errors_of, install, needs_npm

OPTIONS = (
    *("--noEmit", "--allowJs", "--checkJs", "--noUnusedLocals"),
    *("--target", "es2022", "--module", "es2022", "--moduleResolution", "bundler"),
    *("--lib", "dom,dom.iterable,es2022"),
)

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300), needs_npm]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("compiler"))


def checked(compiler: Path, page: Path) -> str:
    """Return what the compiler says of the page's modules."""
    files = sorted(map(str, page.glob("*.js")))
    return errors_of(compiler, page, *OPTIONS, *files)


def test_modules_have_no_wrong_names_and_types(compiler: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    shutil.copytree(PAGE, page)
    types = Path(__file__).with_name("htm-preact.d.ts")
    shutil.copy(types, page / "vendor" / types.name)
    assert checked(compiler, page) == ""
    main = page / "main.js"
    main.write_text(main.read_text().replace("seconds(", "second("))
    assert "Cannot find name 'second'" in checked(compiler, page)
