"""The policy server: openpi's websocket protocol, `/healthz` and `/metrics` on one port.

    run_server(policy, ServerConfig(port=8000))      until SIGTERM or SIGINT
    with running_server(policy) as server: ...       in a thread

The event loop decodes and encodes; the policy works in the batcher's thread, so health checks are
answered meanwhile. A policy is any object that has `infer_batch` and `metadata`; one that
has `prepare` as well checks each request before it joins a batch.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import hmac
import importlib.metadata
import logging
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import websockets.asyncio.server
from websockets.asyncio.server import ServerConnection
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from piston.serving import metrics, protocol
from piston.serving.batching import Batcher, Policy
from piston.serving.config import ServerConfig
from piston.serving.handshakes import (
    BACKLOG,
    CLOSE_TIMEOUT,
    OPEN_TIMEOUT,
    Handshakes,
    lengthen_backlog,
    most_handshakes,
)
from piston.serving.memory import MemoryReturn, keep_blocks
from piston.signals import StopSignals
from piston_client.codec import pack, shortened
from piston_client.worker import Worker

logger = logging.getLogger(__name__)

WarmUp = Callable[[], object]
# Requests that share one inference, where nothing else is asked for.
MOST_IN_A_BATCH = 8

# websockets logs a traceback for every client that goes away or breaks the protocol.
_websockets_logger = logging.getLogger(f"{__name__}.websockets")
_websockets_logger.setLevel(logging.CRITICAL)

# Frames that may wait in memory on one connection before it is read no further.
_FRAMES_AHEAD = 2
_DECODING_THREADS = 2
# What asyncio reads from a socket at once: an observation, where its own 256 KB are only a part.
# Processor time per request with three 224 px images: 30 % more without this and without keeping
# the blocks of messages (one client), and 8 % more without the larger reads (eight clients).
_READ_BYTES = 2**20


class PolicyThreadEnded(OSError):
    """The thread that runs the policy has ended, by SystemExit for instance."""


def run_server(
    policy: Policy,
    config: ServerConfig | None = None,
    *,
    warm_up: WarmUp | None = None,
    best_batch: Callable[[int], int] | None = None,
) -> bool:
    """Serve until SIGTERM or SIGINT, then finish what is in flight.

    Returns whether all of it was finished: if not, the policy is still working in its thread.
    `warm_up` runs first, in the thread that will infer; no client is answered until it is done. If
    the configuration does not say how many requests share an inference, `best_batch` measures it,
    given the largest number.
    """

    def prepare() -> None:
        if warm_up is not None:
            warm_up()
        # The objects of a model live as long as the process: keep the collector away from them.
        gc.collect()
        gc.freeze()

    server = Server(policy, config or ServerConfig(), warm_up=prepare, best_batch=best_batch)
    message = "finishing pending requests. A second signal ends at once."
    with StopSignals(message, then=server.stop):
        asyncio.run(server.run())
    return server.finished


@contextlib.contextmanager
def running_server(
    policy: Policy, config: ServerConfig | None = None, *, warm_up: WarmUp | None = None
) -> Iterator[Server]:
    """Run a server in a thread, ready on entry, finished on exit; by default on any free port."""
    server = Server(policy, config or ServerConfig(port=0), warm_up=warm_up)
    worker = Worker("piston-server")
    serving = worker.submit(lambda: asyncio.run(server.run()))
    serving.add_done_callback(lambda _: server.ready.set())
    server.ready.wait()
    try:
        if not serving.done():
            yield server
    finally:
        server.stop()
        serving.result()


class Server:
    """One policy on one port. Call `run` once; `stop` may be called from any thread."""

    def __init__(
        self,
        policy: Policy,
        config: ServerConfig,
        *,
        warm_up: WarmUp | None = None,
        best_batch: Callable[[int], int] | None = None,
    ) -> None:
        # The port in use, once `ready` is set: clients are answered from then on.
        self.port = config.port
        self.finished = True
        self.ready = threading.Event()
        self._config = config
        self._api_key = config.find_api_key()
        self._warm_up, self._best_batch = warm_up, best_batch
        version = importlib.metadata.version("piston")
        about = {"version": version, "protocol": protocol.VERSION, "name": config.name}
        self._metadata = pack({**policy.metadata, "piston": about})
        max_wait = config.max_wait_ms / 1e3
        max_batch = config.max_batch or MOST_IN_A_BATCH
        self._batcher = Batcher(
            policy, max_batch, max_wait, config.max_queue, config.request_timeout
        )
        self._metrics = metrics.Metrics(protocol.ERROR_TYPES)
        # The sessions of all connections, by the task that runs each.
        self._sessions: dict[asyncio.Task[Any], protocol.Session] = {}
        self._memory = MemoryReturn()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warm, self._stopping = asyncio.Event(), asyncio.Event()

    @property
    def url(self) -> str:
        scheme = "ws" if self._config.tls_certificate is None else "wss"
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"{scheme}://{host}:{self.port}"

    def stop(self) -> None:
        """Accept nothing more; `run` returns when what is in flight has been answered."""
        if self._loop is None:
            self._stopping.set()
            return
        # A closed loop has nothing left to stop.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        keep_blocks()
        # Large messages are decoded there. Each thread of glibc keeps memory of its own.
        self._loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(_DECODING_THREADS))
        listener = await self._listen()
        try:
            warm = self._batcher.start(self._prepare)
            failed = self._batcher.wait_failed()
            await protocol.first_of(warm, self._stopping.wait(), failed)
            if not warm.cancelled():
                failure = warm.exception()
                if failure is not None and not isinstance(failure, Exception):
                    raise PolicyThreadEnded(f"The warm-up ended with {failure!r}.") from failure
                warm.result()
                self._warm.set()
                self.ready.set()
                logger.info("Ready.")
            await protocol.first_of(self._stopping.wait(), self._batcher.wait_failed())
            failure = self._batcher.failure
            if failure is not None:
                raise PolicyThreadEnded(
                    f"The inference thread has ended: {failure!r}. The server stops, because it "
                    "can answer no request any more."
                ) from failure
        finally:
            listener.close(close_connections=False)
            self._stopping.set()
            if self._sessions:
                timeout = self._config.shutdown_timeout_s
                _, cut = await asyncio.wait(self._sessions, timeout=timeout)
                if cut:
                    logger.warning("%d connections were cut off with requests in flight.", len(cut))
            self.finished = self._batcher.stop(timeout=CLOSE_TIMEOUT)
            if not self.finished:
                logger.warning("The policy is still working; its result is lost.")

    def _prepare(self) -> None:
        """Make the policy ready, in the thread that will infer."""
        if self._warm_up is not None:
            self._warm_up()
        if self._best_batch is not None and self._config.max_batch is None:
            self._batcher.max_batch = self._best_batch(MOST_IN_A_BATCH)

    async def _listen(self) -> websockets.asyncio.server.Server:
        config = self._config
        most = most_handshakes(config.max_connections)
        self._handshakes = Handshakes(config.tls(), most)
        # Declared as a class, documented as a factory.
        make_connection: Any = self._handshakes.make_connection
        try:
            listener = await websockets.asyncio.server.serve(
                self._serve,
                config.host,
                config.port,
                process_request=self._process_request,
                # Compression makes camera images slower, not smaller.
                compression=None,
                max_size=config.max_message_bytes,
                max_queue=_FRAMES_AHEAD,
                ping_interval=config.ping_timeout_s,
                ping_timeout=config.ping_timeout_s,
                open_timeout=OPEN_TIMEOUT,
                close_timeout=CLOSE_TIMEOUT,
                logger=_websockets_logger,
                backlog=BACKLOG,
                create_connection=make_connection,
            )
        except OSError as error:
            error.add_note(f"Nothing is served at {self.url}. Choose another host or port.")
            raise
        lengthen_backlog(listener.sockets)
        self.port = listener.sockets[0].getsockname()[1]
        local = "for this machine only (host 0.0.0.0 is for all)"
        audience = local if config.is_local else "for other machines as well"
        logger.info("Listening at %s, %s.", self.url, audience)
        if not config.is_local and self._api_key is None:
            logger.warning("No API key is set: everybody who reaches this port may connect.")
        return listener

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a plain HTTP request; None lets it become a websocket connection."""
        path = request.path.partition("?")[0]
        # Load balancers have no key, and whether the server is ready is no secret.
        if path == "/healthz":
            seconds, limit = self._batcher.seconds_in_inference(), self._config.policy_timeout
            if seconds > limit:
                text = f"The policy has been working for {seconds:.0f} s; the limit is {limit:g} s."
                return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{text}\n")
            if self._batcher.has_failed:
                text = "The inference thread has ended.\n"
                return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, text)
            if self._warm.is_set():
                return connection.respond(HTTPStatus.OK, "OK\n")
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "The policy warms up.\n")
        origins = request.headers.get_all("Origin")
        if not set(origins) <= set(self._config.allow_origin):
            found = shortened(", ".join(origins))
            logger.warning(
                "%s asks for the web page %s: refused.", protocol.name_of_peer(connection), found
            )
            text = f"The origin {found} is not allowed; the server's option is --allow-origin.\n"
            return connection.respond(HTTPStatus.FORBIDDEN, text)
        key = self._api_key
        found = "\n".join(request.headers.get_all("Authorization"))
        # The comparison takes the same time however much of the key is right.
        if key is not None and not hmac.compare_digest(
            found.encode(errors="surrogateescape"), f"Api-Key {key}".encode()
        ):
            logger.warning("%s has no valid API key: refused.", protocol.name_of_peer(connection))
            text = "Expected the header `Authorization: Api-Key …`.\n"
            response = connection.respond(HTTPStatus.UNAUTHORIZED, text)
            response.headers["WWW-Authenticate"] = "Api-Key"
            return response
        if path == "/metrics":
            text = self._metrics.render(len(self._batcher), len(self._sessions))
            response = connection.respond(HTTPStatus.OK, text)
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = metrics.CONTENT_TYPE
            return response
        if not self._has_room():
            text = "There are too many connections already.\n"
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, text)
        return None

    def _has_room(self) -> bool:
        """Whether a new connection is within the limit, or an idle one can be closed for it."""
        is_full = len(self._sessions) >= self._config.max_connections
        return not is_full or self._first_to_dismiss() is not None

    def _first_to_dismiss(self) -> asyncio.Task[Any] | None:
        """Return the task of the session that is closed when another robot needs its place."""
        limit = self._config.idle_timeout
        idle = {
            task: session
            for task, session in self._sessions.items()
            if session.idle_seconds >= limit
        }
        return min(idle, key=lambda task: idle[task].dismissal_order, default=None)

    async def _serve(self, connection: ServerConnection) -> None:
        # Several connections may have passed `_process_request` together.
        if self._stopping.is_set() or not self._has_room():
            await connection.close(CloseCode.TRY_AGAIN_LATER, "no more connections are accepted")
            return
        if len(self._sessions) >= self._config.max_connections:
            idle = self._first_to_dismiss()
            assert idle is not None
            dismissed = self._sessions.pop(idle).dismiss()
            self._handshakes.begin(dismissed, dismissed.transport)
            logger.info("%s is idle: closed for another robot.", protocol.name_of_peer(dismissed))
        self._handshakes.end(connection)
        transport: Any = connection.transport
        if hasattr(transport, "max_size"):
            transport.max_size = _READ_BYTES
        session = protocol.Session(
            connection,
            self._batcher,
            self._metrics,
            limits=protocol.RequestLimits(
                self._config.max_text_length, self._config.max_image_side
            ),
            send_timeout=self._config.send_timeout_s,
            debug=self._config.debug,
        )
        task = asyncio.current_task()
        assert task is not None
        self._sessions[task] = session
        peer = protocol.name_of_peer(connection)
        logger.info("%s connected; open connections: %d.", peer, len(self._sessions))
        try:
            await session.run(self._metadata, self._warm, self._stopping)
        except Exception:
            logger.exception("The connection of %s failed.", peer)
        finally:
            self._sessions.pop(task, None)
            self._handshakes.begin(connection, connection.transport)
            self._memory.schedule()
            logger.info("%s has gone; open connections: %d.", peer, len(self._sessions))
