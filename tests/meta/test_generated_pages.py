"""Pages that are generated from the code."""

from __future__ import annotations

from tests.meta import metrics_page, routes_page, spec_page


def test_page_of_the_spec_is_what_the_schema_says() -> None:
    assert spec_page.PAGE.read_text() == spec_page.page(), (
        "run: python -m tests.meta.spec_page"
    )


def test_page_of_routes_is_what_the_table_says() -> None:
    assert routes_page.PAGE.read_text() == routes_page.page(), (
        "run: python -m tests.meta.routes_page"
    )


def test_page_of_metrics_is_what_a_gateway_shows() -> None:
    text = metrics_page.PAGE.read_text()
    assert text == metrics_page.page(text), "run: python -m tests.meta.metrics_page"
    for row in metrics_page.rows():
        assert text.count(f"| `{row.name}` | {row.kind} |") == 1, row.name
