"""The HTTP interface of an engine: an ASGI application on Starlette, run by uvicorn."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from equilibria._core.files import missing

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise missing(error, "serve") from error

from equilibria.serving import codec
from equilibria.serving.engine import Engine
from equilibria.serving.monitor import ServerMonitor
from equilibria.serving.openapi import document, page
from equilibria.serving.tickets import (
    Answer,
    DeadlineExceededError,
    EngineClosedError,
    InvalidRequestError,
    QueueFullError,
    Ticket,
    UnservableModelError,
)

log = logging.getLogger("equilibria.serving")
RETRY_AFTER = "1"  # seconds


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request.

    body       largest body in bytes
    reading    seconds within which the body must arrive
    deadline   largest number of seconds from arrival to answer, also for requests without a deadline
    max_steps  largest number of solver steps
    """

    body: int = 8 * 2**20
    reading: float = 10.0
    deadline: float = 30.0
    max_steps: int = 1000


class HTTPError(Exception):
    """An error response with its code and message."""

    def __init__(self, code: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Server:
    """Serve one engine over HTTP.

    dtype    dtype of JSON numbers when a request names none
    api_key  key that clients must send, as `Authorization: Bearer KEY` or `X-API-Key: KEY`
    verbose  log a line per request
    """

    def __init__(
        self,
        engine: Engine,
        *,
        limits: Limits | None = None,
        dtype: torch.dtype = torch.float32,
        api_key: str | None = None,
        verbose: bool = False,
    ) -> None:
        self.engine, self.limits, self.dtype, self.verbose = engine, limits or Limits(), dtype, verbose
        self._key = None if api_key is None else api_key.encode()
        self.monitor = ServerMonitor(engine)
        self.draining = False

    def handlers(self) -> dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]]:
        """Return the method and the handler of every path."""
        return {
            "/predict": ("POST", self._answering(self.predict)),
            "/health": ("GET", self.health),
            "/metrics": ("GET", self._answering(self.metrics)),
            "/status": ("GET", self._answering(self.status)),
            "/openapi.json": ("GET", self.openapi),
            "/docs": ("GET", self.docs),
            "/": ("GET", self.watch),
        }

    def application(self) -> Starlette:
        """Return the ASGI application; the engine starts and stops with it."""
        routes = [Route(path, handler, methods=[method]) for path, (method, handler) in self.handlers().items()]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Start the engine; at shutdown answer the requests under way, then close it."""
        self.engine.start()
        try:
            yield
        finally:
            self.draining = True
            await asyncio.to_thread(self.engine.drain, self.limits.deadline)
            await asyncio.to_thread(self.engine.close)

    def _answering(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: check the API key, convert errors into responses and count the responses."""

        async def handle(request: Request) -> Response:
            try:
                self._check_key(request)
                response = await handler(request)
            except HTTPError as error:
                response = JSONResponse({"error": error.message}, error.code, error.headers)
            except ClientDisconnect:
                response = Response(status_code=499)  # the client is gone and reads no response
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path)
                response = JSONResponse({"error": "Internal error; see the log of the server."}, 500)
            self.monitor.responded(response.status_code)
            return response

        return handle

    def _check_key(self, request: Request) -> None:
        """Raise HTTPError 401 unless the request carries the API key; does nothing without a key."""
        if self._key is None:
            return
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.headers.get("x-api-key", bearer).encode()
        if not hmac.compare_digest(given, self._key):
            raise HTTPError(401, "Send the API key as `Authorization: Bearer KEY`.", WWW_Authenticate="Bearer")

    # predicting

    async def predict(self, request: Request) -> Response:
        """Decode a request, submit it, wait for its answer and encode it; POST /predict."""
        binary = _is_binary(request.headers.get("content-type", codec.JSON), "Content-Type", 415)
        body = await self._body(request)
        try:
            call = codec.read_safetensors(body, request.query_params) if binary else codec.read_json(body, self.dtype)
            ticket = self._submit(call)
        except InvalidRequestError as error:
            raise HTTPError(400, str(error)) from error
        answer = await self._wait(ticket, request)
        self.monitor.answered(answer)
        if self.verbose:
            log.info(
                "%s in %d steps, residual %.1e, %.1f ms",
                answer.status.name,
                answer.steps,
                answer.residual,
                1e3 * answer.seconds,
            )
        if request.headers.get("accept", "").startswith(codec.BINARY):
            return Response(codec.write_safetensors(answer), media_type=codec.SAFETENSORS)
        return Response(codec.write_json(answer), media_type=codec.JSON)

    async def _body(self, request: Request) -> bytes:
        """Read the body within the limits of size and time; raises HTTPError 413 or 408."""
        limit = self.limits.body
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise HTTPError(413, f"The body has {declared} bytes, the limit is {limit}.", Connection="close")
        try:
            async with asyncio.timeout(self.limits.reading):
                parts, size = [], 0
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise HTTPError(413, f"The body exceeds the limit of {limit} bytes.", Connection="close")
                    parts.append(part)
        except TimeoutError as error:
            message = f"The body did not arrive within {self.limits.reading:g} s."
            raise HTTPError(408, message, Connection="close") from error
        return b"".join(parts)

    def _submit(self, call: codec.DecodedRequest) -> Ticket:
        """Submit a request to the engine; raises HTTPError 400, 429 or 503."""
        limits = self.limits
        if self.draining:
            raise HTTPError(503, "The server is shutting down.", Retry_After=RETRY_AFTER)
        if call.max_steps is not None and call.max_steps > limits.max_steps:
            raise HTTPError(400, f"max_steps must be at most {limits.max_steps}, got {call.max_steps}.")
        deadline = limits.deadline if call.deadline is None else min(call.deadline, limits.deadline)
        try:
            return self.engine.submit(call.inputs, call.rtol, call.max_steps, deadline)
        except QueueFullError as error:
            raise HTTPError(429, str(error), Retry_After=RETRY_AFTER) from error
        except EngineClosedError as error:
            raise HTTPError(503, str(error), Retry_After=RETRY_AFTER) from error

    async def _wait(self, ticket: Ticket, request: Request) -> Answer:
        """Wait for the answer and return it; if the client disconnects, cancel the request."""
        future = asyncio.wrap_future(ticket.future)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((future, gone), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                ticket.cancel()
                self.monitor.gave_up()
                raise ClientDisconnect
            return future.result()
        except InvalidRequestError as error:
            raise HTTPError(422, str(error)) from error
        except DeadlineExceededError as error:
            raise HTTPError(503, str(error), Retry_After=RETRY_AFTER) from error
        except EngineClosedError as error:
            raise HTTPError(503, str(error), Retry_After=RETRY_AFTER) from error
        except UnservableModelError as error:
            raise HTTPError(500, str(error)) from error
        finally:
            gone.cancel()
            if not future.done():
                future.cancel()

    # monitoring

    async def health(self, request: Request) -> Response:
        code = 503 if self.draining else 200
        return JSONResponse({"status": "draining" if self.draining else "ok"}, code)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.monitor.prometheus(), media_type="text/plain; version=0.0.4")

    async def status(self, request: Request) -> Response:
        return JSONResponse(self.monitor.status())

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document(self.limits.body))

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(page(document(self.limits.body)))

    async def watch(self, request: Request) -> Response:
        return HTMLResponse(resources.files("equilibria.serving").joinpath("watch.html").read_text())


