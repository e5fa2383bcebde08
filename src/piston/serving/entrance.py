"""Who is let in, and what plain HTTP requests get: `/healthz` and `/metrics`.

Runs in the event loop and touches no policy, so it answers while the policy works.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from http import HTTPStatus

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from piston.serving.metrics import CONTENT_TYPE, Metrics

logger = logging.getLogger(__name__)


class Entrance:
    """Called with each HTTP request; None lets it become a websocket connection."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        api_key: str | None,
        is_ready: Callable[[], bool],
        is_full: Callable[[], bool],
    ) -> None:
        self._metrics = metrics
        self._expected = None if api_key is None else f"Api-Key {api_key}".encode()
        self._is_ready = is_ready
        self._is_full = is_full

    def __call__(self, connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        # Load balancers have no key; whether the server is ready is no secret.
        if path == "/healthz":
            if self._is_ready():
                return connection.respond(HTTPStatus.OK, "OK\n")
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "The policy warms up.\n")
        if not self._is_authorized(request):
            return self._unauthorized(connection)
        if path == "/metrics":
            response = connection.respond(HTTPStatus.OK, self._metrics.render())
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = CONTENT_TYPE
            return response
        if self._is_full():
            return connection.respond(
                HTTPStatus.SERVICE_UNAVAILABLE, "There are too many connections already.\n"
            )
        return None

    def _is_authorized(self, request: Request) -> bool:
        if self._expected is None:
            return True
        found = "\n".join(request.headers.get_all("Authorization"))
        # Takes the same time however much of the key is right.
        return hmac.compare_digest(found.encode(errors="surrogateescape"), self._expected)

    def _unauthorized(self, connection: ServerConnection) -> Response:
        logger.warning("%s has no valid API key: refused.", connection.remote_address)
        response = connection.respond(
            HTTPStatus.UNAUTHORIZED, "Expected the header `Authorization: Api-Key …`.\n"
        )
        response.headers["WWW-Authenticate"] = "Api-Key"
        return response
