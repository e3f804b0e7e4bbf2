"""The machines that tests of bring-up share: five hosts in three groups, commanded over ssh."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.cluster.hosts import Hosts

NAMES = ("trainer0", "trainer1", "render0", "render1", "robot0")


def _load_hosts() -> Any:
    # Tests are imported by path, so a module beside them is loaded by its path, too.
    name = "rlinf_test_hosts"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("hosts.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Machines `trainer0`, `trainer1`, `render0`, `render1` and `robot0`. A test gives them back as it found them."""
    module = _load_hosts()
    reason = module.why_not()
    if reason:
        pytest.skip(reason)
    made = module.Hosts(NAMES)
    try:
        yield made
    finally:
        made.end()
