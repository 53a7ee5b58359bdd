"""The gateway, used by independent clients: Triton's, OpenAI's and plain HTTP."""

from __future__ import annotations

import gzip
import json
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from tests.serve.harness import WAIT_S, Served, body, served, spec_with
from tests.serve.models import FINE, SLEEP, expected

pytestmark = [
    pytest.mark.timeout(240),
    # Triton's client warns about itself when it is closed
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CONNECTIONS = 40

MINILM = {
    "version": "7",
    "factory": "multiworld.demo.minilm:model",
    "options": {"stages": 2},
    "stages": [{"name": "first"}, {"name": "second"}],
}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    certificate = authority.issue_cert("127.0.0.1")
    chain, key, ca = folder / "chain.pem", folder / "key.pem", folder / "ca.pem"
    certificate.private_key_pem.write_to_path(str(key))
    for part in certificate.cert_chain_pems:
        part.write_to_path(str(chain), append=True)
    authority.cert_pem.write_to_path(str(ca))
    spec = spec_with()
    spec["models"]["minilm"] = MINILM
    spec["gateway"] = {
        "port": 0,
        "max_body_mb": 1.0,
        "head_s": 2.0,
        "max_connections": CONNECTIONS,
        "tls_certificate": str(chain),
        "tls_key": str(key),
    }
    with served(folder, spec) as found:
        yield found


@pytest.fixture
def http(service: Served) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=str(service.folder / "ca.pem"))
    with httpx.Client(base_url=service.url, verify=context, timeout=WAIT_S) as client:
        yield client


INFER = "/v2/models/m/infer"


# Triton's client


@pytest.fixture
def client(service: Served) -> Iterator[triton.InferenceServerClient]:
    made = triton.InferenceServerClient(
        service.url.removeprefix("https://"),
        ssl=True,
        ssl_options={"ca_certs": str(service.folder / "ca.pem")},
    )
    yield made
    made.close()


def tensors(binary: bool, *values: float, kind: int = FINE) -> list[triton.InferInput]:
    x = triton.InferInput("x", [len(values)], "FP32")
    x.set_data_from_numpy(np.array(values, dtype=np.float32), binary_data=binary)
    code = triton.InferInput("code", [len(values)], "INT64")
    codes = np.full(len(values), kind, dtype=np.int64)
    code.set_data_from_numpy(codes, binary_data=binary)
    return [x, code]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_triton_infers(
    client: triton.InferenceServerClient, binary: bool, compression: str | None
) -> None:
    answer = client.infer(
        "m",
        tensors(binary, 1.0, 2.0),
        outputs=[triton.InferRequestedOutput("y", binary_data=binary)],
        request_id="mine",
        request_compression_algorithm=compression,
    )
    assert answer.as_numpy("y").tolist() == [expected(1.0), expected(2.0)]
    assert answer.get_response()["id"] == "mine"


def test_triton_reads_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    assert not client.is_model_ready("none")
    said = client.get_model_metadata("m")
    assert [i["name"] for i in said["inputs"]] == ["x", "code"]
    assert said["versions"] == ["1"]


def test_triton_understands_errors(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="unknown model 'none'"):
        client.infer("none", tensors(True, 1.0))
    with pytest.raises(InferenceServerException, match="takes the inputs x, code"):
        client.infer("m", tensors(True, 1.0)[:1])
    with pytest.raises(
        InferenceServerException, match="active version of this model is '1'"
    ):
        client.infer("m", tensors(True, 1.0), model_version="9")
    with pytest.raises(InferenceServerException, match="deadline"):
        client.infer("m", tensors(True, 1.0, kind=SLEEP), timeout=1)  # a microsecond


# OpenAI's client


@pytest.fixture
def ai(service: Served, http: httpx.Client) -> openai.OpenAI:
    base = f"{service.url}/v1"
    trusting: Any = http
    return openai.OpenAI(
        base_url=base, api_key="any", http_client=trusting, max_retries=0
    )


