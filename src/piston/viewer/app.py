"""The application around all pages: templates, static files, errors as JSON, and who may ask.

Nothing is fetched from other machines, and web pages of other origins are refused.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from piston.extras import needed_for
from piston.report.document import make_environment

with needed_for("A page in the browser"):
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import BaseRoute, Mount
    from starlette.staticfiles import StaticFiles

logger = logging.getLogger(__name__)

_STATIC = Path(__file__).with_name("static")
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; media-src data:; "
        "style-src 'self' 'unsafe-inline'; frame-ancestors 'self'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_environment = functools.cache(make_environment)


def page(template: Path, **values: Any) -> Response:
    """Return what a template makes; it may use those beside it, and those of the reports."""
    environment = _environment(template.parent)
    return HTMLResponse(environment.get_template(template.name).render(**values))


def make_app(routes: Sequence[BaseRoute], host: str = "127.0.0.1") -> Starlette:
    """Return the application that serves these routes, and the files of `static/`.

    `host` is where it will be served. Requests under another name are refused: a page of the
    internet may have its name resolved to this machine and then ask for data (DNS rebinding). That
    is not possible with an address in place of a name, so every address is allowed.
    """
    names = {"localhost", socket.gethostname().lower(), host.lower()}
    own_pages_only = functools.partial(_own_pages_only, names)
    handlers: dict[Any, Any] = {
        HTTPException: _answer_error,
        ValueError: _answer_error,
        LookupError: _answer_error,
        Exception: _answer_error,
    }
    return Starlette(
        routes=[*routes, Mount("/static", StaticFiles(directory=_STATIC))],
        exception_handlers=handlers,
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=own_pages_only)],
    )


async def _own_pages_only(
    names: Collection[str], request: Request, answer: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Refuse requests that pages of other sites caused; add the headers of every response."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    problem = None
    if name not in names and not _is_address(name):
        problem = (
            f"The host {host[:100]!r} is not allowed: open the page by this computer's address, or "
            "as localhost."
        )
    elif origin is not None and urlsplit(origin).netloc != host:
        problem = f"The origin {origin[:100]!r} is not allowed: a page asks for itself only."
    if problem is not None:
        logger.warning("A request was refused: %s", problem)
        response: Response = JSONResponse({"error": problem}, 403)
    else:
        response = await answer(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _answer_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code)
    if isinstance(error, ValueError | LookupError):
        notes = getattr(error, "__notes__", ())
        text = str(error.args[0]) if error.args else repr(error)  # a KeyError's str has quotes
        return JSONResponse({"error": " ".join([text, *notes])}, 400)
    logger.error("A request failed.", exc_info=error)
    return JSONResponse({"error": f"The server failed: {error!r}"}, 500)
