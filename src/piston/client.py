"""The old name of `piston_client`, until version 0.3.0: the same modules, of which there is one."""

import sys

from piston_client import *  # noqa: F403

for _name, _module in list(sys.modules.items()):
    _package, _dot, _rest = _name.partition(".")
    if _package == "piston_client":
        sys.modules["piston.client" + _dot + _rest] = _module