def test_openai_embeds(ai: openai.OpenAI) -> None:
    """Base64 is the default of OpenAI's client."""
    texts = ["one", "a longer text about something else"]
    packed = ai.embeddings.create(model="minilm", input=texts)
    plain = ai.embeddings.create(model="minilm", input=texts, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
        assert np.linalg.norm(one.embedding) == pytest.approx(1.0, abs=1e-4)
    assert plain.usage.total_tokens > 4


def test_openai_embeds_more_inputs_than_fit_the_queue(ai: openai.OpenAI) -> None:
    found = ai.embeddings.create(model="minilm", input=["a"] * 600)
    assert [row.index for row in found.data] == list(range(600))


def test_openai_lists_models_and_understands_errors(ai: openai.OpenAI) -> None:
    assert {model.id for model in ai.models.list()} == {"m", "minilm"}
    assert ai.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError, match="unknown model 'none'"):
        ai.embeddings.create(model="none", input="x")
    with pytest.raises(openai.BadRequestError, match="takes no text"):
        ai.embeddings.create(model="m", input="x")
    with pytest.raises(openai.BadRequestError, match="this model returns 384"):
        ai.embeddings.create(model="minilm", input="x", dimensions=128)
    with pytest.raises(openai.BadRequestError, match="none of them empty"):
        ai.embeddings.create(model="minilm", input=["x", ""])
    asked: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError, match="'m' generates no text"):
        ai.chat.completions.create(model="m", messages=asked)
    with pytest.raises(openai.NotFoundError, match="not found"):
        ai.responses.create(model="m", input="x")


# Anything else


@pytest.mark.parametrize(
    ("content", "headers", "status", "words"),
    [
        (b"{", {}, 400, "not valid JSON"),
        (b"\xff\xfe", {}, 400, "not valid JSON"),
        (b"null", {}, 400, "Expected `object`"),
        (b"[" * 100_000, {}, 400, "got `array`"),
        (b'{"x": ' + b"[" * 100_000, {}, 400, "not valid JSON"),
        (b"x" * 2_000_000, {}, 413, "max_body_mb"),
        (gzip.compress(b"x" * 2_000_000), {"content-encoding": "gzip"}, 413, "max_b"),
        (b"no gzip", {"content-encoding": "gzip"}, 400, "not valid gzip"),
        (b"{}", {"content-encoding": "br"}, 415, "send gzip"),
        (b"{}", {"inference-header-content-length": "9"}, 400, "at most 2"),
        (json.dumps(body(1.0)).encode(), {"x-timeout-s": "soon"}, 400, "timeout"),
        (json.dumps(body(1.0)).encode(), {"x-timeout-s": "-1"}, 400, "timeout"),
    ],
)
def test_bad_request_is_named_and_disturbs_nothing(
    http: httpx.Client, content: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    answer = http.post(INFER, content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]
    assert http.post(INFER, json=body(2.0)).status_code == 200


def test_rows_that_disagree_are_refused_and_leave_the_replica_alone(
    http: httpx.Client,
) -> None:
    asked = body(1.0)
    asked["inputs"][0].update(shape=[2], data=[1, 2])
    answer = http.post(INFER, json=asked)
    assert answer.status_code == 400
    assert "same number of rows" in answer.json()["error"]
    assert http.post(INFER, json=body(2.0)).status_code == 200


def test_values_that_the_model_rejects_are_a_client_error(
    http: httpx.Client,
) -> None:
    def ask(ids: list[int], mask: list[int]) -> httpx.Response:
        inputs = [
            {"name": name, "datatype": "INT64", "shape": [1, len(data)], "data": data}
            for name, data in (("input_ids", ids), ("attention_mask", mask))
        ]
        return http.post("/v2/models/minilm/infer", json={"inputs": inputs})

    assert ask([101, 102], [1, 1]).status_code == 200
    for ids, mask, words in (
        ([10**7], [1], "vocabulary has 0 to"),
        ([-1], [1], "vocabulary has 0 to"),
        ([101] * 513, [1] * 513, "at most 512"),
        ([101, 102], [1], "same shape"),
    ):
        answer = ask(ids, mask)
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]


def test_long_input_is_truncated_and_delays_no_other_request(
    http: httpx.Client,
) -> None:
    """It is truncated before it is encoded."""
    asked = {"model": "minilm", "input": "words " * 150_000}
    assert http.post("/v1/embeddings", json=asked).status_code == 200


def test_unknown_addresses_answer_in_each_protocols_form(http: httpx.Client) -> None:
    assert "see /docs" in http.get("/v2/nothing").json()["error"]
    assert "see /docs" in http.get("/v1/nothing").json()["error"]["message"]
    assert http.get(INFER).status_code == 405


