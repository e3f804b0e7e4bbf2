"""All codes by name."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from rlinf_core.config.codes.entry import Code

# One module per stage of loading, in the order of the stages; each holds a tuple CODES.
_STAGES = ("reading", "composing", "shape", "cluster", "placement", "recipe", "job")


@cache
def codes_by_stage() -> dict[str, tuple[Code, ...]]:
    """Return the codes of every stage of loading, in the order of the stages."""
    return {stage: import_module(f"rlinf_core.config.codes.{stage}").CODES for stage in _STAGES}


@cache
def all_codes() -> dict[str, Code]:
    """Return every code, stage by stage. Imported only to explain or to test; a normal run never pays for it."""
    found: dict[str, Code] = {}
    for codes in codes_by_stage().values():
        for code in codes:
            if code.name in found:
                raise RuntimeError(f"two entries for code {code.name}")
            found[code.name] = code
    return found
