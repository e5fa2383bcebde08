"""`python -m piston.cli`, the same as `piston`."""

import sys

from piston.cli import main

sys.exit(main())
