"""`equilibria serve` and `equilibria load` as processes, and the page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import equilibria as eq

pytest.importorskip("uvicorn", reason="the server needs the extra `serve`")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def serving(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address."""
    command = [sys.executable, "-m", "equilibria", "serve", str(model), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, line + process.stdout.read()
            yield process, found.group()
        finally:
            process.terminate()
            process.wait(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "mlp.safetensors"
    return eq.models.save(eq.models.create("skip-mlp-v2", inputs=16, width=24), path)


def load(address: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "equilibria", "load", address, "--shape", "16", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_model_file_is_served_load_tested_and_drained(model: Path) -> None:
    with serving(model, "--rows", "8", "--verbose") as (process, address):
        assert address.startswith("http://127.0.0.1:")  # by default the server listens on localhost only
        found = load(address, "--rate", "200", "--count", "60", "--clients", "8")
        assert found["codes"] == {"200": 60} and 0 < found["p50"] <= found["p99"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
        assert process.stdout is not None
        assert len(re.findall(r"CONVERGED in \d+ steps, residual \S+, \S+ ms", process.stdout.read())) == 60


@pytest.mark.slow
def test_sigterm_answers_running_requests(tmp_path: Path) -> None:
    """A request that runs until its deadline is answered although the server gets SIGTERM before."""
    torch.manual_seed(0)
    slow = eq.models.create(
        "skip-mlp-v2", inputs=16, width=24, solver=eq.models.SkipSolver(tolerance=1e-30, max_steps=10**8)
    )
    path = eq.models.save(slow, tmp_path / "slow.safetensors")
    body = json.dumps({"inputs": [0.5] * 16, "deadline": 2.0}).encode()
    answers: list[dict[str, Any]] = []
    with serving(path, "--max-steps", "100000000") as (process, address):

        def ask() -> None:
            request = urllib.request.Request(f"{address}/predict", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=300) as response:
                answers.append(json.load(response))

        thread = threading.Thread(target=ask)
        thread.start()
        while "equilibria_active_rows 1" not in urllib.request.urlopen(f"{address}/metrics").read().decode():
            if not thread.is_alive():
                break  # the request finished before the signal
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert process.wait(300) == 0
    assert answers and answers[0]["steps"] > 0


@pytest.mark.slow
def test_unservable_files_exit_with_the_reason(tmp_path: Path) -> None:
    path = eq.models.save(eq.models.create("resnet-56"), tmp_path / "resnet.safetensors")
    command = [sys.executable, "-m", "equilibria", "serve", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no equilibrium layer" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: install chromium to test the page in a browser")
def test_the_page_shows_a_running_server_in_a_browser(model: Path, scheme: str, tmp_path: Path) -> None:
    with serving(model, "--rows", "8") as (_, address):
        load(address, "--rate", "100", "--count", "40")
        page, picture = in_browser(address, scheme, tmp_path)
        shown = dict(re.findall(r'<b id="(\w+)">([^<]*)</b>', page))
        assert shown["answers"] == "40" and shown["queue"] == "0" and shown["active"].endswith("/ 8")
        assert "ms" in shown["p50"] and re.search(r"up \d+ s", page)
        assert 'id="lost" role="status"></small>' in page  # it says nothing of a lost connection
        assert picture.stat().st_size > 5000


def in_browser(address: str, scheme: str, folder: Path) -> tuple[str, Path]:
    """Return the page's elements after it has run for a while, and a screenshot."""
    assert CHROMIUM is not None
    picture = folder / f"{scheme}.png"
    common = [CHROMIUM, "--headless=new", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder / 'profile'}"]
    common += ["--no-sandbox"] if os.geteuid() == 0 else []
    common += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    wait = ["--virtual-time-budget=3000", "--window-size=1200,700"]
    shot = [*common, *wait, f"--screenshot={picture}", address]
    subprocess.run(shot, check=True, capture_output=True, timeout=600)
    done = subprocess.run([*common, *wait, "--dump-dom", address], check=True, capture_output=True, text=True, timeout=600)
    return done.stdout, picture
