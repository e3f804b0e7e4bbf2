"""rlinf_core: configuration, placement and the worker runtime that the `rlinf` command uses.

The public names are listed in `__init__.pyi` and imported on first use, so that reading a configuration never pays for
ray or torch.
"""

from __future__ import annotations

from rlinf_core.process.import_path import pin_own_packages
from rlinf_core.process.public_names import public_names

pin_own_packages()
__getattr__, __dir__ = public_names(__name__, __file__)