def _is_binary(kind: str, header: str, code: int) -> bool:
    """Return True for safetensors, False for JSON; raises HTTPError with `code` for any other content type."""
    name = kind.partition(";")[0].strip().lower()
    if name in codec.BINARY:
        return True
    if name == codec.JSON:
        return False
    raise HTTPError(code, f"{header} must be {codec.JSON} or {codec.SAFETENSORS}, got {name!r}.")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def serve(server: Server, host: str = "127.0.0.1", port: int = 8000, *, ready: Callable[[str], Any] | None = None) -> None:
    """Run until SIGINT or SIGTERM, then answer the accepted requests. `ready` is called with the address of the server."""
    config = uvicorn.Config(
        server.application(),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(server.limits.deadline) + 1,
        limit_concurrency=server.engine.queue + server.engine.rows + 64,  # connections; beyond it uvicorn responds 503
        h11_max_incomplete_event_size=16 * 1024,
    )
    running = _Uvicorn(config, server, ready)
    running.run()


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that reports when it listens, and sets `draining` as soon as it receives a signal to stop."""

    def __init__(self, config: Any, server: Server, ready: Callable[[str], Any] | None) -> None:
        super().__init__(config)
        self._server, self._ready = server, ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started and self._ready is not None:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._ready(f"http://{host}:{port}")

    def handle_exit(self, sig: int, frame: Any) -> None:
        # super() is not called: it would raise the signal again at the end, although a drained server has not failed
        self._server.draining = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
