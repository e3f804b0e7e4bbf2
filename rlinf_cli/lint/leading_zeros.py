"""Warnings about integers such as `010`: ten in YAML 1.2, eight to YAML 1.1 loaders."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.tree import scalars
from rlinf_core.job.load import ClusterFile, Job

# A cheap test of the source, before the tree is searched.
_LIKELY = re.compile(r"(?<![\w.])0[0-9]")
_LEADING_ZERO = re.compile(r"[-+]?0+[0-9]+", re.ASCII)


def lint(job: Job) -> Iterator[Diagnostic]:
    """Warn about leading zeros where the model takes an integer; text fields keep them as written."""
    view = job.view
    if view is None or not any(_LIKELY.search(source.text) for source in job.sources):
        return
    from rlinf_core.config.validating.model_fields import types_at

    model = ClusterFile if job.recipe is None else job.recipe.config_model()
    for path, scalar in scalars(view.tree):
        is_octal = type(scalar.value) is int and _LEADING_ZERO.fullmatch(scalar.raw)
        if is_octal and int in types_at(model, path):
            message = f"`{scalar.raw}` is read as {scalar.value}; other YAML loaders read it as octal"
            help = f"write `{scalar.value}`"
            where = view.original(path)
            yield Diagnostic("leading-zero", Severity.WARNING, message, scalar.span, where, help)
