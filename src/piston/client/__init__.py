"""Driving a robot with a served policy. Needs numpy, msgpack and websockets; nothing else.

robot → Runtime → broker → Client → server
"""

from piston.client.asynchronous import AsyncChunkBroker, ChunkExhausted, RealTimeBroker
from piston.client.brokers import ActionChunkBroker, Policy, TemporalEnsemble
from piston.client.client import Client
from piston.client.errors import (
    ConnectionLost,
    ProtocolError,
    ReplyTimeout,
    ServerBusy,
    ServerError,
)
from piston.client.interfaces import Agent, Environment, Hooks
from piston.client.runtime import Runtime
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
