"""The policy server: openpi's websocket protocol, `/healthz` and `/metrics` on one port.

    run_server(policy, ServerConfig(port=8000))      until SIGTERM or SIGINT
    with running_server(policy) as server: ...       in a thread

The event loop only moves bytes; the policy works in the batcher's thread. The server knows nothing
of models: a policy is whatever has `infer_batch` and `metadata`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import websockets.asyncio.server
from websockets.frames import CloseCode

from piston.serving import protocol
from piston.serving.batching import Batcher
from piston.serving.config import ServerConfig
from piston.serving.entrance import Entrance
from piston.serving.framing import Connection
from piston.serving.metrics import Metrics
from piston.serving.protocol import Policy
from piston.serving.session import Session, first_of

logger = logging.getLogger(__name__)

WarmUp = Callable[[], object]

# websockets reports, with a traceback, every client that goes away or talks nonsense.
_websockets_logger = logging.getLogger(f"{__name__}.websockets")
_websockets_logger.setLevel(logging.CRITICAL)

_CLOSE_TIMEOUT = 2.0
# Frames that may wait in memory on one connection before it is read no further.
_FRAMES_AHEAD = 2


def run_server(
    policy: Policy, config: ServerConfig | None = None, *, warm_up: WarmUp | None = None
) -> bool:
    """Serve until SIGTERM or SIGINT, then finish what is in flight.

    Whether all of it was finished: if not, the policy is still at work in its thread.

    `warm_up` runs first, in the thread that will infer; nobody is answered until it is done.
    """

    def prepare() -> None:
        if warm_up is not None:
            warm_up()
        # A model is many objects that live as long as the process: do not look through them again.
        gc.collect()
        gc.freeze()

    server = Server(policy, config or ServerConfig(), warm_up=prepare)
    asyncio.run(_run_until_signal(server))
    return server.finished


async def _run_until_signal(server: Server) -> None:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
        logger.info("Told to stop: finishing what is in flight. A second signal ends it at once.")
        server.stop()

    for number in signals:
        loop.add_signal_handler(number, stop)
    await server.run()


@contextlib.contextmanager
def running_server(
    policy: Policy, config: ServerConfig | None = None, *, warm_up: WarmUp | None = None
) -> Iterator[Server]:
    """A server in a thread, ready on entry, finished on exit; on any free port by default."""
    server = Server(policy, config or ServerConfig(port=0), warm_up=warm_up)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(server.run())
        except BaseException as error:
            failures.append(error)
        finally:
            server.ready.set()

    thread = threading.Thread(target=run, name="piston-server", daemon=True)
    thread.start()
    server.ready.wait()
    try:
        if not failures:
            yield server
    finally:
        server.stop()
        thread.join()
    if failures:
        raise failures[0]


class Server:
    """One policy on one port. `run` it once; `stop` may be called from any thread."""

    def __init__(
        self, policy: Policy, config: ServerConfig, *, warm_up: WarmUp | None = None
    ) -> None:
        # The number listened on, once `ready` is set: clients are answered from then on.
        self.port = config.port
        self.finished = True
        self.ready = threading.Event()
        self._config = config
        self._warm_up = warm_up
        self._metadata = protocol.encode_metadata(policy.metadata, config.name)
        self._limits = protocol.message_limits(config.max_message_bytes)
        self._batcher = Batcher(
            policy,
            max_batch=config.max_batch,
            max_wait=config.max_wait_ms / 1e3,
            max_queue=config.max_queue,
        )
        # Each connection's session, and the task that runs it.
        self._sessions: dict[Session, asyncio.Task[None]] = {}
        self._metrics = Metrics(
            protocol.ERROR_TYPES,
            queue_length=lambda: len(self._batcher),
            connections=lambda: len(self._sessions),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warm = asyncio.Event()
        self._stopping = asyncio.Event()

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
        # A loop that is closed has nothing left to stop.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        listener = await self._listen()
        self._announce()
        try:
            await self._prepare()
            await self._stopping.wait()
        finally:
            listener.close(close_connections=False)
            # From here on there is nothing to wait for, and sessions that wait must end.
            self._warm.set()
            await self._finish_sessions()
            self.finished = self._batcher.stop(timeout=_CLOSE_TIMEOUT)
            if not self.finished:
                logger.warning("The policy is still at work; its result is lost.")

    async def _listen(self) -> websockets.asyncio.server.Server:
        config = self._config
        entrance = Entrance(
            self._metrics,
            api_key=config.api_key,
            is_ready=self._warm.is_set,
            is_full=lambda: len(self._sessions) >= config.max_connections,
        )
        # websockets takes any callable; its type says a class.
        create_connection: Any = functools.partial(
            Connection,
            max_message_bytes=config.max_message_bytes,
            send_timeout=config.send_timeout_s,
        )
        try:
            listener = await websockets.asyncio.server.serve(
                self._serve,
                config.host,
                config.port,
                process_request=entrance,
                # Camera images do not get smaller, only slower.
                compression=None,
                ping_interval=config.ping_timeout_s,
                ping_timeout=config.ping_timeout_s,
                close_timeout=_CLOSE_TIMEOUT,
                max_queue=_FRAMES_AHEAD,
                logger=_websockets_logger,
                create_connection=create_connection,
                ssl=config.tls(),
            )
        except OSError as error:
            error.add_note(f"Nothing is served at {self.url}. Choose another host or port.")
            raise
        self.port = listener.sockets[0].getsockname()[1]
        return listener

    def _announce(self) -> None:
        if self._config.is_local:
            logger.info(
                "Listening at %s, for this machine only (host 0.0.0.0 is for all).", self.url
            )
        else:
            logger.info("Listening at %s, for other machines as well.", self.url)
            if self._config.api_key is None:
                logger.warning("No API key is set: everybody who reaches this port may connect.")

    async def _prepare(self) -> None:
        """Warm up, unless told to stop meanwhile."""
        warm = asyncio.wrap_future(self._batcher.start(self._warm_up))
        await first_of(warm, self._stopping.wait())
        if warm.cancelled():
            return
        warm.result()
        self._warm.set()
        self.ready.set()
        logger.info("Ready.")

    async def _serve(self, connection: websockets.asyncio.server.ServerConnection) -> None:
        assert isinstance(connection, Connection)
        # The entrance counted before the handshake, so a few may have come in together.
        if len(self._sessions) >= self._config.max_connections:
            await connection.close(CloseCode.TRY_AGAIN_LATER, "too many connections")
            return
        session = Session(
            connection,
            self._batcher,
            self._metrics,
            limits=self._limits,
            debug=self._config.debug,
        )
        task = asyncio.current_task()
        assert task is not None
        self._sessions[session] = task
        peer = connection.remote_address
        logger.info("%s connected (%d connections).", peer, len(self._sessions))
        try:
            # A client that comes early waits for the metadata instead of failing.
            await first_of(self._warm.wait(), connection.wait_closed())
            if self._stopping.is_set():
                session.stop()
            await session.run(self._metadata)
        except Exception:
            logger.exception("The connection of %s failed.", peer)
        finally:
            del self._sessions[session]
            logger.info("%s has gone (%d connections).", peer, len(self._sessions))

    async def _finish_sessions(self) -> None:
        for session in self._sessions:
            session.stop()
        if not self._sessions:
            return
        _, unfinished = await asyncio.wait(
            self._sessions.values(), timeout=self._config.shutdown_timeout_s
        )
        if unfinished:
            logger.warning("%d connections were cut off with requests in flight.", len(unfinished))
