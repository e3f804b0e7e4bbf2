"""The worker classes that programs name without importing them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from rlinf_core.worker.worker_reference import WorkerReference

PROGRAMS = (
    "recipes.agent.program",
    "recipes.embodied.program",
    "recipes.math.program",
    "recipes.serve.serve_program",
    "recipes.sft_chat.chat_runner",
)


def references() -> Iterator[WorkerReference[Any]]:
    for program in PROGRAMS:
        yield from (var for var in vars(import_module(program)).values() if isinstance(var, WorkerReference))


@pytest.mark.parametrize("reference", list(references()), ids=lambda item: item.__name__)
def test_a_reference_says_of_its_class_what_is_so(reference: WorkerReference[Any]) -> None:
    resolved = pickle.loads(pickle.dumps(reference))
    assert (resolved.__module__, resolved.__name__) == (reference.__module__, reference.__name__)
    assert resolved.forked == reference.forked
    assert resolved.config_section == reference.config_section
    assert set(reference._rlinf_methods()) <= set(resolved._rlinf_methods())


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_driver_imports_no_torch(program: str) -> None:
    code = f"import sys, {program}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
