"""A policy served to robots over websockets: `run_server(policy, ServerConfig(…))`."""

from piston.serving.batching import Policy
from piston.serving.server import Server, ServerConfig, run_server, running_server

__all__ = ["Policy", "Server", "ServerConfig", "run_server", "running_server"]
