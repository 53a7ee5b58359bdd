"""All routes of a gateway, in one table."""

from __future__ import annotations

from multiworld.serve.gateway.http import health
from multiworld.serve.gateway.http.openapi import METRICS
from multiworld.serve.gateway.http.route import Needs, Route, Tag
from multiworld.serve.gateway.openai import schemas
from multiworld.serve.gateway.openai.completion_answers import STREAM_PATH
from multiworld.serve.gateway.openai.embeddings import embeddings
from multiworld.serve.gateway.openai.generated_text import (
    chat,
    completions,
    detokenize,
    tokenize,
)
from multiworld.serve.gateway.openai.kept_streams import cancel_stream, read_stream
from multiworld.serve.gateway.openai.listed_models import listed_model, listed_models
from multiworld.serve.gateway.openai.triton_generate import generate, generate_stream
from multiworld.serve.gateway.openinference import models
from multiworld.serve.gateway.openinference.inference import INFER, infer

NOTHING, OPERATOR, TENANT, BODY = Needs
HEALTH, INFERENCE, OPENAI = Tag

MODEL = "/v2/models/{name}[/versions/{version}]"

ROUTES = (
    # Health.
    Route("GET", "/", health.root, NOTHING, HEALTH, is_shown=False),
    Route("GET", "/health", health.health, NOTHING, HEALTH),
    Route("GET", "/v2/health/live", health.live, NOTHING, HEALTH),
    Route("GET", "/v2/health/ready", health.ready, NOTHING, HEALTH),
    Route("GET", "/load", health.load, NOTHING, HEALTH),
    Route("GET", "/version", health.version, NOTHING, HEALTH),
    Route("GET", "/metrics", health.metrics, OPERATOR, HEALTH, METRICS),
    # OpenAI.
    Route("GET", "/v1/models", listed_models, TENANT, OPENAI),
    Route("GET", "/v1/models/{name}", listed_model, TENANT, OPENAI),
    Route("POST", "/v1/embeddings", embeddings, BODY, OPENAI, schemas.EMBEDDINGS),
    Route("POST", "/v1/chat/completions", chat, BODY, OPENAI, schemas.CHAT),
    Route("POST", "/v1/completions", completions, BODY, OPENAI, schemas.COMPLETION),
    Route(
        "GET",
        f"{STREAM_PATH}{{id}}",
        read_stream,
        TENANT,
        OPENAI,
        schemas.STREAM,
    ),
    Route(
        "POST",
        f"{STREAM_PATH}{{id}}/cancel",
        cancel_stream,
        TENANT,
        OPENAI,
    ),
    Route("POST", "/tokenize", tokenize, BODY, OPENAI, schemas.TOKENIZE),
    Route("POST", "/detokenize", detokenize, BODY, OPENAI, schemas.DETOKENIZE),
    # The Open Inference Protocol.
    Route("GET", "/v2", models.server, NOTHING, INFERENCE),
    Route("GET", "/v2/models", models.listed, TENANT, INFERENCE),
    Route("GET", MODEL, models.metadata, TENANT, INFERENCE),
    Route("GET", f"{MODEL}/ready", models.ready, TENANT, INFERENCE),
    Route("POST", f"{MODEL}/infer", infer, BODY, INFERENCE, INFER),
    # Triton's extensions of the protocol.
    Route("GET", f"{MODEL}/config", models.config, TENANT, INFERENCE),
    Route("POST", f"{MODEL}/generate", generate, BODY, INFERENCE, schemas.GENERATE),
    Route(
        "POST",
        f"{MODEL}/generate_stream",
        generate_stream,
        BODY,
        INFERENCE,
        schemas.GENERATE_STREAM,
    ),
    Route("POST", "/v2/repository/index", models.index, TENANT, INFERENCE),
    *(
        Route(method, path, models.absent, NOTHING, INFERENCE, is_shown=False)
        for method, path in (
            ("GET", "/v2/models/stats"),
            ("GET", "/v2/models/{name}/stats"),
            ("POST", "/v2/repository/models/{name}/{action}"),
        )
    ),
)
