"""Loading of a job for commands: with the findings of `lint` added."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rlinf_cli.job import machine_rules, no_effect, placement_rules
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.tree import MappingNode, scalars
from rlinf_core.job.load import ClusterFile, Job, Probe, Rule, load_job
from rlinf_core.suggest import quoted

RULES: Final[tuple[Rule, ...]] = (machine_rules.check,)


def load_with_lint(
    name: str,
    overrides: Sequence[str] = (),
    *,
    assume: Sequence[str] = (),
    stdin: bytes | None = None,
    environ: Mapping[str, str] | None = None,
    probe: Probe | None = None,
) -> Job:
    """Return the result of `load_job` with the findings that only commands report."""
    job = load_job(name, overrides, assume=assume, stdin=stdin, environ=environ, probe=probe, rules=RULES)
    if job.tree is not None and job.tree.entry("recipe") is None:
        _note_unchecked(job.tree, job.diagnostics)
    job.diagnostics.extend(_leading_zeros(job))
    job.diagnostics.extend(placement_rules.lint(job))
    no_effect.report_no_effect(job)
    return job


def _note_unchecked(tree: MappingNode, diagnostics: Diagnostics) -> None:
    others = [entry for entry in tree.entries if entry.key.raw != "cluster"]
    if others:
        names = quoted(entry.key.raw for entry in others)
        first = others[0].key
        help_text = "add `recipe: NAME`; `rlinf train` lists the names"
        if tree.entry("defaults") is not None:
            help_text += "; name bases with `extends: FILE`, not `defaults`"
        diagnostics.add(
            Diagnostic(
                "section-not-checked",
                Severity.NOTE,
                f"without `recipe` only `cluster` is checked, not {names}",
                first.span,
                (first.raw,),
                help_text,
            )
        )


# A cheap test of the source, before the tree is searched.
_LIKELY = re.compile(r"(?<![\w.])0[0-9]")
_LEADING_ZERO = re.compile(r"[-+]?0+[0-9]+", re.ASCII)


def _leading_zeros(job: Job) -> Iterator[Diagnostic]:
    """Warn of integers such as `010`: ten in YAML 1.2, eight to YAML 1.1 loaders. Text fields keep them as written."""
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
