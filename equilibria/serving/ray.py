"""Serve a model on many machines: a Ray Serve application with an engine in every replica.

    from ray import serve
    from equilibria.serving.ray import application

    serve.run(application("model.safetensors", replicas=4))

The application has two deployments. `Front` takes requests, over HTTP with the routes of `equilibria serve` or from Python
by its handle, and passes them to the replicas. `Replica` contains an engine. If a replica dies, its requests are sent to
another one. A request may then be solved twice, which is safe because answers have no side effects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import nn

from equilibria.models import load as load_model
from equilibria.serving.answering import Counts
from equilibria.serving.engine import Engine
from equilibria.serving.server import Limits, Server
from equilibria.serving.tickets import Answer, DeadlineExceededError, EngineClosedError, QueueFullError, Ticket

PAUSE = 0.2  # seconds before a request whose replica died is sent again

Model = str | Path | Callable[[], nn.Module]


class Predicting:
    """A deployment with an engine that can be called from Python."""

    engine: Any

    async def predict(
        self, inputs: Any, rtol: float | None = None, max_steps: int | None = None, deadline: float | None = None
    ) -> Answer:
        """Answer one request; callers use `handle.predict.remote(x).result()`. Cancelling the call frees its row."""
        ticket: Ticket = self.engine.submit(inputs, rtol, max_steps, deadline)
        try:
            return await asyncio.wrap_future(ticket.future)
        finally:
            ticket.cancel()


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    """Settings by which the number of replicas follows the load.

    least, most  bounds of the number of replicas
    target       number of requests per replica that the autoscaler aims at; None means half of the rows of an engine
    upscale      seconds of a larger load after which replicas are added
    downscale    seconds of a smaller load after which they are removed
    """

    least: int = 1
    most: int = 4
    target: float | None = None
    upscale: float = 10.0
    downscale: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ValueError(f"Autoscaling needs 0 <= least <= most and most >= 1, got {self.least} and {self.most}.")

    def config(self, rows: int) -> dict[str, Any]:
        """Return the `autoscaling_config` of Ray Serve."""
        return {
            "min_replicas": self.least,
            "max_replicas": self.most,
            "target_ongoing_requests": max(rows / 2, 1.0) if self.target is None else self.target,
            "upscale_delay_s": self.upscale,
            "downscale_delay_s": self.downscale,
        }


def application(
    model: Model,
    *,
    rows: int = 64,
    replicas: int | Autoscaling = 2,
    fronts: int = 1,
    queue: int = 1024,
    threads: int = 1,
    limits: Limits | None = None,
    api_key: str | None = None,
    actor: dict[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """Return the application for `serve.run`.

    model     file written by `eq.models.save` that every machine can read, or a function that returns the model
    rows      largest number of requests in one solve of a replica, per shape of the inputs
    replicas  number of engines, or an `Autoscaling` by which it follows the load
    fronts    number of processes that take requests
    queue     requests that may wait in a front or in a replica; others get 429
    threads   threads of torch in a replica
    limits    limits of a request over HTTP
    api_key   key that clients must send over HTTP
    actor     Ray's options of a replica, for example {"num_cpus": 4, "num_gpus": 1}
    options   further options of `Engine`
    """
    amount: dict[str, Any]
    if isinstance(replicas, Autoscaling):
        most, amount = replicas.most, {"autoscaling_config": replicas.config(rows)}
    else:
        most, amount = replicas, {"num_replicas": replicas}
    engine = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=rows + queue,
        ray_actor_options=actor or {"num_cpus": threads},
        **amount,
    )
    bound = engine.bind(model, threads, {"rows": rows, "queue": queue, **options})
    front = serve.deployment(
        Front, name="Front", num_replicas=fronts, max_ongoing_requests=rows + queue, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(bound, limits or Limits(), api_key, queue, rows * most)


class Replica(Predicting):
    """An engine in a process of its own."""

    def __init__(self, model: Model, threads: int, options: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        found = model() if callable(model) else load_model(model)
        self.engine = Engine(found.eval(), **options).start()

    def check_health(self) -> None:
        """Raise if the thread of the engine has died; Ray Serve then starts another replica."""
        if not self.engine.alive:
            raise RuntimeError("The thread of the engine has died.")

    def __del__(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.close()


class RemoteEngine:
    """The part of the interface of `Engine` that `Server` uses; requests go to the replicas behind a Ray handle."""

    def __init__(self, handle: Any, queue: int, rows: int) -> None:
        self.handle, self.queue, self.rows = handle, queue, rows
        self.active = self.queued = 0  # requests passed to replicas; `queued` stays 0, because none waits here
        self.retried = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self, inputs: Any, rtol: float | None = None, max_steps: int | None = None, deadline: float | None = None
    ) -> Ticket:
        """Send a request to a replica and return its ticket; must be called in the event loop."""
        if self.active >= self.queue + self.rows:
            raise QueueFullError(f"{self.active} requests are under way. Try again later.")
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            loop.call_soon_threadsafe(task.cancel)

        ticket = Ticket(inputs, rtol, max_steps, deadline, given_up=cancel)
        task = loop.create_task(self._call(ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ticket

    async def _call(self, ticket: Ticket) -> None:
        self.active += 1
        try:
            answer = await self._answer(ticket)
            ticket.admitted = ticket.submitted + answer.waited
            ticket.resolve(answer.output, answer.status, answer.steps, answer.residual, late=answer.late)
        except asyncio.CancelledError:
            ticket.future.cancel()
        except BackPressureError as error:
            ticket.fail(QueueFullError(str(error)))
        except Exception as error:
            ticket.fail(getattr(error, "cause", None) or error)  # the replica's own error, without Ray's traceback
        finally:
            self.active -= 1

    async def _answer(self, ticket: Ticket) -> Answer:
        """Send the request until a replica answers; if a replica dies or closes before, send it again after a pause."""
        while True:
            left = None if ticket.deadline is None else ticket.deadline - time.monotonic()
            if left is not None and left <= 0:
                raise DeadlineExceededError("The deadline passed before a replica answered.")
            response = self.handle.predict.remote(ticket.arguments, ticket.rtol, ticket.max_steps, left)
            try:
                answer: Answer = await response
                return answer
            except asyncio.CancelledError:
                response.cancel()
                raise
            except (RayActorError, EngineClosedError, TaskCancelledError):
                self.retried += 1
                await asyncio.sleep(PAUSE)

    # the other methods that `Server` and its monitor call

    def start(self) -> RemoteEngine:
        return self

    def drain(self, timeout: float | None = None) -> bool:
        return True

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def counts(self) -> Counts:
        """Return empty counts, because every replica counts its own steps."""
        return Counts()

    def residuals(self) -> list[tuple[int, int, float]]:
        return []


class Front(Predicting):
    """A deployment that takes requests over HTTP and from Python, and passes them to the replicas."""

    def __init__(self, handle: Any, limits: Limits, api_key: str | None, queue: int, rows: int) -> None:
        self.engine = RemoteEngine(handle, queue, rows)
        self.server = Server(self.engine, limits=limits, api_key=api_key)
        self.routes = self.server.handlers()

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request; the routes are those of `equilibria serve`."""
        method, handler = self.routes.get(request.url.path, ("", None))
        if handler is None:
            return JSONResponse({"error": f"There is no {request.url.path}."}, 404)
        if request.method != method:
            return JSONResponse({"error": f"Use {method} for {request.url.path}."}, 405, {"Allow": method})
        return await handler(request)
