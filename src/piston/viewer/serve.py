"""Serve an application of `make_app` on this computer until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
import threading
import webbrowser
from types import FrameType

from piston.extras import needed_for

with needed_for("A page in the browser"):
    import uvicorn
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

PORT = 8050


def run(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    listener: socket.socket | None = None,
    open_browser: bool = True,
) -> bool:
    """Serve the application until Ctrl-C or SIGTERM, then finish pending requests.

    Returns whether all of them were finished: not if a second Ctrl-C came meanwhile. `listener` is
    what `listen` returned before, for the same host.
    """
    listener = listener or listen(host, port)
    number = listener.getsockname()[1]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://[{shown}]:{number}/" if ":" in shown else f"http://{shown}:{number}/"
    logger.info("The page is at %s. Ctrl-C ends it.", url)
    if host not in ("localhost", "::1") and not host.startswith("127."):
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


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; without a port at 8050, or at any free one if that is taken.

    A browser that connects before the page is served waits for it.
    """
    if port is not None and not 0 <= port < 2**16:
        raise ValueError(f"The port is {port}; expected a number from 0 to {2**16 - 1}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    number = PORT if port is None else port
    try:
        return socket.create_server((host, number), family=family, backlog=128)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return listen(host, 0)
        error.add_note(f"Nothing is served at {host}:{number}. Choose another host or port.")
        raise


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Logging is not safe here: the signal may interrupt a log line.
        if not self.should_exit and self.server_state.tasks:
            os.write(2, b"Finishing pending requests. A second Ctrl-C ends at once.\n")
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


def _has_screen() -> bool:
    """Whether a browser has a window to open: else one for terminals would start in this one."""
    if sys.platform != "linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
