"""What the tests of the configuration share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlinf_core.config.composing.compose import compose
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import decode, read
from rlinf_core.config.tree import Composed, MappingNode

Compose = Callable[..., "tuple[Composed, Diagnostics]"]


def _tree(text: str, name: str = "job.yaml") -> MappingNode:
    diagnostics = Diagnostics()
    source = decode(name, text.encode(), diagnostics)
    assert source is not None
    tree = read(source, diagnostics)
    assert tree is not None, list(diagnostics)
    assert diagnostics.ok, list(diagnostics)
    return tree


def _compose(
    text: str, *overrides: str, without_recipe: str | None = None, **environ: str
) -> tuple[Composed, Diagnostics]:
    diagnostics = Diagnostics()
    source = decode("job.yaml", text.encode(), diagnostics)
    assert source is not None
    composed = compose(source, overrides, diagnostics, environ=environ, without_recipe=without_recipe)
    assert composed is not None, list(diagnostics)
    return composed, diagnostics


@pytest.fixture(scope="session")
def tree_of() -> Callable[..., MappingNode]:
    """Reads a text that has no mistakes: `tree_of(text, name="job.yaml")`."""
    return _tree


@pytest.fixture(scope="session")
def composing() -> Compose:
    """Composes a text without bases: `composing(text, *overrides, **environ)`, with what was found."""
    return _compose
