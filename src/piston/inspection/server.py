"""The interactive page of `piston inspect`: the files of `page/`, and JSON about one policy.

    run(policy, frames, overview_html)      until Ctrl-C
    make_app(policy, frames)                the same as an ASGI application

The model answers one request at a time, in a thread of its own; moments and pictures are read
meanwhile. Nothing is fetched from other machines, and web pages of other origins are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import itertools
import json
import logging
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from piston.extras import needed_for
from piston.inference.policy import Policy
from piston.inspection.answers import NUM_SEEDS, Answers
from piston.inspection.frames import Frames
from piston.inspection.probe import Intervention
from piston.serialization import from_json
from piston_client.worker import Worker

with needed_for("The page of piston inspect"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

PORT = 8050
# Ports that are tried one after the other if none was asked for.
_NUM_PORTS = 20
_PAGE = Path(__file__).with_name("page")
# The page has the colours and the type of the reports, which the overview is one of.
_STYLE = Path(__file__).parent.parent / "report" / "templates" / "style.css"
_MAX_BODY_BYTES = 2**18
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; media-src data:; "
        "style-src 'self' 'unsafe-inline'; frame-ancestors 'self'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def run(
    policy: Policy,
    frames: Frames,
    overview_html: str | None = None,
    *,
    title: str = "",
    host: str = "127.0.0.1",
    port: int | None = None,
    listener: socket.socket | None = None,
    open_browser: bool = True,
) -> bool:
    """Serve the page until Ctrl-C or SIGTERM, then finish what is in flight.

    Returns whether all of it was finished: not if a second Ctrl-C came while the model worked. By
    default the first free port from 8050 on is taken; a port that is given must be free. Raises
    OSError if there is none. `listener` is one that `listen` returned before, for the same host.
    `title` says which policy and data set the page is about.
    """
    app = make_app(policy, frames, overview_html, title=title, host=host)
    listener = listener or listen(host, port)
    number = listener.getsockname()[1]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://[{shown}]:{number}/" if ":" in shown else f"http://{shown}:{number}/"
    logger.info("The page is at %s. Ctrl-C ends it.", url)
    if not _is_loopback(host):
        logger.warning("Everybody who reaches this port sees the data and uses the policy.")
    if open_browser and _has_screen():
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",  # uvicorn logs a traceback of every request that it gives up
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
    )
    server = _Server(config)
    # uvicorn raises the signal again after it has ended.
    with contextlib.closing(listener), contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return not server.force_exit


def make_app(
    policy: Policy,
    frames: Frames,
    overview_html: str | None = None,
    *,
    title: str = "",
    num_seeds: int = NUM_SEEDS,
    host: str = "127.0.0.1",
) -> Starlette:
    """Return the application. `overview_html` is a whole page, shown within this one.

    Raises an error if the data set's first frame does not fit the policy.
    """
    endpoints = _Endpoints(Answers(policy, frames, title, num_seeds), overview_html)
    routes = [
        Route("/", endpoints.page),
        Route("/style.css", endpoints.style),
        Route("/overview", endpoints.overview),
        Route("/api/about", endpoints.about),
        Route("/api/moment/{episode:int}/{frame:int}", endpoints.moment),
        Route("/api/picture/{episode:int}/{frame:int}/{camera:path}", endpoints.picture),
        Route("/api/act", endpoints.act, methods=["POST"]),
        Route("/api/occlusion", endpoints.occlusion, methods=["POST"]),
        Mount("/page", StaticFiles(directory=_PAGE)),
    ]
    handlers: dict[Any, Any] = {
        HTTPException: _answer_error,
        ValueError: _answer_error,
        LookupError: _answer_error,
        Exception: _answer_error,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.add_middleware(_Guard, host=host)
    return app


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Logging is not safe here: the signal may interrupt a log line.
        if not self.should_exit and self.server_state.tasks:
            os.write(2, b"Finishing what is in flight. A second Ctrl-C ends at once.\n")
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(super().shutdown(sockets))
        while not ending.done():
            if self.force_exit:
                # From Python 3.12 on, asyncio's servers wait until their requests have ended.
                for task in self.server_state.tasks:
                    task.cancel()
            await asyncio.wait([ending], timeout=0.1)
        await ending


class _Endpoints:
    def __init__(self, answers: Answers, overview_html: str | None) -> None:
        self._answers, self._overview = answers, overview_html
        self._about = {**answers.about(), "has_overview": overview_html is not None}
        self._turns = _Turns()

    async def page(self, _: Request) -> Response:
        return FileResponse(_PAGE / "index.html")

    async def style(self, _: Request) -> Response:
        return FileResponse(_STYLE)

    async def overview(self, _: Request) -> Response:
        if self._overview is None:
            raise HTTPException(404, "There is no overview of this policy.")
        return HTMLResponse(self._overview)

    async def about(self, _: Request) -> Response:
        return JSONResponse(self._about)

    async def moment(self, request: Request) -> Response:
        place = request.path_params["episode"], request.path_params["frame"]
        return JSONResponse(await run_in_threadpool(self._answers.moment, *place))

    async def picture(self, request: Request) -> Response:
        place = request.path_params["episode"], request.path_params["frame"]
        camera = request.path_params["camera"]
        content = await run_in_threadpool(self._answers.picture, *place, camera)
        # The page's addresses of pictures contain the number of this run.
        kept = {"Cache-Control": "private, max-age=3600"}
        return Response(content, media_type="image/png", headers=kept)

    async def act(self, request: Request) -> Response:
        body, client, place = await _read_question(request)
        change = {"type": "intervention", **from_json(body.get("change", {}), dict, "change")}
        intervention = from_json(change, Intervention, "change")
        answer = await self._turns.take(client, self._answers.act, *place, intervention)
        return JSONResponse(answer)

    async def occlusion(self, request: Request) -> Response:
        body, client, place = await _read_question(request)
        camera = from_json(body.get("camera"), str, "camera")
        actions = from_json(body.get("actions", []), tuple[str, ...], "actions")
        # A map is not replaced by a chunk, which the page asks for meanwhile.
        turn = f"{client}, map of {camera}"
        answer = await self._turns.take(turn, self._answers.occlusion, *place, camera, actions)
        return JSONResponse(answer)


class _Turns:
    """Calls in one thread, one after the other. Of each client only the newest is made.

    A client waits for at most one call of every other client, however many requests they send.
    """

    def __init__(self) -> None:
        self._worker = Worker("piston-inspect")
        # Gives turns in the order of arrival.
        self._lock = asyncio.Lock()
        self._numbers = itertools.count()
        self._newest: dict[str, int] = {}

    async def take(self, client: str, function: Callable[..., Any], *args: Any) -> Any:
        number = self._newest[client] = next(self._numbers)
        try:
            async with self._lock:
                if self._newest.get(client) != number:
                    raise HTTPException(409, "A newer request of this page has replaced this one.")
                return await asyncio.wrap_future(self._worker.submit(function, *args))
        finally:
            if self._newest.get(client) == number:
                del self._newest[client]


class _Guard:
    """Refuses requests that other web pages caused, and adds the headers of every response.

    A page of the internet may have its name resolved to this machine and then ask for data (DNS
    rebinding): the name is in the header Host. Requests for other sites carry their Origin.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._names = {"localhost", socket.gethostname().lower(), host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the start and the end of the server
            await self._app(scope, receive, send)
            return
        headers: dict[str, str] = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {"Cache-Control": "no-cache", **_HEADERS}
                known = {key for key, _ in message["headers"]}
                added = [(k.lower().encode(), v.encode()) for k, v in given.items()]
                message["headers"] = [
                    *message["headers"],
                    *((key, value) for key, value in added if key not in known),
                ]
            await send(message)

        target: ASGIApp = self._app
        if problem := self._problem(headers):
            logger.warning("A request was refused: %s", problem)
            target = JSONResponse({"error": problem}, 403)
        await target(scope, receive, send_with_headers)

    def _problem(self, headers: dict[str, str]) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        if name not in self._names and not _is_address(name):
            return (
                f"The host {host[:100]!r} is not this server's. Open it by its address or as "
                "localhost."
            )
        if origin is not None and urlsplit(origin).netloc != host:
            return f"The origin {origin[:100]!r} is not allowed: the page asks for itself only."
        return None


async def _read_question(request: Request) -> tuple[dict[str, Any], str, list[int]]:
    """Return the request's object, the client, and the episode and frame."""
    body = await _read_object(request)
    place = [from_json(body.get(key), int, key) for key in ("episode", "frame")]
    return body, from_json(body.get("client"), str, "client"), place


async def _read_object(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request's body."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > _MAX_BODY_BYTES:
            raise ValueError(f"The request is longer than {_MAX_BODY_BYTES} bytes.")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError(f"The request is a {type(body).__name__}; expected an object.")
    return body


def _answer_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code)
    if isinstance(error, ValueError | LookupError):
        notes = getattr(error, "__notes__", ())
        text = str(error.args[0]) if error.args else repr(error)  # a KeyError's str has quotes
        return JSONResponse({"error": " ".join([text, *notes])}, 400)
    logger.error("A request failed.", exc_info=error)
    return JSONResponse({"error": f"The server failed: {error!r}"}, 500)


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket on the port, else on the first free one.

    A browser that connects before the page is served waits for it.
    """
    if port is not None and not 0 <= port < 2**16:
        raise ValueError(f"The port is {port}; expected a number from 0 to {2**16 - 1}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tried = range(PORT, PORT + _NUM_PORTS) if port is None else [port]
    for number in tried:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if port is None and error.errno == errno.EADDRINUSE:
                continue
            error.add_note(f"Nothing is served at {host}:{number}. Choose another host or port.")
            raise
        return listener
    last = PORT + _NUM_PORTS - 1
    raise OSError(f"The ports {PORT} to {last} of {host} are all taken. Name a free one.")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _has_screen() -> bool:
    """Whether a browser has a window to open: else one for terminals would start in this one."""
    if sys.platform != "linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
