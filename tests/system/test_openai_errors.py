"""Errors of OpenAI's routes: the form that its clients read, and the words by which they choose what to do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api import client_of, filled
from starlette.testclient import TestClient

from swiftopt.core import errors
from swiftopt.core.errors import Busy, ContextOverflow, EngineGone, ModelNotFound, SwiftoptError
from swiftopt.server.errors import Refused, refused_by
from swiftopt.server.middleware import RateLimit
from swiftopt.server.settings import KeyRing, ServerSettings, new_key
from swiftopt.store import Store

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAID = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": SAID},
    TEXT: {"model": "m", "prompt": "a"},
    RESPONSE: {"model": "m", "input": "a"},
}
JSON = {"Content-Type": "application/json"}
ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SwiftoptError)]


@pytest.fixture(scope="module")
def store(schema_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with filled(str(shutil.copy(schema_file, tmp_path_factory.mktemp("refusing")))) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(store: Store) -> Iterator[TestClient]:
    with client_of(store, ServerSettings(requests_per_min=0, max_body_bytes=10_000)) as opened:
        yield opened


def told(response: Any, status: int) -> tuple[str, str | None, str | None]:
    """Type, code and param of an error in OpenAI's form."""
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json"), response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"].count("\n") == 0
    return error["type"], error["code"], error["param"]


WRONG_VALUES: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    (CHAT, {"messages": None}, "invalid_type", "messages"),
    (CHAT, {"messages": []}, "empty_array", "messages"),
    (CHAT, {"messages": [{"content": "a"}]}, "missing_required_parameter", "messages[0].role"),
    (CHAT, {"temperature": 2.1}, "decimal_above_max_value", "temperature"),
    (CHAT, {"temperature": -0.1}, "decimal_below_min_value", "temperature"),
    (CHAT, {"temperature": "warm"}, "invalid_type", "temperature"),
    (CHAT, {"n": 129}, "integer_above_max_value", "n"),
    (CHAT, {"n": 0}, "integer_below_min_value", "n"),
    (CHAT, {"n": 1.5}, "invalid_type", "n"),
    (CHAT, {"stop": ["a"] * 129}, "array_above_max_length", "stop"),
    (CHAT, {"cache_salt": "a" * 129}, "string_above_max_length", "cache_salt"),
    (CHAT, {"swiftopt": {"tusk": "a"}}, "unknown_parameter", "swiftopt.tusk"),
    (CHAT, {"swiftopt": {"task": ""}}, "string_below_min_length", "swiftopt.task"),
    (CHAT, {"tool_choice": "any"}, "invalid_value", "tool_choice"),
    (CHAT, {"function_call": "auto"}, "unsupported_parameter", "function_call"),
    (CHAT, {"skip_special_tokens": False}, "unsupported_value", "skip_special_tokens"),
    (TEXT, {"prompt": 5}, "invalid_type", "prompt"),
    (TEXT, {"max_tokens": -1}, "integer_below_min_value", "max_tokens"),
    (TEXT, {"logprobs": 21}, "integer_above_max_value", "logprobs"),
    (RESPONSE, {"max_output_tokens": 0}, "integer_below_min_value", "max_output_tokens"),
    (RESPONSE, {"previous_response_id": "a"}, "unsupported_parameter", "previous_response_id"),
    (RESPONSE, {"truncation": "auto"}, "unsupported_value", "truncation"),
)


@pytest.mark.parametrize(
    ("path", "own", "code", "param"), WRONG_VALUES, ids=[f"{path} {[*own]}" for path, own, _, _ in WRONG_VALUES]
)
def test_invalid_value_has_openais_code_and_names_its_field(
    client: TestClient, path: str, own: dict[str, Any], code: str, param: str
) -> None:
    answer = client.post(path, json={**BODIES[path], **own})
    assert told(answer, 400) == ("invalid_request_error", code, param)


