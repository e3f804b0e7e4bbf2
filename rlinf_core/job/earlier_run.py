"""Configurations of earlier runs: keys that were removed since, and the commits of their models."""

from __future__ import annotations

import os
from pathlib import Path as FilePath
from typing import Final

from pydantic import BaseModel

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.reading import load_source, read
from rlinf_core.config.secrets import is_secret
from rlinf_core.config.sections.values import commits_in, hub_paths, pins_of
from rlinf_core.config.tree import (
    Composed,
    Path,
    ScalarNode,
    Span,
    find,
    format_path,
)
from rlinf_core.config.validating.kinds import is_of_others
from rlinf_core.config.validating.model_fields import cut, types_at
from rlinf_core.errors import RLinfError
from rlinf_core.foreign.files import read_json_object
from rlinf_core.job.recipe import Job
from rlinf_core.suggest import quoted

_MOST_NAMED: Final = 12
# The number of folders from a checkpoint's up to its run's, both included.
_DEPTH: Final = 3


def is_config_of_a_run(name: str) -> bool:
    """Return whether a file is the `config.yaml` that a run wrote beside its `run.json`."""
    if os.path.basename(name) != "config.yaml":
        return False
    try:
        state = read_json_object(os.path.join(os.path.dirname(name), "run.json"))
    except (OSError, ValueError, RLinfError):
        return False
    return state.get("schema") == "rlinf.run/1"


def without_earlier_keys(
    composed: Composed, model: type[BaseModel], findings: Diagnostics, diagnostics: Diagnostics
) -> Composed:
    """Return the configuration of a run without keys that its recipe no longer has, and report them.

    A run writes every key of its recipe, defaults included, so that a removed key does not show a user's intention.
    A warning reports a value without a counterpart here, or a key of another kind of its section; one note lists all
    other removed keys.

    Args:
        composed: the configuration.
        model: the model of the recipe.
        findings: the findings of its validation.
        diagnostics: receives the warnings and the note.
    """
    file = composed.tree.span.source
    removed = {
        finding.path: finding
        for finding in findings
        # An unknown key in an override is a present mistake. A renamed key is read, and so not removed.
        if finding.path and finding.span.source is file and finding.severity is Severity.ERROR
        if not types_at(model, finding.path, composed.tree)
    }
    noted: list[Path] = []
    for path, finding in removed.items():
        value = find(composed.tree, path)
        is_reported = finding.code == "not-available" and not is_secret(str(path[-1]))
        if is_reported and isinstance(value, ScalarNode):
            message = f"`{format_path(path)}: {value.raw}` has no effect: this rlinf has no such key"
            diagnostics.add(finding._replace(code="no-effect", severity=Severity.WARNING, message=message))
        elif is_of_others(model, composed.tree, path):
            message = f"`{format_path(path)}` has no effect"
            diagnostics.add(finding._replace(code="no-effect", severity=Severity.WARNING, message=message))
        else:
            noted.append(path)
    if noted:
        named = quoted(format_path(path) for path in noted[:_MOST_NAMED])
        others = f" and {len(noted) - _MOST_NAMED} others" if len(noted) > _MOST_NAMED else ""
        message = f"an earlier rlinf wrote keys that this one has no more, and that are left out: {named}{others}"
        diagnostics.add(Diagnostic("no-effect", Severity.NOTE, message, Span(file, 0, 0), noted[0]))
    return composed._replace(tree=cut(composed.tree, dict.fromkeys(removed), {})) if removed else composed


def commits_of_resumed(job: Job) -> tuple[str, ...]:
    """Return the overrides that pin hub names to the commits of the run that a job resumes."""
    paths = [path for _, path in hub_paths(job.partial_config)]
    resume = getattr(getattr(job.partial_config, "runner", None), "resume_dir", None)
    if job.tree is None or not paths or not isinstance(resume, str):
        return ()
    folder = FilePath(resume).absolute()
    # The run's folder is the checkpoint's folder or one of its parents.
    files = [parent / "config.yaml" for parent in (folder, *list(folder.parents)[: _DEPTH - 1])]
    file = next((file for file in files if file.is_file()), None)
    findings = Diagnostics()
    source = None if file is None else load_source(str(file), findings)
    earlier = None if source is None else read(source, findings)
    commits = {} if earlier is None else commits_in(earlier)
    return pins_of(paths, job.tree, lambda path: commits.get(path.name))
