"""Loading of a job for commands: with the findings of `lint` added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rlinf_cli.lint import environment, hardware, leading_zeros, machines, no_effect, placement
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.tree import MappingNode
from rlinf_core.job.load import Job, Probe, Rule, load_job
from rlinf_core.suggest import quoted

RULES: Final[tuple[Rule, ...]] = (environment.check, hardware.check, machines.check)


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
    job.diagnostics.extend(leading_zeros.lint(job))
    job.diagnostics.extend(placement.lint(job))
    no_effect.report_no_effect(job)
    return job


def _note_unchecked(tree: MappingNode, diagnostics: Diagnostics) -> None:
    others = [entry for entry in tree.entries if entry.key.raw != "cluster"]
    if others:
        names = quoted(entry.key.raw for entry in others)
        first = others[0].key
        help_text = "add `recipe: NAME`; `rlinf recipes` lists the names"
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
