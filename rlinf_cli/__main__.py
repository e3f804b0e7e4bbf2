"""`python -m rlinf_cli`, the same as `rlinf`."""

from __future__ import annotations

import sys

from rlinf_cli.launcher import launch

if __name__ == "__main__":
    sys.exit(launch())