def test_documentation_describes_the_bodies(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    for path in ("/v2/models/{name}/infer", "/v1/embeddings"):
        described = paths[path]["post"]
        assert described["requestBody"]["content"]["application/json"]["schema"]
        assert {"400", "429", "503", "504"} <= described["responses"].keys()
    page = http.get("/docs")
    assert page.status_code == 200
    sources = re.findall(r"(?:src|href)=\"([^\"]+)\"", page.text)
    assert any(source.endswith(".js") for source in sources)
    for source in sources:
        assert http.get(source).status_code == 200, "of this gateway, not of a CDN"


def test_metrics_are_prometheus(service: Served, http: httpx.Client) -> None:
    http.post(INFER, json=body(1.0))
    http.post("/v1/embeddings", json={"model": "minilm", "input": "x"})

    def samples() -> dict[tuple[str, Any], float]:
        text = http.get("/metrics").text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    found = samples()
    for model in ("m", "minilm"):
        labels = (("model", model), ("status", "200"))
        assert found["multiworld_requests_total", labels] >= 1

    def is_told() -> bool:
        return any(
            name == "multiworld_replica_requests_total"
            and dict(labels)["model"] == "minilm"
            and value > 0
            for (name, labels), value in samples().items()
        )

    service.until(is_told, "the replicas' own numbers")
    names = {name for name, _ in samples()}
    assert {
        "multiworld_batch_rows_sum",
        "multiworld_batch_seconds_count",
        "multiworld_fleet_events_total",
        "multiworld_router_events_total",
        "multiworld_replica_in_flight",
        "multiworld_request_seconds_bucket",
    } <= names


def test_slow_client_delays_no_other_client(
    service: Served, http: httpx.Client
) -> None:
    host, port = service.url.removeprefix("https://").split(":")
    context = ssl.create_default_context(cafile=str(service.folder / "ca.pem"))
    slow = []
    try:
        for _ in range(20):
            raw = socket.create_connection((host, int(port)), timeout=WAIT_S)
            sock = context.wrap_socket(raw, server_hostname=host)
            slow.append(sock)
            sock.sendall(b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: x\r\n")
            sock.sendall(b"Content-Length: 100\r\n\r\n{")
        assert http.post(INFER, json=body(3.0)).status_code == 200
    finally:
        for sock in slow:
            sock.close()


def test_connections_without_a_complete_request_are_bounded(
    service: Served, http: httpx.Client
) -> None:
    host, port = service.url.removeprefix("https://").split(":")
    context = ssl.create_default_context(cafile=str(service.folder / "ca.pem"))

    def connect() -> ssl.SSLSocket:
        raw = socket.create_connection((host, int(port)), timeout=WAIT_S)
        return context.wrap_socket(raw, server_hostname=host)

    def answer(sock: ssl.SSLSocket) -> bytes:
        parts = []
        while part := sock.recv(4096):
            parts.append(part)
        return b"".join(parts)

    with connect() as silent, connect() as slow, connect() as long:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost:")
        long.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * 70_000)
        assert answer(long).startswith(b"HTTP/1.1 431 ")
        assert answer(silent).startswith(b"HTTP/1.1 408 ")
        assert b'{"error": "headers took longer than 2 s' in answer(slow)
    crowd = [connect() for _ in range(CONNECTIONS + 1)]
    try:
        assert answer(crowd[-1]).startswith(b"HTTP/1.1 503 ")
    finally:
        for sock in crowd:
            sock.close()
    assert http.post(INFER, json=body(3.0)).status_code == 200


def test_load_over_https(service: Served) -> None:
    ca = str(service.folder / "ca.pem")
    words = ["load", service.url, "minilm", "--ca", ca, "--seconds", "1", "--rate", "5"]
    found = service.command(*words)
    assert (found["sent"], found["failed"]) == (5, 0)


def test_certificate_that_cannot_be_used_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("nothing")
    gateway = {
        "port": 0,
        "tls_certificate": str(tmp_path / "bad.pem"),
        "tls_key": str(tmp_path / "none.pem"),
    }
    service = Served(tmp_path, spec_with(gateway=gateway))
    with pytest.raises(AssertionError, match=r"gateway\.tls_certificate"):
        service.start()
    service.end()
