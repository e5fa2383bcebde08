"""A policy served to robots over websockets: `run_server(policy, ServerConfig(…))`."""

from piston.serving.config import ServerConfig
from piston.serving.protocol import Policy
from piston.serving.server import Server, run_server, running_server

__all__ = ["Policy", "Server", "ServerConfig", "run_server", "running_server"]
