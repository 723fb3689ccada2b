"""The OpenAPI document, made of the structs that check requests, so that it says what they take."""

from __future__ import annotations

import functools
from typing import Any, Final

import msgspec

from pagewire.gateway.http.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_ERRORS: Final = {
    400: "The request is refused; `param` names the field",
    401: "No API key, or none that is known here",
    403: "Another host is asked for, without keys",
    404: "No such path or model",
    408: "The body did not come in time",
    413: "The body is too large",
    415: "The body is not JSON by its Content-Type",
    429: "Too many requests wait; `Retry-After` says when to try again",
    500: "A fault of the server",
    503: "No engine serves now, or the server is shutting down",
}


@functools.cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
    bodies, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    chat, completion, tokenize, detokenize = bodies
    schemas["Error"] = _error_schema()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pagewire",
            "version": "1",
            "description": "The OpenAI-compatible face of a Pagewire server.",
        },
        "paths": {
            "/v1/chat/completions": {"post": _post("Answer a conversation", chat, streams=True)},
            "/v1/completions": {"post": _post("Continue texts", completion, streams=True)},
            "/tokenize": {"post": _post("Token ids of a text or a conversation", tokenize)},
            "/detokenize": {"post": _post("The text of token ids", detokenize)},
            "/v1/models": {"get": _get("The model that is served", 200, 401, 503)},
            "/health": {"get": _get("The process answers", 200)},
            "/ready": {"get": _get("Requests are taken and tokens move", 200, 503)},
            "/metrics": {"get": _get("Figures for Prometheus", 200, 401, 503, media="text/plain")},
            "/openapi.json": {"get": _get("This document", 200, 401)},
        },
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _post(summary: str, body: dict[str, Any], *, streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _OBJECT}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The answer", "content": content}, **_errors(*_ERRORS)},
    }


def _get(summary: str, *statuses: int, media: str = "application/json") -> dict[str, Any]:
    schema = _OBJECT if media == "application/json" else {"type": "string"}
    answer = {"description": summary, "content": {media: {"schema": schema}}}
    return {
        "summary": summary,
        "responses": {"200": answer, **_errors(*(status for status in statuses if status != 200))},
    }


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): _error(_ERRORS[status]) for status in statuses}


def _error(description: str) -> dict[str, Any]:
    schema = {"anyOf": [{"$ref": "#/components/schemas/Error"}, _OBJECT]}  # `/ready` says no in a shape of its own
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _error_schema() -> dict[str, Any]:
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    error = {
        "type": "object",
        "properties": {"message": text, "type": text, "param": maybe, "code": maybe},
        "required": ["message", "type", "param", "code"],
    }
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
