"""The figures of the documents are those of ``benchmarks/results``."""

from __future__ import annotations

import re

import pytest

from benchmarks.figures import (
    BLOCK,
    FIGURES,
    PAGES,
    ROOT,
    TABLE,
    committed,
    current,
    filled,
    mended,
)

OLD = {"kills": "40", "lost": "0", "range": "1 to 1.8"}
NEW = {"kills": "52", "lost": "1", "range": "1.2 to 2"}


def problems(block: str, names: str = "kills, lost") -> list[str]:
    """Return what is wrong with a block that should have the figures of ``OLD``."""
    page = f"<!-- figures: {names} -->\n{block}\n"
    same, found = mended(page, OLD, OLD)
    assert same == page
    return found


@pytest.mark.parametrize("name", PAGES)
def test_page_has_the_figures_of_the_results(name: str) -> None:
    """Its tables and figures are what the generator writes."""
    page, values = (ROOT / name).read_text(), current()
    assert mended(filled(page), values, values) == (page, []), (
        "run: python -m benchmarks.figures"
    )


@pytest.mark.parametrize("name", PAGES)
def test_every_comment_is_one_that_is_checked(name: str) -> None:
    """A misspelt comment would leave its figures unchecked."""
    page = (ROOT / name).read_text()
    comments = re.findall(r"<!--(?! end -->| commands -->| metrics )", page)
    assert len(comments) == len(TABLE.findall(page)) + len(BLOCK.findall(page))


def test_every_figure_is_used() -> None:
    """By one of the pages."""
    blocks = [b for name in PAGES for b in BLOCK.finditer((ROOT / name).read_text())]
    assert set(FIGURES) == {n for b in blocks for n in re.findall(r"\w+", b[1])}


def test_unknown_names_are_refused() -> None:
    """Figures that are not defined, and tables without results."""
    with pytest.raises(ValueError, match="nonsense"):
        problems("40", "kills, nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        filled("<!-- p2p: nonsense -->\n<!-- end -->")


@pytest.mark.parametrize(
    "block",
    [
        "In 40 kills, 0 were lost.",
        "| kills | lost |\n|---|---|\n| **40** | 0, by HTTP |",
        "- 40 kills\n- (n = 3): 0.",
    ],
)
def test_values_in_order_pass(block: str) -> None:
    """In a paragraph, a table and a list."""
    assert problems(block) == []


@pytest.mark.parametrize(
    "block",
    [
        "In 41 kills, 0 were lost.",
        "Of 0 lost, in 40 kills.",
        "In 40 kills, none was lost.\n\nIn the next paragraph, 0 were.",
        "In 40 kills, 0 were lost.\nOf 3, 0 were.",
    ],
    ids=["wrong", "order", "another block", "ambiguous"],
)
def test_other_blocks_fail(block: str) -> None:
    """Each value is there once, and in order."""
    assert len(problems(block)) == 1


@pytest.mark.parametrize("text", ["40", "0.5", "1,0", "-0", "x0", "0,5", "0-3", "0s"])
def test_value_within_a_longer_one_does_not_count(text: str) -> None:
    """Digits, points, commas, signs and letters continue a value."""
    assert problems(f"It is {text} here.", "lost") == [
        "2: write 0 for lost: 0 does not occur exactly once here"
    ]


def test_new_values_replace_old_ones() -> None:
    """Only where the figures are, even over the end of a line; once is enough."""
    page = (
        "0\n\n<!-- figures: kills,\nlost, range -->\n40 kills: 0, 1 to\n1.8 s.\n\n40\n"
    )
    wanted = page.replace("40 kills: 0, 1 to\n1.8", "52 kills: 1, 1.2 to 2")
    assert mended(page, OLD, NEW) == (wanted, [])
    assert mended(wanted, OLD, NEW) == (wanted, [])


def test_new_figure_needs_no_old_value() -> None:
    """It must be there already."""
    assert mended("<!-- figures: lost -->\n1 s\n", {}, NEW)[1] == []


def test_value_that_is_not_found_is_reported() -> None:
    """With the line from which it was sought; its block stays as it was."""
    page = "<!-- figures: kills, lost -->\n\n40 kills,\n3 lost\n"
    assert mended(page, {"kills": "40"}, NEW) == (
        page,
        ["3: write 1 for lost: 1 does not occur exactly once here"],
    )


def test_old_and_new_value_in_one_block_are_ambiguous() -> None:
    """Neither is taken for the other."""
    page = "<!-- figures: kills -->\n40 kills in 52 s\n"
    same, found = mended(page, OLD, NEW)
    assert same == page
    assert len(found) == 1


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the last commit")
def test_no_page_has_values_of_the_last_commit() -> None:
    """A new value may also be the number beside an old one, which must not count."""
    old, new = committed("HEAD"), current()
    for name in PAGES:
        page = (ROOT / name).read_text()
        assert mended(page, old, new) == (page, []), name