@pytest.mark.parametrize("path", BODIES)
def test_missing_field_has_openais_code_and_is_named(client: TestClient, path: str) -> None:
    for field in BODIES[path]:
        answer = client.post(path, json={name: value for name, value in BODIES[path].items() if name != field})
        assert told(answer, 400) == ("invalid_request_error", "missing_required_parameter", field)


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/detokenize"])
def test_model_that_is_not_served_is_model_not_found(client: TestClient, path: str) -> None:
    body = BODIES.get(path, {"model": "m", "prompt": "a", "tokens": [1]})
    assert told(client.post(path, json=body), 404) == ("invalid_request_error", "model_not_found", "model")
    assert told(client.get("/v1/models/m"), 404) == ("invalid_request_error", "model_not_found", "model")


@pytest.mark.parametrize("path", ["/v1", "/v1/embeddings", "/v1/files", "/tokenize/more"])
def test_unknown_route_is_unknown_url(client: TestClient, path: str) -> None:
    assert told(client.post(path, json={}), 404) == ("invalid_request_error", "unknown_url", None)


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/detokenize", "/v1/models"])
def test_request_that_http_refuses_has_openais_form(client: TestClient, path: str) -> None:
    assert told(client.delete(path), 405) == ("invalid_request_error", "method_not_supported", None)
    if path == "/v1/models":
        return
    text = client.post(path, content="a", headers={"Content-Type": "text/plain"})
    assert told(text, 415) == ("invalid_request_error", "unsupported_content_type", None)
    assert told(client.post(path, content="{", headers=JSON), 400) == ("invalid_request_error", None, None)
    assert told(client.post(path, content="[1]", headers=JSON), 400) == ("invalid_request_error", "invalid_type", None)
    assert told(client.post(path, content=b" " * 10_001, headers=JSON), 413) == ("invalid_request_error", None, None)
    foreign = client.post(path, json={}, headers={"Origin": "https://evil.example"})
    assert told(foreign, 403) == ("invalid_request_error", None, None)


def test_request_without_the_right_key_is_invalid_api_key(store: Store) -> None:
    key, entry = new_key("a")
    with client_of(store, ServerSettings(KeyRing(entry), requests_per_min=0)) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path in (CHAT, "/v1/models", "/v1/embeddings"):
                answer = client.post(path, json={}, headers=headers)
                assert told(answer, 401) == ("invalid_request_error", "invalid_api_key", None)
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_limits_are_rate_limit_exceeded_of_requests_or_tokens(store: Store) -> None:
    with client_of(store, ServerSettings(requests_per_min=1)) as client:
        client.get("/v1/models")
        answer = client.get("/v1/models")
        assert told(answer, 429) == ("requests", "rate_limit_exceeded", None) and int(answer.headers["retry-after"]) > 0
    tokens = RateLimit(10, counted=True)
    tokens.spend("a", 10)
    with pytest.raises(Refused) as refused:
        tokens.check("a", "tokens")
    error = refused.value.openai()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")


@pytest.mark.parametrize("kind", ALL)
def test_every_error_has_a_type_and_a_code_of_openai(kind: type[SwiftoptError]) -> None:
    refused = refused_by(kind("words", "field"))
    error = refused.openai()["error"]
    by_status = {429: "requests", 500: "server_error", 503: "server_error"}
    assert error["type"] == by_status.get(refused.status_code, "invalid_request_error")
    assert error["code"] is None or re.fullmatch("[a-z_]+", error["code"])
    assert (error["message"], error["param"]) == ("words", "field")


def test_errors_that_clients_fall_back_on_have_their_codes() -> None:
    codes = {kind: refused_by(kind("a")).code for kind in (ContextOverflow, ModelNotFound, Busy, EngineGone)}
    assert codes == {
        ContextOverflow: "context_length_exceeded",
        ModelNotFound: "model_not_found",
        Busy: "rate_limit_exceeded",
        EngineGone: None,
    }
