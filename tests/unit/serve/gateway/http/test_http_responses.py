"""HTTP responses: error formats and deadlines."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from starlette.requests import Request

from multiworld.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelFailedError,
    NoReplicaError,
    OverloadedError,
    RequestPoisonedError,
    ServeError,
    UnauthorizedError,
    UnknownModelError,
)
from multiworld.serve.gateway.http.body_limits import TooLargeError
from multiworld.serve.gateway.http.http_responses import (
    error_response,
    json_response,
    openai_error_response,
    timeout_of,
)


def request(**headers: str) -> Request:
    encoded = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": encoded})


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequestError("t"), 400, "invalid_request_error", None),
        (TooLargeError("t"), 413, "invalid_request_error", None),
        (UnauthorizedError("t"), 401, "invalid_request_error", "invalid_api_key"),
        (UnknownModelError("t"), 404, "invalid_request_error", "model_not_found"),
        (OverloadedError("t"), 429, "requests", "rate_limit_exceeded"),
        (
            OverloadedError("t", limit="tpm_limit"),
            *(429, "tokens", "rate_limit_exceeded"),
        ),
        (
            OverloadedError("t", limit="tokens_per_day"),
            *(429, "insufficient_quota", "insufficient_quota"),
        ),
        (ModelFailedError("t"), 500, "server_error", "model_failed"),
        (RequestPoisonedError("t"), 500, "server_error", "poison_request"),
        (NoReplicaError("t"), 503, "server_error", "no_replica"),
        (DeadlineExceededError("t"), 504, "server_error", "deadline_exceeded"),
        (ServeError("t"), 500, "server_error", "internal_error"),
    ],
)
def test_errors_in_both_forms(
    error: ServeError, status: int, kind: str, code: str | None
) -> None:
    plain, openai = error_response(error), openai_error_response(error)
    assert plain.status_code == openai.status_code == status
    assert orjson.loads(plain.body) == {"error": "t"}
    param = "model" if isinstance(error, UnknownModelError) else None
    found = {"message": "t", "type": kind, "param": param, "code": code}
    assert orjson.loads(openai.body) == {"error": found}
    for answer in (plain, openai):
        is_unauthorized = isinstance(error, UnauthorizedError)
        assert ("www-authenticate" in answer.headers) == is_unauthorized


@pytest.mark.parametrize(
    ("after_s", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (90, "90")]
)
def test_retry_after_is_in_whole_seconds_and_never_zero(
    after_s: float, header: str
) -> None:
    """After 0 seconds the client would retry at once."""
    found = error_response(OverloadedError("t", retry_after_s=after_s))
    assert found.headers["retry-after"] == header


def test_text_of_an_error_cannot_break_its_json() -> None:
    """It may quote what the client sent."""
    text = 'a "quoted" \\ line\n\x00 €'
    assert orjson.loads(error_response(ServeError(text)).body) == {"error": text}
    assert json_response({}, 200, {"x-a": "b"}).headers["x-a"] == "b"


@pytest.mark.parametrize(
    ("parameters", "header", "seconds"),
    [
        ({}, None, None),
        ({}, "0.5", 0.5),
        ({"timeout_s": 2}, "0.5", 2.0),
        ({"timeout": 1}, None, 1e-6),
        ({"timeout": 86_400_000_000}, None, 86400.0),
    ],
)
def test_timeout_is_taken_from_parameters_then_the_header(
    parameters: dict[str, Any], header: str | None, seconds: float | None
) -> None:
    """Triton's ``timeout`` comes last and is in microseconds."""
    headers = {} if header is None else {"x_timeout_s": header}
    assert (
        timeout_of(
            request(**headers), parameters.get("timeout_s"), parameters.get("timeout")
        )
        == seconds
    )


@pytest.mark.parametrize(
    ("parameters", "header"),
    [
        ({"timeout": 0}, None),
        ({"timeout": -1}, None),
        ({"timeout": True}, None),
        ({"timeout": "soon"}, None),
        ({"timeout": 10**15}, None),
        ({"timeout": 10**400}, None),
        ({"timeout_s": 10**400}, None),
        ({"timeout_s": float("nan")}, None),
        ({"timeout_s": [1]}, None),
        ({}, "1e999"),
        ({}, "-0"),
        ({}, "1,5"),
    ],
)
def test_impossible_timeout_is_refused(
    parameters: dict[str, Any], header: str | None
) -> None:
    headers = {} if header is None else {"x_timeout_s": header}
    with pytest.raises(InvalidRequestError, match="is not valid; give seconds"):
        timeout_of(
            request(**headers), parameters.get("timeout_s"), parameters.get("timeout")
        )
