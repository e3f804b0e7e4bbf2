"""The conversion of one file, which is composed, renamed key by key, written with its comments and validated.

Unsupported keys are found in three ways: by rows (`foreign.toml`), by the sections' lists (`unavailable`), or by
validating the result: rejected values are removed, with the finding as the reason, until the file is valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlinf_cli.importing import projects, rule_rows
from rlinf_cli.importing.decisions import CommentFinder, Conversion, puts
from rlinf_cli.importing.document import written
from rlinf_cli.importing.project_rules import cameras, is_off_policy, teacher_rows
from rlinf_cli.importing.references import References
from rlinf_cli.importing.shared_rules import Added, Fate, KeyOutcome, LeftOut, Table, Values
from rlinf_cli.importing.sources import HydraFile
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.tree import MappingNode, Path, ScalarNode, find, format_path
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.job.load import Job

# Findings about this machine rather than the file.
OF_THIS_MACHINE: Final = frozenset(("missing-extra", "unusable-path", "unknown-variable"))
# Keys that change what is trained: they are never removed, and the file is invalid until the user decides.
_NEVER_LEFT_OUT: Final = frozenset(
    (
        "backend",
        "env_type",
        "task",
        "model_type",
        "adv_type",
        "loss_type",
        "reward_type",
        "recipe",
        "total_num_envs",
        "group_size",
        "image_key",
        "video_key",
        "enabled",
        "use_reward_model",
    )
)
_SIZES: Final = frozenset(("batch-not-divisible", "envs-not-divisible", "groups-not-divisible", "missing-key"))
_ROUNDS: Final = 12


@dataclass
class Converted:
    """A converted file.

    Attributes:
        text: the new file.
        project, recipe, why: the source project, the recipe, and the reason for it.
        outcomes: the outcome for each key, in the order of the composed file.
        added: values that the old file does not have.
        job: the new file as `rlinf validate` reads it.
    """

    text: str
    project: projects.Project
    recipe: str
    why: str
    outcomes: list[KeyOutcome]
    added: list[Added]
    job: Job

    @property
    def errors(self) -> list[Diagnostic]:
        """Errors of the new file itself."""
        return [error for error in self._found if error.code not in OF_THIS_MACHINE]

    @property
    def lacking(self) -> list[Diagnostic]:
        """Errors of this machine: packages, folders and variables that the new file needs."""
        return [error for error in self._found if error.code in OF_THIS_MACHINE]

    @property
    def _found(self) -> list[Diagnostic]:
        return [diagnostic for diagnostic in self.job.diagnostics if diagnostic.severity is Severity.ERROR]

    @property
    def counts(self) -> dict[Fate, int]:
        """The number of keys by fate."""
        return {fate: sum(outcome.fate is fate for outcome in self.outcomes) for fate in Fate}

    @property
    def verdict(self) -> str:
        """The result of validating the new file, in a few words."""
        errors, lacking = len(self.errors), len(self.lacking)
        if errors:
            return f"{errors} error{'s' * (errors != 1)}"
        return f"valid; this machine lacks {lacking} thing{'s' * (lacking != 1)}" if lacking else "valid"


def convert(file: HydraFile, environ: Mapping[str, str]) -> Converted:
    """Convert a composed file.

    Raises:
        ConfigError: it belongs to no supported project, or no recipe matches it.
    """
    project = projects.project_of(file.tree)
    recipe, why = projects.recipe_of(project, file.tree)
    references = References(file.tree, environ)
    rules, sections = _rules(project, recipe, file.tree, Values(references))
    model = find_recipe(recipe).config_model()
    comments = CommentFinder(file.main)
    conversion = Conversion(file, project, recipe, model, rules, sections, references, comments)
    conversion.walk(file.tree, (), ())
    added = [*_additions(conversion)]
    _first_of_each(conversion, added)
    rounds = 0
    while True:
        text, outcomes = written(conversion, added)
        job = load_with_lint("-", stdin=text.encode(), environ=environ)
        refusals = _refusals(conversion, job)
        rounds += 1
        if not refusals or rounds >= _ROUNDS:
            return Converted(text, project, recipe, why, outcomes, added, job)
        conversion.refused |= refusals


def _rules(
    project: projects.Project, recipe: str, tree: MappingNode, values: Values
) -> tuple[Table, Mapping[Path, Path]]:
    """Return the rules for a file, and the sections that have other paths here."""
    if project is projects.Project.VERL:
        if recipe == "sft_chat":
            return rule_rows.rules_of("verl_sft"), projects.VERL_SFT_SECTIONS
        return {**rule_rows.rules_of("verl"), **rule_rows.as_rules(teacher_rows(values))}, projects.VERL_SECTIONS
    if recipe == "embodied" and rule_rows.acts_alone(tree):
        sections = {**projects.RLINF_SECTIONS, **projects.EVALUATION_SECTIONS}
        return rule_rows.rules_of("RLinf", "embodied", "evaluation"), sections
    if recipe == "embodied":
        return rule_rows.rules_of(
            "RLinf", "embodied", *(["sac"] if is_off_policy(values) else [])
        ), projects.RLINF_SECTIONS
    if recipe == "sft":
        # Recipe `sft` says by its name what the task is, and has no section `algorithm`.
        rules = rule_rows.rules_of("RLinf", "embodied", "sft")
        return {key: rule for key, rule in rules.items() if not key.startswith("algorithm.")}, projects.RLINF_SECTIONS
    return rule_rows.rules_of("RLinf", "math", *(["agent"] if recipe == "agent" else [])), projects.RLINF_SECTIONS


def _first_of_each(conversion: Conversion, added: list[Added]) -> None:
    """Drop values already set by another key, and values at the path of a section."""
    writer_by_path: dict[Path, str] = {}
    values = [put.path for step in conversion.steps for put in puts(step.result)] + [extra.path for extra in added]
    holders = {path[:size] for path in values for size in range(1, len(path))}
    for step in conversion.steps:
        for put in puts(step.result):
            if put.path in holders:
                empty = isinstance(put.value, ScalarNode) and put.value.value is None
                step.result = LeftOut(f"`{format_path(put.path)}` is a section", quiet=empty)
                break
            first = writer_by_path.setdefault(put.path, step.leaf.name)
            if first != step.leaf.name:
                step.result = LeftOut(f"`{first}` sets `{format_path(put.path)}`", quiet=True)


def _additions(conversion: Conversion) -> Iterator[Added]:
    """Yield values that the recipe needs and the old file does not set."""
    values, tree = Values(conversion.references), conversion.file.tree
    written_paths = {put.path for step in conversion.steps for put in puts(step.result)}
    if conversion.project is projects.Project.VERL and conversion.recipe == "sft_chat":
        yield from rule_rows.sft_places(values)
    elif conversion.project is projects.Project.VERL:
        yield from rule_rows.verl_places(values)
        if ("data", "answer_key") not in written_paths:
            yield Added(("data", "answer_key"), "reward_model.ground_truth", "where verl's rows have the right answer")
        if ("data", "apply_chat_template") not in written_paths:
            yield Added(("data", "apply_chat_template"), True, "the prompts of verl's rows are messages of a chat")
        if ("reward", "reward_type") not in written_paths:
            yield Added(("reward", "reward_type"), "math", "verl selects the reward by data set; choose one here")
    elif conversion.recipe in ("math", "agent"):
        yield from _rlinf_math(tree, values)
        if conversion.recipe == "agent":
            yield from rule_rows.agent_needs(tree)
    else:
        yield from cameras(values, written_paths)
        if rule_rows.acts_alone(tree):
            yield from rule_rows.evaluation_needs(tree, written_paths)
    if ("runner", "max_steps") not in written_paths and not rule_rows.acts_alone(tree):
        yield Added(("runner", "max_steps"), -1, "the recipe's default would end the run early")
    lengths = [values.get(path) for path in ("data.max_prompt_length", "data.max_response_length")]
    if conversion.project is projects.Project.VERL and all(isinstance(length, int) for length in lengths):
        yield Added(("runner", "seq_length"), sum(lengths), "prompt and answer together")


def _rlinf_math(tree: MappingNode, values: Values) -> Iterator[Added]:
    placement = find(tree, ("cluster", "component_placement"))
    group_by_component = projects.placed(placement) if isinstance(placement, MappingNode) else {}
    if "reward" not in group_by_component:
        yield from rule_rows.reward_place()
    actor = group_by_component.get("actor")
    place = placement.get(actor) if isinstance(placement, MappingNode) and actor is not None else None
    if values.get("algorithm.kl_beta", 0) and "reference" not in group_by_component and place is not None:
        why = "`algorithm.kl_beta` needs a reference model: it shares the actor's accelerators"
        for at, value in rule_rows.plain(place, ("cluster", "component_placement", "reference")):
            yield Added(at, value, why)


def _refusals(conversion: Conversion, job: Job) -> dict[Path, str]:
    """Return the rejected values that can be removed, each with the reason."""
    written_paths = {put.path for step in conversion.steps for put in puts(step.result)} - set(conversion.refused)
    refused: dict[Path, str] = {}
    for diagnostic in job.diagnostics:
        if diagnostic.severity is not Severity.ERROR or diagnostic.code in OF_THIS_MACHINE or diagnostic.code in _SIZES:
            continue
        at = next(
            (
                diagnostic.path[:size]
                for size in range(len(diagnostic.path), 0, -1)
                if diagnostic.path[:size] in written_paths
            ),
            None,
        )
        if at is None or at[-1] in _NEVER_LEFT_OUT or at[0] == "cluster":
            continue
        refused[at] = diagnostic.message + (f": {diagnostic.help}" if diagnostic.help else "")
    return refused


# More keys with the same reason share a line; `--json` lists all.
_LISTED: Final = 4
SCHEMA: Final = "rlinf.import/1"


def lines_of(converted: Converted, target: str | None) -> Iterator[str]:
    """Yield the lines of the summary; `target` is the file that was written, or None."""
    number = converted.counts
    listed = ", ".join(f"{number[fate]} {fate}" for fate in Fate)
    yield f"{target or 'nothing written'}: recipe `{converted.recipe}` ({converted.why}), from {converted.project}"
    yield f"  {len(converted.outcomes)} keys: {listed}"
    outcomes = converted.outcomes
    renamed = [(one.source, f"-> {', '.join(one.targets)}") for one in outcomes if one.fate is Fate.RENAMED]
    yield from _block("Renamed", renamed)
    yield from _block("Meaning changed", [(", ".join(one.targets), one.note) for one in outcomes if one.note])
    for title, fate in (("Not needed", Fate.NOT_NEEDED), ("Not available", Fate.LEFT_OUT)):
        yield from _block(title, _reasons(converted, fate), number[fate])
    yield from _block("Added", [(format_path(extra.path), f"{extra.value}: {extra.why}") for extra in converted.added])
    yield from _block("Wrong", _findings(converted.errors))
    yield from _block("Missing on this machine", _findings(converted.lacking))
    yield ""
    yield f"{target or 'the result'}: {converted.verdict}"


def _block(title: str, pairs: list[tuple[str, str]], number: int | None = None) -> Iterator[str]:
    if not pairs:
        return
    yield ""
    yield f"{title} ({len(pairs) if number is None else number})"
    width = min(max(len(name) for name, _ in pairs), 64)
    for name, words in pairs:
        yield f"  {name.ljust(width)}  {words}".rstrip()


def _reasons(converted: Converted, fate: Fate) -> list[tuple[str, str]]:
    """Return keys with their reasons; many keys with the same reason are one entry."""
    keys_by_reason: dict[str, list[str]] = {}
    for outcome in converted.outcomes:
        if outcome.fate is fate:
            keys_by_reason.setdefault(outcome.reason or "", []).append(outcome.source)
    pairs: list[tuple[str, str]] = []
    for reason, keys in keys_by_reason.items():
        if len(keys) <= _LISTED:
            pairs += [(key, reason) for key in keys]
        else:
            pairs.append((f"{keys[0]} and {len(keys) - 1} more", reason))
    return pairs


def _findings(diagnostics: list[Diagnostic]) -> list[tuple[str, str]]:
    return [
        (format_path(diagnostic.path), diagnostic.message + (f": {diagnostic.help}" if diagnostic.help else ""))
        for diagnostic in diagnostics
    ]


def record(converted: Converted, source: str, target: str | None) -> dict[str, Any]:
    """Return the summary as data."""
    from rlinf_cli.job.findings import to_json

    return {
        "file": source,
        "written": target,
        "project": str(converted.project),
        "recipe": converted.recipe,
        "counts": {fate.name.lower(): number for fate, number in converted.counts.items()},
        "keys": [
            {
                "key": outcome.source,
                "outcome": outcome.fate.name.lower(),
                "paths": list(outcome.targets),
                "reason": outcome.reason,
                "note": outcome.note,
                "place": outcome.place,
            }
            for outcome in converted.outcomes
        ],
        "added": [
            {"path": format_path(extra.path), "value": extra.value, "reason": extra.why} for extra in converted.added
        ],
        "valid": not converted.errors,
        "valid_here": converted.job.ok,
        "validation": to_json([*converted.job.diagnostics]),
    }
