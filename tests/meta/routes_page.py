"""Writer of ``docs/reference/routes.md``: ``python -m tests.meta.routes_page``."""

from __future__ import annotations

from pathlib import Path

from multiworld.serve.gateway.http.route import Needs, Route, Tag
from multiworld.serve.gateway.http_routes import ROUTES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "routes.md"

HEAD = """# Routes of a gateway

Each gateway serves these routes. `/openapi.json` describes them with every field, and
`/docs` shows that as a page. The part of a path in brackets is optional; a version must
be the active one. `GET` includes `HEAD`. Keys are needed only if
[tenants](../serve/tenants.md) are on.
"""

TITLES = {
    Tag.OPENAI: "OpenAI's API, and tokens",
    Tag.INFERENCE: "The Open Inference Protocol, and Triton's extensions",
    Tag.HEALTH: "Health and metrics",
}

NEEDS = {
    Needs.NOTHING: "nothing",
    Needs.OPERATOR: "an operator's key",
    Needs.TENANT: "a key",
    Needs.BODY: "a key; counts towards the tenant's limits",
}


def page() -> str:
    parts = [HEAD]
    for tag, title in TITLES.items():
        parts.append(f"\n## {title}\n\n| route | needs | does |\n|---|---|---|\n")
        parts += [_row(one) for one in ROUTES if one.tag is tag and one.is_shown]
    return "".join(parts)


def _row(route: Route) -> str:
    summary, _ = route.summary_and_description
    return f"| `{route.method} {route.path}` | {NEEDS[route.needs]} | {summary} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
