"""Codes of the stage `recipe`: which recipe a file selects, and what it is checked under."""

from __future__ import annotations

from rlinf_core.config.codes.entry import Code, Example
from rlinf_core.config.diagnostics import Severity

_CLUSTER = "cluster:\n  num_nodes: 1\n"

CODES: tuple[Code, ...] = (
    Code(
        "unknown-recipe",
        Severity.ERROR,
        "no installed package offers a recipe of this name",
        "`recipe: NAME` selects what is trained and so decides which sections and keys the file may have. `rlinf "
        "recipes` lists the names. A package of your own adds one through the entry point group `rlinf.recipes`. With "
        "an unknown recipe only `cluster` is checked.",
        Example("recipe: «embodyed»\n" + _CLUSTER),
        Example(_CLUSTER),
    ),
    Code(
        "broken-recipe",
        Severity.ERROR,
        "the recipe's package cannot be loaded, or its rules fail",
        "The package that offers the recipe is installed but raises an error of its own when it is imported, or when "
        "its rules look at the file. The message quotes that error. Install what the package needs, or repair it.",
        Example("recipe: «broken»  # a package that raises an error when it is imported\n" + _CLUSTER),
        Example(_CLUSTER),
    ),
    Code(
        "section-not-checked",
        Severity.NOTE,
        "without `recipe` only `cluster` is checked",
        "Which keys the other sections may hold depends on the recipe. A file without one is enough to bring machines "
        "up and to inspect placements; `rlinf train` refuses it.",
        Example(_CLUSTER + "«runner»:\n  max_steps: 10\n"),
        Example(_CLUSTER),
    ),
    Code(
        "bad-assumption",
        Severity.ERROR,
        "an `--assume` argument cannot be read, or names no node group",
        "`--assume 8` gives every node 8 accelerators, `--assume a800=8` those of group `a800`, and `--assume "
        "a800=8xA800` names their model too. It stands in for accelerators that the file does not declare and nobody "
        "can be asked about.",
        Example(_CLUSTER, assume=("«eight»",)),
        Example(_CLUSTER, assume=("8",)),
    ),
)
