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
from piston.client.client import Client, ConnectionLost, ReplyTimeout, ServerBusy, ServerError
from piston.client.codec import ProtocolError
from piston.client.limits import LimitExceeded, Limits
from piston.client.runtime import Agent, Environment, Hooks, Percentiles, Runtime, Summary

__all__ = [
    "ActionChunkBroker",
    "Agent",
    "AsyncChunkBroker",
    "ChunkExhausted",
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
]
