"""The figures of the documents are those of ``benchmarks/results``."""

from __future__ import annotations

import re

import pytest

from benchmarks.figures import FIGURE, FIGURES, PAGES, ROOT, TABLE, filled


@pytest.mark.parametrize("name", PAGES)
def test_page_has_the_figures_of_the_results(name: str) -> None:
    """Its tables and figures are what the generator writes."""
    page = (ROOT / name).read_text()
    assert page == filled(page), "run: python -m benchmarks.figures"
    assert FIGURE.search(page) or TABLE.search(page)
    marks = re.findall("<!--fig:", page)
    assert len(marks) == len(FIGURE.findall(page)), "a mark is not closed"


def test_every_figure_is_used() -> None:
    """By one of the pages."""
    text = "".join((ROOT / name).read_text() for name in PAGES)
    assert set(FIGURES) == {match[1] for match in FIGURE.finditer(text)}


def test_mark_of_an_unknown_figure_is_refused() -> None:
    """By its name; so are tables without results."""
    with pytest.raises(ValueError, match="nonsense"):
        filled("<!--fig:nonsense-->1<!--/fig-->")
    with pytest.raises(ValueError, match="nonsense"):
        filled("<!-- p2p: nonsense -->\n<!-- end -->")
