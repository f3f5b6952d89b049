"""The server over real sockets: answers, limits, errors, clients that disconnect."""

from __future__ import annotations

import hmac
import http.client
import io
import json
import pickle
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.serving import Engine
from tests.serving.nets import HOUR, Clock, Net, alone, requests

pytest.importorskip("starlette", reason="the server needs the extra `serve`")
pytest.importorskip("uvicorn", reason="the server needs the extra `serve`")
import safetensors.torch as st
import uvicorn

from equilibria.serving.server import Limits, Server

SLOW = eq.Stop(rtol=0.0, atol=0.0, max_steps=10**9, on_failure="ignore")  # only a deadline ends it


@contextmanager
def running(engine: Engine, **options: Any) -> Iterator[tuple[Server, int]]:
    """A server in a thread, and its port."""
    server = Server(engine, dtype=torch.float64, **options)
    config = uvicorn.Config(server.application(), port=0, log_level="warning", access_log=False)
    front = uvicorn.Server(config)
    thread = threading.Thread(target=front.run)
    thread.start()
    try:
        while not front.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield server, front.servers[0].sockets[0].getsockname()[1]
    finally:
        front.should_exit = True
        thread.join()


def call(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        data = json.dumps(body) if isinstance(body, (dict, list)) else body
        connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    limits = Limits(body=10_000, deadline=300.0, reading=300.0, max_steps=500)
    with running(Engine(Net(), rows=4), limits=limits) as (_, found):
        yield found


def test_json_and_tensors_get_the_answers_of_the_model(port: int) -> None:
    model = Net()
    for x in requests(3):
        expected, stats = alone(model, x)
        code, _, body = call(port, "POST", "/predict", {"inputs": x.tolist()})
        found = json.loads(body)
        assert code == 200 and found["status"] == "CONVERGED" and found["steps"] == int(stats.steps[0])
        torch.testing.assert_close(torch.tensor(found["output"]).double(), expected[0], rtol=1e-6, atol=1e-6)
        binary = {"Content_Type": "application/x-safetensors", "Accept": "application/x-safetensors"}
        code, headers, body = call(port, "POST", "/predict?rtol=1e-7", st.save({"inputs": x}), **binary)
        assert code == 200 and headers["content-type"] == "application/x-safetensors"
        torch.testing.assert_close(st.load(body)["output"], expected[0], rtol=1e-9, atol=1e-9)


GOOD = [0.1, 0.2, 0.3, 0.4]
BAD: list[tuple[Any, dict[str, str], int, str]] = [
    ("{", {}, 400, "not valid JSON"),
    ("[" * 100_00, {}, 400, "not valid JSON"),
    ("[]", {}, 400, "object with"),
    ({"inputs": GOOD, "x": 1}, {}, 400, "Unknown fields"),
    ({"inputs": [[1], [1, 2]]}, {}, 400, "equal lengths"),
    ({"inputs": "text"}, {}, 400, "numbers"),
    ({"inputs": GOOD, "dtype": "object"}, {}, 400, "dtype must be"),
    ({"inputs": GOOD, "rtol": "small"}, {}, 400, "rtol must be a number"),
    ({"inputs": GOOD, "rtol": -1.0}, {}, 400, "rtol must be"),
    ({"inputs": GOOD, "max_steps": 1.5}, {}, 400, "whole number"),
    ({"inputs": GOOD, "max_steps": 10**6}, {}, 400, "at most 500"),
    ({"inputs": GOOD, "deadline": 0}, {}, 400, "deadline must be"),
    ({"inputs": [1.0, 2.0]}, {}, 422, "inputs of shape"),
    ({"inputs": {"nothing": GOOD}}, {}, 422, "does not take inputs"),
    ({"inputs": [0.0] * 5000}, {}, 413, "limit"),
    (b"nonsense", {"Content_Type": "application/x-safetensors"}, 400, "not a safetensors"),
    ("a=1", {"Content_Type": "application/x-www-form-urlencoded"}, 415, "must be application/json"),
]


@pytest.mark.parametrize(("body", "headers", "code", "said"), BAD, ids=[said for *_, said in BAD])
def test_a_bad_request_gets_its_code_and_message(
    port: int, body: Any, headers: dict[str, str], code: int, said: str
) -> None:
    found, _, text = call(port, "POST", "/predict", body, **headers)
    assert found == code and said in json.loads(text)["error"]
    assert call(port, "POST", "/predict", {"inputs": GOOD})[0] == 200


def test_nan_and_inf_are_null_in_json(port: int) -> None:
    code, _, body = call(port, "POST", "/predict", '{"inputs": [NaN, 0, 0, 0]}')
    found = json.loads(body)
    assert code == 200 and found["status"] == "NONFINITE"


def test_health_metrics_status_and_pages_respond(port: int) -> None:
    call(port, "POST", "/predict", {"inputs": GOOD})
    assert json.loads(call(port, "GET", "/health")[2]) == {"status": "ok"}
    text = call(port, "GET", "/metrics")[2].decode()
    assert 'equilibria_answers_total{status="CONVERGED"}' in text and "equilibria_latency_seconds_bucket" in text
    status = json.loads(call(port, "GET", "/status")[2])
    assert status["rows"] == 4 and sum(count for _, count in status["steps"]) > 0
    description = json.loads(call(port, "GET", "/openapi.json")[2])
    assert description["openapi"] == "3.1.0" and "/predict" in description["paths"]
    for path in ("/", "/docs"):
        code, headers, page = call(port, "GET", path)
        assert code == 200 and headers["content-type"].startswith("text/html")
        assert b"http://" not in page and b"https://" not in page  # no external resources
    assert call(port, "GET", "/predict")[0] == 405
    assert call(port, "GET", "/nothing")[0] == 404


def test_a_slow_client_gets_408() -> None:
    server = running(Engine(Net(), rows=1), limits=Limits(reading=0.1))
    with server as (_, port), socket.create_connection(("127.0.0.1", port), timeout=300) as client:
        client.sendall(
            b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert b" 408 " in client.recv(1000).split(b"\r\n")[0]


def never_ending() -> Net:
    from tests.serving.test_engine import Oscillating

    model = Net(eq.Picard(), stop=SLOW)
    model.layer.cell = Oscillating()
    return model


def test_a_disconnected_client_frees_its_row() -> None:
    engine = Engine(never_ending(), rows=1)
    with running(engine) as (server, port):
        body = json.dumps({"inputs": GOOD}).encode()
        head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head.encode() + body)
            until(lambda: engine.active == 1)
        until(lambda: engine.active == 0)
        assert server.monitor.cancelled == 1


def until(condition: Any) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_a_full_queue_sends_retry_after_and_deadlines_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    engine, answers = Engine(never_ending(), rows=1, queue=1), {}

    def ask(port: int, name: str, deadline: float) -> threading.Thread:
        def asking() -> None:
            answers[name] = call(port, "POST", "/predict", {"inputs": GOOD, "deadline": deadline})

        thread = threading.Thread(target=asking)
        thread.start()
        return thread

    with running(engine, limits=Limits(deadline=2 * HOUR)) as (_, port):
        first = ask(port, "first", 2 * HOUR)
        until(lambda: engine.active == 1 and engine.queued == 0)
        second = ask(port, "second", HOUR)
        until(lambda: engine.queued == 1)
        code, headers, _ = call(port, "POST", "/predict", {"inputs": GOOD, "deadline": HOUR})
        assert code == 429 and headers["retry-after"]
        clock.passed += HOUR
        second.join()
        assert answers["second"][0] == 503 and answers["second"][1]["retry-after"]
        clock.passed += HOUR
        first.join()
    late = json.loads(answers["first"][2])
    assert late["late"] and late["status"] != "CONVERGED" and late["steps"] > 0


def test_a_body_without_a_declared_length_is_limited_too(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=300) as client:
        client.sendall(
            b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        client.sendall(b"4e20\r\n" + b" " * 20_000 + b"\r\n")  # two times the limit, and more could follow
        assert b" 413 " in client.recv(1000).split(b"\r\n")[0]


class Exploding:
    """Leaves a trace when it is unpickled."""

    unpickled = False

    def __reduce__(self) -> Any:
        return setattr, (Exploding, "unpickled", True)


@pytest.mark.parametrize("kind", ["application/json", "application/x-safetensors", "application/octet-stream"])
def test_nothing_is_unpickled(port: int, kind: str) -> None:
    written = io.BytesIO()
    torch.save({"inputs": Exploding()}, written)
    for body in (pickle.dumps({"inputs": Exploding()}), written.getvalue()):
        assert call(port, "POST", "/predict", body, Content_Type=kind)[0] == 400
    assert not Exploding.unpickled


def test_a_draining_server_refuses_requests_and_answers_those_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, engine, answers = Clock(monkeypatch), Engine(never_ending(), rows=1), []
    with running(engine, limits=Limits(deadline=HOUR)) as (server, port):
        thread = threading.Thread(target=lambda: answers.append(call(port, "POST", "/predict", {"inputs": GOOD})))
        thread.start()
        until(lambda: engine.active == 1)
        server.draining = True
        code, headers, body = call(port, "POST", "/predict", {"inputs": GOOD})
        assert code == 503 and headers["retry-after"] and "shutting down" in json.loads(body)["error"]
        assert call(port, "GET", "/health")[0] == 503
        clock.passed += HOUR
        thread.join()
    assert answers[0][0] == 200 and json.loads(answers[0][2])["late"]


def test_the_api_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return given == key

    monkeypatch.setattr(hmac, "compare_digest", compare)
    with running(Engine(Net(), rows=2), api_key="schlüssel") as (_, port):
        assert call(port, "GET", "/metrics", X_API_Key="s")[0] == 401
        assert call(port, "GET", "/metrics")[0] == 401
    assert compared == [(b"s", "schlüssel".encode()), (b"", "schlüssel".encode())]


def test_a_log_line_per_request_is_written_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="equilibria.serving")
    for verbose, lines in ((False, 0), (True, 1)):
        with running(Engine(Net(), rows=2), verbose=verbose) as (_, port):
            assert call(port, "POST", "/predict", {"inputs": GOOD})[0] == 200
        assert len(re.findall(r"CONVERGED in \d+ steps, residual \S+, \S+ ms", caplog.text)) == lines


def test_requests_without_the_api_key_get_401() -> None:
    with running(Engine(Net(), rows=2), api_key="secret") as (_, port):
        assert call(port, "POST", "/predict", {"inputs": GOOD})[0] == 401
        assert call(port, "GET", "/metrics", X_API_Key="wrong")[0] == 401
        assert call(port, "POST", "/predict", {"inputs": GOOD}, Authorization="Bearer secret")[0] == 200
        assert call(port, "GET", "/metrics", X_API_Key="secret")[0] == 200
        assert call(port, "GET", "/health")[0] == 200
