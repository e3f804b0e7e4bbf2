"""Values of variables as they may be printed."""

from __future__ import annotations

from rlinf_cli.placement.job_layout import masked
from rlinf_core.config.secrets import MASK


def test_masking_an_environment() -> None:
    inputs = {"HF_TOKEN": "x", "EMPTY_KEY": "", "PATH": "/bin"}
    assert {name: masked(name, value, ()) for name, value in inputs.items()} == {
        "HF_TOKEN": MASK,
        "EMPTY_KEY": "",
        "PATH": "/bin",
    }
