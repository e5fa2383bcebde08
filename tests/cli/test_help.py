"""`--help` of every command: quick, because it never imports torch."""

import subprocess
import sys

from piston.cli import VERBS

SCRIPT = """
import sys
from piston.cli import main
for verb in sys.argv[1:]:
    try:
        main([verb, "--help"])
    except SystemExit as stop:
        assert stop.code == 0, verb
    assert "torch" not in sys.modules, f"`piston {verb} --help` imports torch"
"""


def test_no_help_imports_torch():
    result = subprocess.run([sys.executable, "-c", SCRIPT, *VERBS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for verb in VERBS:
        assert f"usage: piston {verb}" in result.stdout
