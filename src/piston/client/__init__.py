"""Driving a robot with a served policy. Needs numpy, msgpack and websockets; nothing else.

robot → Runtime → broker → Client → server
"""

from piston.client.brokers import (
    ActionChunkBroker,
    AsyncChunkBroker,
    ChunkExhausted,
    Policy,
    RealTimeBroker,
    TemporalEnsemble,
)
from piston.client.client import Client
from piston.client.errors import (
    ConnectionLost,
    ProtocolError,
    ReplyTimeout,
    ServerBusy,
    ServerError,
)
from piston.client.runtime import Agent, Environment, Hooks, Runtime
from piston.client.timing import Percentiles, Summary

__all__ = [
    "ActionChunkBroker",
    "Agent",
    "AsyncChunkBroker",
    "ChunkExhausted",
    "Client",
    "ConnectionLost",
    "Environment",
    "Hooks",
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
]
