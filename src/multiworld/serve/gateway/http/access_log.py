"""The access log: a line for each answered request."""

from __future__ import annotations

import logging

from multiworld.log_format import REQUEST
from multiworld.serve.gateway.http.http_request import AnyRequest

logger = logging.getLogger("multiworld.access")


def log_access(request: AnyRequest, tenant: str, status: int, took_s: float) -> None:
    # Log the path as the client sent it: a decoded path could contain line breaks.
    method, path = request.scope["method"], request.scope["raw_path"].decode("ascii")
    text, number = "%s %s %s %s %d %.3f s", REQUEST.get()
    fields = {
        "tenant": tenant,
        "method": method,
        "path": path,
        "status": status,
        "seconds": round(took_s, 6),
    }
    logger.info(
        text, number, tenant, method, path, status, took_s, extra={"fields": fields}
    )
