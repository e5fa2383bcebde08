from typing import NamedTuple


class JointSingleCommand(NamedTuple):
    name: str
    cmd: float
