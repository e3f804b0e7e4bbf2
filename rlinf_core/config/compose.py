"""Composition, the second stage of loading: a file, its bases and the overrides become one tree without references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.extends import FindBase, with_bases
from rlinf_core.config.source import SourceText
from rlinf_core.config.tree import MappingNode, Path

if TYPE_CHECKING:
    from rlinf_core.config.overrides import Override


class Composed(NamedTuple):
    """A composed configuration.

    Attributes:
        tree: the values that hold; their spans tell which source each came from.
        sources: the file, its bases, and the overrides if there are any.
        unresolved: paths whose reference was refused. That is reported, and what stands there is no value to judge.
        secret: paths whose value came, by a reference, from a variable or a key that looks secret (see `secrets.py`).
    """

    tree: MappingNode
    sources: tuple[SourceText, ...]
    unresolved: frozenset[Path] = frozenset()
    secret: frozenset[Path] = frozenset()


def compose(
    main: SourceText,
    overrides: Sequence[str],
    diagnostics: Diagnostics,
    *,
    environ: Mapping[str, str],
    find_base: FindBase | None = None,
    without_recipe: str | None = None,
) -> Composed | None:
    """Merge a file with its bases, apply the overrides, and resolve the references.

    `environ` is what `${env:NAME}` refers to. `find_base` is asked for a base that does not lie beside the file that
    extends it. `without_recipe` is the only section that anybody reads of a file without the key `recipe`; by default
    all are.

    Returns:
        None when a file could not be read. Every other mistake is reported and leaves its place as it was, so that the
        stages to come find what they can.
    """
    arguments, parsed = _parse(overrides, diagnostics)
    read = with_bases(main, diagnostics, find_base)
    if read is None:
        return None
    tree, sources = read
    if arguments is not None:
        from rlinf_core.config.overrides import apply_overrides

        tree = apply_overrides(tree, parsed, diagnostics)
        sources = (*sources, arguments)
    # A reference needs a `$`, which only an escape can hide. Most files hold neither and load without what resolves.
    if not any("$" in source.text or "\\" in source.text for source in sources):
        return Composed(tree, sources)
    from rlinf_core.config.interpolation import interpolate

    result = interpolate(tree, diagnostics, environ, only=None if tree.entry("recipe") else without_recipe)
    return Composed(result.tree, sources, result.unresolved, result.secret)


def _parse(overrides: Sequence[str], diagnostics: Diagnostics) -> tuple[SourceText | None, Sequence[Override]]:
    if not overrides:
        return None, ()
    from rlinf_core.config.overrides import parse_overrides

    return parse_overrides(overrides, diagnostics)
