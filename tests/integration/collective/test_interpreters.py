"""Two sides under different interpreters: one has torch and numpy, the other nothing but Python."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import PayloadError

THERE = WorkerAddress("there", 0)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with no packages at all."""
    place = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return str(place / "bin" / "python")


def test_a_side_without_torch_talks_and_says_what_it_cannot_hold(make_cast: Any, bare: str) -> None:
    cast = make_cast()
    there = cast.add("there:0", interpreter=bare)
    assert there.info.torch is None
    assert there.info.interpreter != cast.here.endpoint.info.interpreter

    def converse(side: Any) -> str:
        import sys

        here = WorkerAddress("here", 0)
        group = side.group()
        group.send(group.recv(here), here)
        try:
            group.recv(here)
        except Exception as error:
            group.send(bytearray(300_000), here)
            return f"{type(error).__name__} {error} {'torch' in sys.modules}"
        return "it arrived"

    there.begin(converse)
    group = cast.here.group()
    group.send({"text": "x" * 100_000, "bytes": b"y" * 100_000}, THERE)
    assert group.recv(THERE)["bytes"] == b"y" * 100_000
    group.send(torch.ones(100_000), THERE)
    assert len(group.recv(THERE)) == 300_000
    said = there.result()
    assert said.startswith(PayloadError.__name__)
    assert there.info.interpreter in said
    assert said.endswith("False")
