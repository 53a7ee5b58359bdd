"""Responses of the admin interface."""

from __future__ import annotations

from fastapi import Response

from multiworld.serve.control.answers import Answer, encode


def respond(answer: Answer, status: int = 200) -> Response:
    return Response(encode(answer), status, media_type="application/json")
