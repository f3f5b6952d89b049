"""Ray Serve: two replicas of an engine, one of them killed under load. Needs the extra `ray`; `make test-ray` runs it."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import equilibria as eq

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytest.importorskip("ray.serve", reason="needs the extra ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
INPUTS, SAMPLES, TOLERANCE = 16, 12, 1e-3


@pytest.fixture(scope="module")
def samples() -> list[torch.Tensor]:
    return list(0.2 + torch.rand(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    net = eq.models.create("skip-mlp-v2", inputs=INPUTS, width=32).eval()
    return eq.models.save(net, tmp_path_factory.mktemp("ray") / "model.safetensors")


@pytest.fixture(scope="module")
def expected(model: Path, samples: list[torch.Tensor]) -> list[torch.Tensor]:
    net = eq.models.load(model).eval()
    with torch.no_grad():
        return [net(x.unsqueeze(0))[0] for x in samples]


@pytest.fixture(scope="module")
def handle(model: Path) -> Iterator[Any]:
    for name in ("PROXY_READY_CHECK_TIMEOUT_S", "PROXY_HEALTH_CHECK_TIMEOUT_S"):  # for the processes of Serve
        os.environ.setdefault(f"RAY_SERVE_{name}", "120")  # 5 and 10 seconds otherwise, which a busy machine may exceed
    from ray import serve

    from equilibria.serving.ray import application

    for attempt in range(3):  # Ray gives a node 30 seconds to start, which a busy machine may exceed
        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
            break
        except Exception:
            ray.shutdown()
            if attempt == 2:
                raise
    try:
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": 18765})
        except TimeoutError:  # Ray waits 60 seconds for the process that listens; it goes on starting
            serve.start(http_options={"host": "127.0.0.1", "port": 18765})
        yield serve.run(application(model, rows=8, replicas=2), name="equilibria")
    finally:
        serve.shutdown()
        ray.shutdown()


def replicas() -> list[Any]:
    """The actors of the engine's replicas."""
    from ray.util import list_named_actors

    found = [each for each in list_named_actors(all_namespaces=True) if "#Replica#" in each["name"]]
    return [ray.get_actor(each["name"], namespace=each["namespace"]) for each in found]


def test_answers_are_those_of_the_model(handle: Any, samples: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    answers = [handle.predict.remote(x) for x in samples]
    for response, wanted in zip(answers, expected, strict=True):
        answer = response.result(timeout_s=120)
        assert answer.converged
        torch.testing.assert_close(answer.output, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_http_has_the_routes_and_errors_of_a_single_server(handle: Any, samples: list[torch.Tensor]) -> None:
    def post(body: bytes) -> tuple[int, Any]:
        request = urllib.request.Request("http://127.0.0.1:18765/predict", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    code, answer = post(json.dumps({"inputs": samples[0].tolist()}).encode())
    assert code == 200 and answer["status"] == "CONVERGED"
    assert post(b"{")[0] == 400
    code, answer = post(json.dumps({"inputs": [1.0, 2.0]}).encode())
    assert code == 422 and "does not take inputs of shape [(2,)]" in answer["error"]
    with urllib.request.urlopen("http://127.0.0.1:18765/health", timeout=60) as response:
        assert json.load(response) == {"status": "ok"}


def test_a_killed_replica_loses_no_request(handle: Any, samples: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Requests run while one of two replicas is killed: every one is answered, and right."""
    wrong: list[str] = []
    answered = [0]
    stop = threading.Event()

    def client(first: int) -> None:
        i = first
        while not stop.is_set() or i == first:
            at = i % SAMPLES
            try:
                answer = handle.predict.remote(samples[at]).result(timeout_s=180)
                if not torch.allclose(answer.output, expected[at], rtol=TOLERANCE, atol=TOLERANCE):
                    wrong.append(f"request {i}: another answer")
            except Exception as error:
                wrong.append(f"request {i}: {type(error).__name__}: {error}")
            answered[0] += 1
            i += 1

    before = replicas()
    assert len(before) == 2
    threads = [threading.Thread(target=client, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    while answered[0] < 50:
        time.sleep(0.05)
    ray.kill(before[0], no_restart=True)
    seen = answered[0]
    while answered[0] < seen + 200:
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join(timeout=240)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong, wrong[:5]
    deadline = time.monotonic() + 120
    while len(replicas()) < 2 and time.monotonic() < deadline:  # Ray Serve starts another one
        time.sleep(0.5)
    assert len(replicas()) == 2


def test_autoscaling_options_are_checked_and_passed_on() -> None:
    from equilibria.serving.ray import Autoscaling

    found = Autoscaling(least=1, most=3).config(rows=64)
    assert (found["min_replicas"], found["max_replicas"], found["target_ongoing_requests"]) == (1, 3, 32.0)
    with pytest.raises(ValueError, match="least <= most"):
        Autoscaling(least=5, most=2)
