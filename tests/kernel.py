"""What the kernel of this machine can do."""

from __future__ import annotations

import os
from typing import Final

# Linux 6.15 keeps how a process ended for whoever holds a descriptor of it.
KEEPS_ENDS: Final = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15)
