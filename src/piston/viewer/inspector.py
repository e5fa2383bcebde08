"""The interactive page of `piston inspect`: a policy's answers as JSON, with drawings of them.

    run(make_inspector(policy, frames, overview_html))

The model answers one request at a time, in a thread of its own; moments and pictures are read
meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from piston.extras import needed_for
from piston.inference.policy import Policy
from piston.inspection.answers import NUM_SEEDS, Answers
from piston.inspection.frames import Frames
from piston.inspection.probe import Intervention
from piston.serialization import from_json
from piston.viewer.app import make_app, page
from piston.viewer.drawings import draw_answer, draw_map, draw_moment
from piston_client.worker import Worker

with needed_for("The page of piston inspect"):
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

_TEMPLATE = Path(__file__).parent / "templates" / "inspector.html"
_MAX_BODY_BYTES = 2**18


def make_inspector(
    policy: Policy,
    frames: Frames,
    overview_html: str | None = None,
    *,
    title: str = "",
    num_seeds: int = NUM_SEEDS,
    host: str = "127.0.0.1",
) -> Starlette:
    """Return the application. `overview_html` is a whole page, shown within this one.

    `title` says which policy and data set the page is about. Raises an error if the data set's
    first frame does not fit the policy.
    """
    endpoints = _Endpoints(Answers(policy, frames, title, num_seeds), overview_html)
    routes = [
        Route("/", endpoints.page),
        Route("/overview", endpoints.overview),
        Route("/api/about", endpoints.about),
        Route("/api/moment/{episode:int}/{frame:int}", endpoints.moment),
        Route("/api/picture/{episode:int}/{frame:int}/{camera:path}", endpoints.picture),
        Route("/api/act", endpoints.act, methods=["POST"]),
        Route("/api/occlusion", endpoints.occlusion, methods=["POST"]),
    ]
    return make_app(routes, host)


class _Endpoints:
    def __init__(self, answers: Answers, overview_html: str | None) -> None:
        self._answers, self._overview = answers, overview_html
        self._about = {**answers.about(), "has_overview": overview_html is not None}
        self._turns = _Turns()

    async def page(self, _: Request) -> Response:
        return page(_TEMPLATE, about=self._about)

    async def overview(self, _: Request) -> Response:
        if self._overview is None:
            raise HTTPException(404, "There is no overview of this policy.")
        return HTMLResponse(self._overview)

    async def about(self, _: Request) -> Response:
        return JSONResponse(self._about)

    async def moment(self, request: Request) -> Response:
        place = request.path_params["episode"], request.path_params["frame"]
        return JSONResponse(await run_in_threadpool(self._moment, *place))

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
        moment = await run_in_threadpool(self._answers.moment, *place)
        drawn = await run_in_threadpool(draw_answer, self._about, moment, answer)
        return JSONResponse({**answer, "drawn": drawn})

    async def occlusion(self, request: Request) -> Response:
        body, client, place = await _read_question(request)
        camera = from_json(body.get("camera"), str, "camera")
        actions = from_json(body.get("actions", []), tuple[str, ...], "actions")
        # A map is not replaced by a chunk, which the page asks for meanwhile.
        turn = f"{client}, map of {camera}"
        answer = await self._turns.take(turn, self._answers.occlusion, *place, camera, actions)
        return JSONResponse({**answer, "drawn": draw_map(answer["cells"], answer["value"])})

    def _moment(self, episode: int, frame: int) -> dict[str, Any]:
        moment = self._answers.moment(episode, frame)
        return {**moment, "drawn": draw_moment(self._about, moment)}


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
