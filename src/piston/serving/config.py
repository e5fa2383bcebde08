"""The options of a server: where it listens, who is let in, and what it allows."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
import ssl
from pathlib import Path

from piston.serving.protocol import RequestLimits
from piston_client.client import find_api_key


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    # The address to listen on. By default only this machine can connect; "0.0.0.0" lets others.
    host: str = "127.0.0.1"
    # The port to listen on; 0 takes any free one.
    port: int = 8000
    # What clients are told that they talk to; `piston serve` says the checkpoint.
    name: str | None = None
    # The key that clients must send (`Authorization: Api-Key …`); without one all may connect. By
    # default the environment's PISTON_API_KEY. Other users of this machine can see options: prefer
    # the variable or --api-key-file.
    api_key: str | None = dataclasses.field(default=None, repr=False)
    # A file that contains the key.
    api_key_file: Path | None = None
    # Web pages that may connect, such as https://robots.example.com. Browsers send the page's
    # origin with a request, robots' clients send none.
    allow_origin: tuple[str, ...] = ()
    # The server's certificate, for connections to wss://; needs --tls-key.
    tls_certificate: Path | None = None
    # The private key of the certificate.
    tls_key: Path | None = None
    # Requests that share one inference; 1 switches batching off. By default at most 8, and fewer if
    # a larger batch takes as long per request, which is measured before the server is ready.
    max_batch: int | None = None
    # How long a request may wait for those of other robots. A robot that is alone never waits.
    max_wait_ms: float = 5.0
    # Requests that may wait for the policy; further ones are told "busy" at once.
    max_queue: int = 32
    # Robots that may be connected at the same time.
    max_connections: int = 64
    # Seconds without a request after which a connection is closed if another robot needs it, which
    # is when max_connections are open. The client connects again when it asks.
    idle_timeout: float = 10.0
    # A larger message closes its connection, with code 1009.
    max_message_bytes: int = 32 * 2**20
    # Longer texts in an observation, such as prompts, are refused; in characters.
    max_text_length: int = RequestLimits.text_length
    # Images, and other arrays of three or more axes, with a longer side are refused; in pixels.
    max_image_side: int = RequestLimits.image_side
    # A client that takes no reply for so long is cut off.
    send_timeout_s: float = 10.0
    # A client that answers no ping for so long is cut off; pings are as far apart.
    ping_timeout_s: float = 20.0
    # Seconds after which /healthz reports a policy that is still working on one batch (503).
    policy_timeout: float = 60.0
    # Seconds after which a request that the policy has not answered gets an error.
    request_timeout: float = 60.0
    # How long to wait for what is in flight when the server is told to stop.
    shutdown_timeout_s: float = 30.0
    # Error replies carry a traceback.
    debug: bool = False

    def __post_init__(self) -> None:
        sizes = ("max_message_bytes", "max_text_length", "max_image_side")
        counts = dict.fromkeys(("max_batch", "max_queue", "max_connections", *sizes), 1)
        for name, least in {**counts, "port": 0, "max_wait_ms": 0}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}.")
        timeouts = ("send_timeout_s", "ping_timeout_s", "shutdown_timeout_s")
        for name in (*timeouts, "idle_timeout", "policy_timeout", "request_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0.")
        if self.port >= 2**16:
            raise ValueError(f"port is {self.port}; expected at most 65535.")
        if self.api_key is not None:
            find_api_key(self.api_key, self.api_key_file)
        for origin in self.allow_origin:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+", origin):
                raise ValueError(
                    f"allow_origin has {origin!r}; expected a scheme and a host in lower case, "
                    "without a path, such as https://robots.example.com."
                )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs both tls_certificate and tls_key; found only one of them.")

    def find_api_key(self) -> str | None:
        """Return the key given here, in the file or in the environment; read when serving."""
        return find_api_key(self.api_key, self.api_key_file)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    def tls(self) -> ssl.SSLContext | None:
        """Read the certificate files; an error names the one that is missing or wrong."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        for path in (self.tls_certificate, self.tls_key):
            if not path.is_file():
                raise FileNotFoundError(f"{path} is no file; expected a PEM file for TLS.")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Tickets would arrive at a client while it sends its first request. OpenSSL does not allow
        # reading and writing at the same time, which clients with a thread for each do: one in
        # forty of their connections was not opened.
        context.num_tickets = 0
        try:
            context.load_cert_chain(self.tls_certificate, self.tls_key)
        except ssl.SSLError as error:
            raise ValueError(
                f"{self.tls_certificate} and {self.tls_key} are not a certificate and its private "
                f"key in PEM format: {error}"
            ) from error
        return context
