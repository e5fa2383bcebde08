"""Driving a robot with a served policy. Needs numpy, msgpack and websockets; nothing else.

robot → Runtime → broker → Client → server
"""

from piston_client.brokers import (
    ActionChunkBroker,
    AsyncChunkBroker,
    Policy,
    RealTimeBroker,
    TemporalEnsemble,
)
from piston_client.client import Client, ConnectionLost, ReplyTimeout, ServerBusy, ServerError
from piston_client.codec import ProtocolError
from piston_client.limits import LimitExceeded, Limits
from piston_client.runtime import Agent, Environment, Hooks, Percentiles, Runtime, Summary

__version__ = "0.2.0.dev0"
__all__ = [
    "ActionChunkBroker",
    "Agent",
    "AsyncChunkBroker",
    "Client",
    "ConnectionLost",
    "Environment",
    "Hooks",
    "LimitExceeded",
    "Limits",
    "Percentiles",
    "Policy",
    "ProtocolError",
    "RealTimeBroker",
    "ReplyTimeout",
    "Runtime",
    "ServerBusy",
    "ServerError",
    "Summary",
    "TemporalEnsemble",
    "__version__",
]
