"""`rlinf import` over the job files of RLinf and verl, counted by verdict and by key.

`python -m tests.conformance.imports DIR [PROJECT...]` prints the counts of the checkouts `DIR/RLinf` and `DIR/verl`;
`--write` stores them, `--list` names every file that does not become a valid one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rlinf_cli.importing.convert import convert
from rlinf_cli.importing.shared_rules import Fate
from rlinf_cli.importing.sources import job_files, read_job
from rlinf_core.config.diagnostics import Severity
from rlinf_core.errors import RLinfError
from tests.conformance.recorded_scripts import job_of, recorded

COUNTS = Path(__file__).with_name("import_counts.json")
FOLDERS = {"RLinf": ("examples", "tests", "evaluations"), "verl": ("examples",)}
# A count that may only rise, and the one that may only fall.
RISING = ("valid", "valid or refused for one thing", "evaluations imported")
FALLING = ("keys without a reason",)
# Errors that name a thing that rlinf does not have.
_LACKING = ("unknown-choice", "not-available", "unknown-key", "process-spans-nodes")
# Reasons that help nobody to decide.
_BARE = ("rlinf has nothing that this key could set", "it steers verl's own programs")


class Verdict(NamedTuple):
    """The result for one file: `valid`, `lacking`, `invalid`, `refused` or `unread`; why; and its keys by fate."""

    file: str
    kind: str
    why: str = ""
    evaluates: bool = False
    keys: Mapping[str, int] = MappingProxyType({})


def files_of(project: str, checkout: Path) -> list[Path]:
    """Return the job files of a checkout."""
    if project == "verl":
        scripts = sorted((checkout / "examples").rglob("*.sh"))
        return [*scripts, checkout / "verl" / "trainer" / "config" / "ppo_trainer.yaml"]
    return [file for folder in FOLDERS[project] for file in job_files(checkout / folder)[0]]


def verdicts(project: str, checkout: Path) -> Iterator[Verdict]:
    """Convert every job of a checkout, with no variable set; that of a script is what its command line composes."""
    for file in files_of(project, checkout):
        name = str(file.relative_to(checkout))
        with tempfile.TemporaryDirectory() as folder:
            try:
                job = job_file(file, checkout, Path(folder)) if file.suffix == ".sh" else file
            except Exception as error:
                yield Verdict(name, "unread", f"{type(error).__name__}: {error}")
                continue
            yield _verdict(job, name) if job else Verdict(name, "refused", "it starts no training")


def job_file(script: Path, checkout: Path, folder: Path) -> Path | None:
    """Write the job that a script starts into a folder; None where it starts none."""
    launch = recorded(script, checkout, folder)
    if launch is None:
        return None
    file = folder / "job.yaml"
    file.write_text(job_of(launch, checkout))
    return file


def _verdict(file: Path, name: str) -> Verdict:
    try:
        job, findings = read_job(str(file), [], [], {})
        if job is None:
            errors = [finding.message for finding in findings if finding.severity is Severity.ERROR]
            return Verdict(name, "unread", errors[0] if errors else "")
        converted = convert(job, {})
    except RLinfError as error:
        return Verdict(name, "refused", error.message)
    keys = Counter[str](outcome.fate.name for outcome in converted.outcomes)
    keys["bare"] = sum(
        outcome.fate in (Fate.LEFT_OUT, Fate.NOT_NEEDED) and (not outcome.reason or outcome.reason.startswith(_BARE))
        for outcome in converted.outcomes
    )
    evaluates = "\n  only_eval: true" in converted.text.lower()
    if not converted.errors:
        return Verdict(name, "valid", "", evaluates, keys)
    lacking = [error.message for error in converted.errors if error.code in _LACKING]
    others = [error.message for error in converted.errors]
    return Verdict(name, "lacking" if lacking else "invalid", (lacking or others)[0], evaluates, keys)


def counts(results: list[Verdict]) -> dict[str, int]:
    """Count the verdicts, and the keys."""
    kinds = Counter(result.kind for result in results)
    keys: Counter[str] = Counter()
    for result in results:
        keys.update(result.keys)
    return {
        "files": len(results),
        "valid": kinds["valid"],
        "valid or refused for one thing": kinds["valid"] + kinds["lacking"] + kinds["refused"],
        "invalid": kinds["invalid"],
        "unread": kinds["unread"],
        "evaluations imported": sum(result.evaluates for result in results),
        "keys": sum(keys[fate.name] for fate in Fate),
        **{f"keys {fate}": keys[fate.name] for fate in Fate},
        "keys without a reason": keys["bare"],
    }


def stored() -> dict[str, dict[str, int]]:
    """Return the counts by project."""
    data: dict[str, dict[str, int]] = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
    return data


def main(arguments: list[str]) -> None:
    """Print the counts; see the module."""
    folder, *projects = [argument for argument in arguments if not argument.startswith("--")]
    data: dict[str, Any] = stored()
    for project in projects or FOLDERS:
        checkout = Path(folder, project)
        if not checkout.is_dir():
            print(f"{project}: there is no `{checkout}`")
            continue
        results = list(verdicts(project, checkout))
        data[project] = counts(results)
        print(project, json.dumps(data[project], indent=2))
        if "--list" in arguments:
            for result in results:
                if result.kind != "valid":
                    print(f"  {result.kind:8} {result.file}: {result.why}")
    if "--write" in arguments:
        COUNTS.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
