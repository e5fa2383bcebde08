"""The interactive page of `piston inspect`: a moment of the dataset, and a policy's answers to it.

    run(make_inspector(policy, frames, overview_html))

Everything is sent as JSON in the robot's units, with drawings of it. The model answers one request
at a time, in a thread of its own; moments and images are read meanwhile.

Dims: n noise seeds, h steps of a chunk, a action dim.
"""

from __future__ import annotations

import asyncio
import functools
import io
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from piston.extras import needed_for
from piston.inference.policy import Policy
from piston.inspection.frames import Frame, Frames, camera_names, state_dims
from piston.inspection.influence import in_one_number
from piston.inspection.occlusion import Occlusion
from piston.inspection.probe import Intervention, Probe
from piston.inspection.results import as_json, seed_spread
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
# Seeds of the noise behind each answer, as in the overview. They share one prefix, so that the time
# grows slowly with them: the demo's policy takes 72 ms on one core, and 50 ms with one seed.
NUM_SEEDS = 8
_MAP_SEEDS = 2
# Moments with their images in full size, and encoded images and unchanged chunks that are kept.
_NUM_FRAMES, _NUM_KEPT = 32, 512


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
    endpoints = _Endpoints(policy, frames, overview_html, title, num_seeds)
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
    """The pages and answers about the frames of one dataset by one policy."""

    def __init__(
        self,
        policy: Policy,
        frames: Frames,
        overview_html: str | None,
        title: str,
        num_seeds: int,
    ) -> None:
        self._frames, self._overview = frames, overview_html
        self._probe = Probe(policy, range(num_seeds))
        # Of a map only the places matter: all its versions start from the same noise.
        self._map_probe = Probe(policy, range(min(num_seeds, _MAP_SEEDS)))
        self._scale = frames.action_scale()
        # The decoders of a dataset serve one thread at a time.
        self._reading = threading.Lock()
        self._frame = functools.lru_cache(_NUM_FRAMES)(self._read_frame)
        self._png = functools.lru_cache(_NUM_KEPT)(self._encode)
        self._unchanged = functools.lru_cache(_NUM_KEPT)(self._chunks)
        self._background = functools.lru_cache(_NUM_KEPT)(self._read_background)
        self._turns = _Turns()
        self._about = self._describe(title)

    def _describe(self, title: str) -> dict[str, Any]:
        """Return what does not depend on the moment. Raises an error if no frame fits the policy.

        `run` differs in every run of the server: images that a browser keeps belong to it.
        """
        frames, policy = self._frames, self._probe.policy
        first = self._frame(next(iter(frames.episodes)), 0)
        names = camera_names(policy)
        about = {
            "title": title,
            "run": secrets.token_hex(4),
            "has_overview": self._overview is not None,
            "episodes": list(frames.episodes.items()),
            "fps": float(frames.fps),
            "prompts": frames.tasks,
            "cameras": [
                {
                    "slot": slot,
                    "name": names.get(slot, slot),
                    "height": image.shape[0],
                    "width": image.shape[1],
                }
                for slot, image in self._probe.pictures(first).items()
            ],
            "states": [
                {"name": dim.name, "std": _deviation(frames.state_values(dim))}
                for dim in state_dims(policy, first.observation)
            ],
            "actions": [
                {"name": name, "std": scale}
                for name, scale in zip(frames.action_names, self._scale, strict=True)
            ],
            "seeds": self._probe.num_seeds,
        }
        return as_json(about)

    async def page(self, _: Request) -> Response:
        return page(_TEMPLATE, about=self._about)

    async def overview(self, _: Request) -> Response:
        if self._overview is None:
            raise HTTPException(404, "There is no overview of this policy.")
        return HTMLResponse(self._overview)

    async def about(self, _: Request) -> Response:
        return JSONResponse(self._about)

    def moment(self, request: Request) -> Response:
        """Send the state, the prompt, and what was recorded from here on."""
        moment = self._moment(request.path_params["episode"], request.path_params["frame"])
        return JSONResponse({**moment, "drawn": draw_moment(self._about, moment)})

    def picture(self, request: Request) -> Response:
        """Send a camera's image as the model sees it."""
        # The page's addresses of images contain the number of this run.
        kept = {"Cache-Control": "private, max-age=3600"}
        content = self._png(**request.path_params)
        return Response(content, media_type="image/png", headers=kept)

    async def act(self, request: Request) -> Response:
        """Send the unchanged chunk, the changed one and the difference between them."""
        body, client, place = await _read_question(request)
        change = {"type": "intervention", **from_json(body.get("change", {}), dict, "change")}
        intervention = from_json(change, Intervention, "change")
        answer = await self._turns.take(client, self._act, *place, intervention)
        moment = await run_in_threadpool(self._moment, *place)
        drawn = await run_in_threadpool(draw_answer, self._about, moment, answer)
        return JSONResponse({**answer, "drawn": drawn})

    async def occlusion(self, request: Request) -> Response:
        """Send how much covering each part of an image changes some actions, or all of them."""
        body, client, place = await _read_question(request)
        camera = from_json(body.get("camera"), str, "camera")
        actions = from_json(body.get("actions", []), tuple[str, ...], "actions")
        # A map is not replaced by a chunk, which the page asks for meanwhile.
        turn = f"{client}, map of {camera}"
        answer = await self._turns.take(turn, self._occlusion, *place, camera, actions)
        return JSONResponse({**answer, "drawn": draw_map(answer["cells"], answer["value"])})

    def _moment(self, episode: int, number: int) -> dict[str, Any]:
        frame = self._frame(episode, number)
        dims = state_dims(self._probe.policy, frame.observation)
        values = [dim.of(frame.observation) for dim in dims]
        recorded = frame.recorded[frame.is_real]
        return as_json({"prompt": frame.prompt, "state": values, "recorded": recorded})

    def _act(self, episode: int, number: int, change: Intervention) -> dict[str, Any]:
        started = time.perf_counter()
        base = self._unchanged(episode, number)
        answer: dict[str, Any] = {"base": _fan(base)}
        answer |= dict.fromkeys(("changed", "effect", "note"))
        if change != Intervention():
            changed = self._chunks(episode, number, change)
            answer |= {"changed": _fan(changed), "effect": self._effect(base, changed)}
        if change.prompt is not None:
            seen = self._probe.prepare(self._frame(episode, number), change)
            mask = seen.get("tokenized_prompt_mask")
            if mask is not None and mask.all():
                answer["note"] = (
                    f"The sentence fills all {mask.size} tokens that the model reads. What is "
                    "beyond them is cut off and has no effect."
                )
        return as_json({**answer, "ms": 1e3 * (time.perf_counter() - started)})

    def _effect(
        self, base: Float[np.ndarray, "n h a"], changed: Float[np.ndarray, "n h a"]
    ) -> dict[str, Any]:
        """Return the mean absolute change of every action, and all in one number.

        That is the root mean square in standard deviations of the recorded actions, and in spreads
        over the seeds, where there are several.
        """
        strength = in_one_number(changed - base, self._scale)
        effect = {"per_action": np.abs(changed - base).mean((0, 1)), "strength": strength}
        if len(base) == 1:
            return {**effect, "spread": None, "in_spreads": None}
        spread = seed_spread(base)
        noise = in_one_number(spread, self._scale)
        return {
            **effect,
            "spread": spread.mean(0),
            "in_spreads": strength / noise if noise else None,
        }

    def _occlusion(
        self, episode: int, number: int, camera: str, actions: tuple[str, ...]
    ) -> dict[str, Any]:
        started = time.perf_counter()
        occlusion = Occlusion(self._map_probe, self._frames, actions=actions or None)
        found = occlusion.map(self._frame(episode, number), camera, self._background(camera))
        sides = [[cell.left, cell.top, cell.right, cell.bottom] for cell in found.cells]
        ms = 1e3 * (time.perf_counter() - started)
        return as_json({"cells": sides, "value": found.value, "ms": ms})

    def _read_frame(self, episode: int, number: int) -> Frame:
        with self._reading:
            return self._frames[episode, number]

    def _read_background(self, camera: str) -> UInt8[np.ndarray, "_ _ 3"]:
        with self._reading:
            return Occlusion(self._map_probe, self._frames).background(camera)

    def _encode(self, episode: int, frame: int, camera: str) -> bytes:
        occlusion = Occlusion(self._map_probe, self._frames)
        image = Image.fromarray(occlusion.picture(self._frame(episode, frame), camera))
        buffer = io.BytesIO()
        # Speed rather than size: the image does not leave the machine.
        image.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    def _chunks(
        self, episode: int, number: int, change: Intervention | None = None
    ) -> Float[np.ndarray, "n h a"]:
        frame = self._frame(episode, number)
        return self._probe.chunks(frame, [change or Intervention()])[0]


def _fan(chunks: Float[np.ndarray, "n h a"]) -> dict[str, Any]:
    """Return the mean over seeds, and between which values they lie."""
    return {"mean": chunks.mean(0), "low": chunks.min(0), "high": chunks.max(0)}


def _deviation(values: Float[np.ndarray, " n"] | None) -> float:
    """Return the scale of a slider: 1 for numbers that never move or whose column is unknown."""
    return (0.0 if values is None else float(values.std())) or 1.0


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
    """Return the JSON object of a request's body, the client, and the episode and frame."""
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
    place = [from_json(body.get(key), int, key) for key in ("episode", "frame")]
    return body, from_json(body.get("client"), str, "client"), place
