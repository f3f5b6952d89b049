"""The OpenAPI description of the server, and an HTML page that shows it without external resources."""

from __future__ import annotations

import html
import json
from typing import Any

import equilibria
from equilibria.serving.codec import DTYPES, JSON, SAFETENSORS

_ANSWER = {
    "type": "object",
    "required": ["output", "status", "steps", "residual", "late", "waited", "seconds"],
    "properties": {
        "output": {"description": "What the model returns for this sample; nan and inf are null."},
        "status": {"type": "string", "enum": ["CONVERGED", "MAX_STEPS", "NONFINITE", "STALLED", "DIVERGED"]},
        "steps": {"type": "integer", "description": "Solver steps of this request."},
        "residual": {"type": ["number", "null"], "description": "Relative residual of the iterate behind the output."},
        "late": {
            "type": "boolean",
            "description": "The deadline passed before convergence; the output belongs to the best iterate.",
        },
        "waited": {"type": "number", "description": "Seconds until the request got a row."},
        "seconds": {"type": "number", "description": "Seconds from arrival to answer."},
    },
}
_REQUEST = {
    "type": "object",
    "required": ["inputs"],
    "additionalProperties": False,
    "properties": {
        "inputs": {"description": "One sample without a batch dimension: nested lists, or an object of them by argument."},
        "dtype": {"type": "string", "enum": list(DTYPES)},
        "rtol": {"type": "number", "minimum": 0},
        "max_steps": {"type": "integer", "minimum": 0},
        "deadline": {"type": "number", "exclusiveMinimum": 0, "description": "Seconds from arrival to answer."},
    },
}
_ERRORS = {
    "400": "The body or an option is malformed; the error names it.",
    "401": "The API key is missing or wrong.",
    "408": "The body did not arrive in time.",
    "413": "The body is larger than the limit.",
    "415": "The content type is neither JSON nor safetensors.",
    "422": "The inputs do not fit the model.",
    "429": "The queue is full; try again after Retry-After seconds.",
    "503": "The server is shutting down, or the deadline passed in the queue; try again after Retry-After seconds.",
}


def document(body_limit: int) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    error = {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}}
    failures = {code: {"description": text, "content": error} for code, text in _ERRORS.items()}
    answer = {JSON: {"schema": _ANSWER}, SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}
    predict = {
        "summary": "Solve one sample.",
        "description": f"The body may have at most {body_limit} bytes. With safetensors, options are query parameters.",
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": _REQUEST}, SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}},
        },
        "responses": {"200": {"description": "The answer.", "content": answer}, **failures},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "equilibria serve", "version": equilibria.__version__},
        "paths": {
            "/predict": {"post": predict},
            "/health": {"get": _get("Returns ok, or 503 while the server drains.")},
            "/metrics": {"get": _get("Metrics in the text format of Prometheus.")},
            "/status": {"get": _get("The numbers of the page at /, as JSON.")},
        },
    }


def _get(text: str) -> dict[str, Any]:
    return {"summary": text, "responses": {"200": {"description": text}}}


def page(description: dict[str, Any]) -> str:
    """Return the document as HTML."""
    parts = []
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            codes = "".join(
                f"<tr><td>{code}</td><td>{html.escape(response['description'])}</td></tr>"
                for code, response in operation["responses"].items()
            )
            body = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema")
            schema = f"<pre>{html.escape(json.dumps(body, indent=1))}</pre>" if body else ""
            text = html.escape(operation["summary"])
            parts.append(f"<h2>{method.upper()} {path}</h2><p>{text}</p>{schema}<table>{codes}</table>")
    style = (
        "body{font:15px system-ui;max-width:50rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
        "td{padding:.2rem 1rem .2rem 0}"
    )
    title = html.escape(description["info"]["title"])
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
    return f'{head}<h1>{title}</h1><p><a href="openapi.json">openapi.json</a></p>{"".join(parts)}'
