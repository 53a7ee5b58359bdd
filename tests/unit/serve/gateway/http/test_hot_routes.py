"""Hot routes: they answer as the FastAPI application does, which has the same paths."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from multiworld.serve.gateway.http.hot_routes import HotRoutes
from tests.unit.serve.gateway.fakes import Fake


@pytest.fixture
def app() -> HotRoutes:
    """Return an application whose two parts say who answers."""
    rest = FastAPI()

    @rest.post("/{path:path}")
    @rest.get("/{path:path}")
    async def other(path: str) -> Response:
        return Response(f"other {path}")

    async def hot(request: Request, name: str = "") -> Response:
        return Response(f"hot {name}")

    made = HotRoutes(rest)
    made.post("/v2/models/{name}/infer", hot)
    made.post("/v1/embeddings", hot)
    return made


@pytest.mark.parametrize(
    ("method", "path", "text"),
    [
        ("POST", "/v2/models/m/infer", "hot m"),
        ("POST", "/v2/models/a%20b/infer", "hot a b"),
        ("POST", "/v1/embeddings", "hot "),
        ("GET", "/v1/embeddings", "other v1/embeddings"),
        ("POST", "/v1/embeddings/", "other v1/embeddings/"),
        ("POST", "/v2/models/a/b/infer", "other v2/models/a/b/infer"),
        ("POST", "/v2/models//infer", "other v2/models//infer"),
        ("POST", "/v1xembeddings", "other v1xembeddings"),
    ],
)
async def test_only_whole_paths_of_posts_are_hot(
    app: HotRoutes, method: str, path: str, text: str
) -> None:
    """Everything else is the application's."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.request(method, path)
    assert answer.text == text


def test_every_hot_route_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """The FastAPI application has the same paths, so /docs shows them."""
    hot: set[str] = set()
    monkeypatch.setattr(HotRoutes, "post", lambda _, path, endpoint: hot.add(path))
    routes = Fake().app.app.routes
    assert hot
    assert hot <= {route.path for route in routes if hasattr(route, "path")}
