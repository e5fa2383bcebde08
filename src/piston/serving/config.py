"""Where a server listens, whom it lets in, and how much it takes on."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import ssl
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    # The default is this machine only; "0.0.0.0" lets other machines connect.
    host: str = "127.0.0.1"
    # 0 takes any free port.
    port: int = 8000
    # What clients are told that they talk to; `piston serve` says the checkpoint.
    name: str | None = None
    # Clients send it as `Authorization: Api-Key …`; without one everybody may connect.
    api_key: str | None = dataclasses.field(default=None, repr=False)
    # Both, or neither; with them clients connect to wss://.
    tls_certificate: Path | None = None
    # The certificate's private key.
    tls_key: Path | None = None
    # Requests that share one inference. 1 switches batching off.
    max_batch: int = 8
    # How long a request may wait for those of other robots. A robot that is alone never waits.
    max_wait_ms: float = 5.0
    # Requests that may wait for the policy; further ones are told "busy" at once.
    max_queue: int = 32
    # Robots that may be connected at the same time.
    max_connections: int = 64
    # Larger messages are refused, and never held in memory.
    max_message_bytes: int = 32 * 2**20
    # A client that takes no bytes for so long is cut off.
    send_timeout_s: float = 10.0
    # A client that answers no ping for so long is cut off; pings are as far apart.
    ping_timeout_s: float = 20.0
    # How long to wait for what is in flight when the server is told to stop.
    shutdown_timeout_s: float = 30.0
    # Error replies carry a traceback.
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_connections", "max_message_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1.")
        for name in ("send_timeout_s", "ping_timeout_s", "shutdown_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0.")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}; expected 0 (any free one) to 65535.")
        if self.max_wait_ms < 0:
            raise ValueError(f"max_wait_ms is {self.max_wait_ms}; expected 0 or more.")
        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            raise ValueError(
                "api_key is empty, or has spaces or characters that no HTTP header can carry. Use "
                "ASCII letters, digits and signs; None lets everybody in."
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs both tls_certificate and tls_key; found only one of them.")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def tls(self) -> ssl.SSLContext | None:
        """Reads the certificate files; an error names the one that is missing or wrong."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        for path in (self.tls_certificate, self.tls_key):
            if not path.is_file():
                raise FileNotFoundError(f"{path} is no file; expected a PEM file for TLS.")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.tls_certificate, self.tls_key)
        except ssl.SSLError as error:
            raise ValueError(
                f"{self.tls_certificate} and {self.tls_key} are not a certificate and its private "
                f"key in PEM format: {error}"
            ) from error
        return context
