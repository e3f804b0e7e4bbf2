"""A job as commands load it: with everything that is found in its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rlinf_cli.lint import environment, machines, placement
from rlinf_core.job.load import Job, Probe, Rule, load_job

RULES: Final[tuple[Rule, ...]] = (environment.check, machines.check)


def load_with_lint(
    name: str,
    overrides: Sequence[str] = (),
    *,
    assume: Sequence[str] = (),
    stdin: bytes | None = None,
    environ: Mapping[str, str] | None = None,
    probe: Probe | None = None,
) -> Job:
    """Return what `load_job` returns, with the findings that only commands tell."""
    job = load_job(name, overrides, assume=assume, stdin=stdin, environ=environ, probe=probe, rules=RULES)
    job.diagnostics.extend(placement.lint(job))
    return job
