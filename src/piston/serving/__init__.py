"""A policy served to robots over websockets: `run_server(policy, ServerConfig(…))`."""

from piston.serving.batching import Policy, PreparingPolicy
from piston.serving.config import ServerConfig
from piston.serving.server import MOST_IN_A_BATCH, Server, run_server, running_server

__all__ = [
    "MOST_IN_A_BATCH",
    "Policy",
    "PreparingPolicy",
    "Server",
    "ServerConfig",
    "run_server",
    "running_server",
]
