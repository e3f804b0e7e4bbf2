"""Conversion of one file: composed, renamed key by key, written with its comments, and validated.

What cannot be honoured is found in three ways: rules say it (`rules_*.py`), the tables of the recipe's models say it
(`not_available`), or the finished file is validated, and what the recipe refuses is taken out with the refusal as its
reason, until nothing more is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

from rlinf_cli.importing.comments import CommentFinder, Comments, header_of
from rlinf_cli.importing.document import Section, Value, left_out, list_value, scalar_text, short
from rlinf_cli.importing.hydra_files import HydraFile
from rlinf_cli.importing.omegaconf_references import References, UnresolvableError
from rlinf_cli.importing.outcomes import Added, Fate, Leaf, LeftOut, Outcome, Put
from rlinf_cli.importing.places import placed, reward_place, verl_places, verl_rules, without_inner
from rlinf_cli.importing.projects import ENGINE_OPTIONS, VERL_SECTIONS, Project, project_of, recipe_of
from rlinf_cli.importing.rules import Table, Values
from rlinf_cli.importing.rules_rlinf import EMBODIED, MATH, SFT, cameras, moved_section
from rlinf_cli.importing.rules_verl import VERL, engine, needs_values
from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.model_fields import fields_at, model_of, types_at
from rlinf_core.config.origins import inline
from rlinf_core.config.other_names import moved_keys, other_names_of, unavailable_keys
from rlinf_core.config.paths import parse_path, to_path
from rlinf_core.config.tree import Entry, MappingNode, Node, Path, ScalarNode, SequenceNode, find, format_path
from rlinf_core.job.load import Job, load_job

# What is wrong with this machine, and not with the file.
OF_THIS_MACHINE: Final = frozenset(("missing-extra", "unusable-path", "unknown-variable"))
# What would train something else if it were left out: it stays, and the file is invalid until somebody decides.
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
    )
)
_SIZES: Final = frozenset(("batch-not-divisible", "envs-not-divisible", "groups-not-divisible", "missing-key"))
_ROUNDS: Final = 12
_NO_CRITIC: Final = "without `adv_estimator: gae` nobody asks for values"


@dataclass
class Converted:
    """A converted file.

    Attributes:
        text: the new file.
        project, recipe, why: what it was, what it is now, and how that was told.
        outcomes: what has become of each key, in the order of the composed file.
        added: values that the old file does not have.
        job: the new file as `rlinf validate` reads it.
    """

    text: str
    project: Project
    recipe: str
    why: str
    outcomes: list[Outcome]
    added: list[Added]
    job: Job

    @property
    def errors(self) -> list[Diagnostic]:
        """Errors of the new file itself."""
        found = [each for each in self.job.diagnostics if each.severity is Severity.ERROR]
        return [each for each in found if each.code not in OF_THIS_MACHINE]

    @property
    def lacking(self) -> list[Diagnostic]:
        """Errors of this machine: packages, folders and variables that the new file needs."""
        found = [each for each in self.job.diagnostics if each.severity is Severity.ERROR]
        return [each for each in found if each.code in OF_THIS_MACHINE]


@dataclass
class _Step:
    """A key, what becomes of it, and where a remark on it goes."""

    leaf: Leaf
    result: Put | LeftOut | tuple[Put, ...]
    section: Path
    comments: Comments


@dataclass
class _Conversion:
    """The state of one conversion."""

    file: HydraFile
    project: Project
    recipe: str
    model: type[BaseModel]
    rules: Table
    references: References
    header: tuple[str, ...]
    comments: CommentFinder = field(default_factory=CommentFinder)
    steps: list[_Step] = field(default_factory=list[_Step])
    sections: dict[Path, Comments] = field(default_factory=dict[Path, Comments])
    pending: list[str] = field(default_factory=list[str])
    refused: dict[Path, str] = field(default_factory=dict[Path, str])

    def walk(
        self, node: MappingNode, source: Path, target: Path | None, reason: str | None = None, near: Path = ()
    ) -> None:
        """Decide what becomes of every key below a section.

        `target` is its path in the new file; None where the section is left out, for `reason`, which then stands in
        the section at `near`.
        """
        renamed = self._components(node, source)
        for entry in node.entries:
            below = (*source, entry.key.raw)
            comments = self.comments.of_entry(entry)
            if not source and comments.above == self.header:
                comments = comments._replace(above=())
            if entry.key.raw in renamed and not renamed[entry.key.raw]:
                self._all_left_out(
                    entry, below, target or near, "the actor computes log probabilities itself", comments
                )
                continue
            at, why = self._target(entry, below, target, reason)
            if at is not None and entry.key.raw in renamed:
                at = (*at[:-1], renamed[entry.key.raw])
            self._entry(entry.value, below, at, why, near if target is None else target, comments)

    def _entry(
        self, node: Node, source: Path, target: Path | None, reason: str | None, section: Path, comments: Comments
    ) -> None:
        node = self._section_behind(node, source)
        if isinstance(node, MappingNode) and node.entries:
            if target is not None and target not in self.sections and types_at(self.model, target):
                self.sections[target] = self._with_pending(comments)
            else:
                self.pending += [*comments.above, *([comments.behind] if comments.behind else [])]
            self.walk(node, source, target, reason, section)
            return
        if isinstance(node, SequenceNode) and any(not isinstance(item, ScalarNode) for item in node.items):
            if target is not None:
                self.sections.setdefault(target, comments)
            for index, item in enumerate(node.items):
                below = None if target is None else (*target, index)
                self._entry(item, (*source, index), below, reason, section, self.comments.of_item(item))
            return
        leaf = Leaf(source, node, str(node.span) if node.span.source.text else "")
        comments = self._with_pending(comments)
        self.steps.append(_Step(leaf, self._result(leaf, target, reason), section, comments))

    def _with_pending(self, comments: Comments) -> Comments:
        """Return comments with those of sections that have no counterpart above them."""
        above, self.pending = (*self.pending, *comments.above), []
        return comments._replace(above=above)

    def _section_behind(self, node: Node, source: Path) -> Node:
        """Return the section that a value refers to as a whole; any other value itself."""
        if not isinstance(node, ScalarNode) or "${" not in node.raw or len(source) > 12:
            return node
        try:
            found = self.references.followed(node, source)
        except UnresolvableError:
            return node
        return found if isinstance(found, MappingNode) else node

    def _result(self, leaf: Leaf, target: Path | None, reason: str | None) -> Put | LeftOut | tuple[Put, ...]:
        node = leaf.node
        if isinstance(node, ScalarNode) and node.raw == "???":
            return LeftOut("it has no value: the original asks for one on its command line")
        if reason == _NO_CRITIC:
            return LeftOut(reason, quiet=True)
        rule = self.rules.get(format_path(leaf.path))
        if rule is not None:
            return rule(leaf, Values(self.references))
        if target is None or reason is not None:
            return LeftOut(reason or "there is no such key here")
        if target[:2] == ("rollout", "engine_options") and isinstance(node, ScalarNode) and node.value is None:
            return LeftOut("null leaves it to the engine", quiet=True)
        if isinstance(node, ScalarNode | SequenceNode):
            return Put(target, node, same=True)
        return LeftOut("it is empty", quiet=True)

    def _target(
        self, entry: Entry, source: Path, target: Path | None, reason: str | None
    ) -> tuple[Path | None, str | None]:
        """Return where a key is in the new file; None with a reason where it is nowhere."""
        name = entry.key.raw
        layout = VERL_SECTIONS if self.project is Project.VERL else {}
        if source in layout:
            return layout[source], None
        options = (*ENGINE_OPTIONS, engine(Values(self.references)))
        if self.project is Project.VERL and source == options and options[-1] in ("vllm", "sglang"):
            return ("rollout", "engine_options"), None
        if self.project is Project.VERL and source[:-1] == ENGINE_OPTIONS:
            return None, f"they are arguments of another engine than `{options[-1]}`"
        if self.project is Project.VERL and source == ENGINE_OPTIONS:
            return source, None
        if any(known[: len(source)] == source for known in layout):
            return source, None
        if self.project is Project.VERL and source == ("critic",) and not needs_values(Values(self.references)):
            return None, _NO_CRITIC
        if moved_section(source) is not None and self.project is Project.RLINF and reason is None:
            return moved_section(source), None
        if target is None or reason is not None:
            return None, reason
        if target[:1] == ("cluster",) and len(target) > 1:
            return (*target, name), None
        return self._by_tables(name, target)

    def _by_tables(self, name: str, target: Path) -> tuple[Path | None, str | None]:
        annotations = types_at(self.model, target)
        if not annotations:
            return None, "it has no counterpart"
        fields = fields_at(self.model, target)
        if name in fields or not any(model_of(each) for each in annotations):
            return (*target, name), None
        ours = other_names_of(annotations).get(name)
        if ours is not None:
            return (*target, ours), None
        moved = moved_keys(annotations).get(name)
        if moved is not None:
            return to_path(parse_path(moved)[0]), None
        reason = unavailable_keys(annotations).get(name)
        if reason is not None:
            return None, reason.removeprefix("remove it: ")
        return None, f"there is no such key in {f'`{format_path(target)}`' if target else 'a file of this recipe'}"

    def _components(self, node: MappingNode, source: Path) -> Mapping[str, str]:
        """Return the keys of `component_placement` that change, each with its new name."""
        return without_inner(node)[0] if source == ("cluster", "component_placement") else {}

    def _all_left_out(self, entry: Entry, source: Path, section: Path, reason: str, comments: Comments) -> None:
        leaf = Leaf(source, entry.value, str(entry.key.span))
        self.steps.append(_Step(leaf, LeftOut(reason), section, comments))


def convert(file: HydraFile, environ: Mapping[str, str]) -> Converted:
    """Convert a composed file.

    Raises:
        ConfigError: it is no file of a project that is known, or no recipe does what it asks for.
    """
    from rlinf_core.job.recipe import find_recipe

    project = project_of(file.tree)
    recipe, why = recipe_of(project, file.tree)
    references = References(file.tree, environ)
    rules = (
        {**VERL, **verl_rules()} if project is Project.VERL else {"embodied": EMBODIED, "sft": SFT}.get(recipe, MATH)
    )
    model = find_recipe(recipe).config_model()
    conversion = _Conversion(file, project, recipe, model, rules, references, header_of(file.sources[0]))
    conversion.walk(file.tree, (), ())
    _first_of_each(conversion)
    added = [*_additions(conversion)]
    rounds = 0
    while True:
        text, outcomes = _written(conversion, added)
        job = load_job("-", stdin=text.encode(), environ=environ)
        refusals = _refusals(conversion, job)
        rounds += 1
        if not refusals or rounds >= _ROUNDS:
            return Converted(text, project, recipe, why, outcomes, added, job)
        conversion.refused |= refusals


def _first_of_each(conversion: _Conversion) -> None:
    """Leave out what would give a value that another key has given."""
    taken: dict[Path, str] = {}
    for step in conversion.steps:
        for put in _puts(step.result):
            first = taken.setdefault(put.path, step.leaf.name)
            if first != step.leaf.name:
                step.result = LeftOut(f"`{first}` gives `{format_path(put.path)}`", quiet=True)


def _puts(result: Put | LeftOut | tuple[Put, ...]) -> tuple[Put, ...]:
    return result if isinstance(result, tuple) else (result,) if isinstance(result, Put) else ()


def _additions(conversion: _Conversion) -> Iterator[Added]:
    """Yield what the recipe needs and the old file does not say."""
    values, tree = Values(conversion.references), conversion.file.tree
    given = {put.path for step in conversion.steps for put in _puts(step.result)}
    if conversion.project is Project.VERL:
        yield from verl_places(values)
        if ("reward", "reward_type") not in given:
            yield Added(("reward", "reward_type"), "math", "verl chooses the rule by the data set: choose yours")
    elif conversion.recipe == "math":
        yield from _rlinf_math(tree, values)
    else:
        yield from cameras(values, given)
    if ("runner", "max_steps") not in given:
        yield Added(("runner", "max_steps"), -1, "the default of the recipe would end the run")
    lengths = [values.get(path) for path in ("data.max_prompt_length", "data.max_response_length")]
    if conversion.project is Project.VERL and all(isinstance(each, int) for each in lengths):
        yield Added(("runner", "seq_length"), sum(lengths), "prompt and answer together")


def _rlinf_math(tree: MappingNode, values: Values) -> Iterator[Added]:
    placement = find(tree, ("cluster", "component_placement"))
    known = placed(placement) if isinstance(placement, MappingNode) else {}
    if "reward" not in known:
        yield from reward_place()
    actor = known.get("actor")
    place = placement.get(actor) if isinstance(placement, MappingNode) and actor is not None else None
    if values.get("algorithm.kl_beta", 0) and "reference" not in known and place is not None:
        why = "`algorithm.kl_beta` needs a reference model: it shares the actor's accelerators"
        for at, value in _plain(place, ("cluster", "component_placement", "reference")):
            yield Added(at, value, why)


def _plain(node: Node, at: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, ScalarNode):
        yield at, node.raw
    elif isinstance(node, MappingNode):
        for entry in node.entries:
            yield from _plain(entry.value, (*at, entry.key.raw))


def _written(conversion: _Conversion, added: Sequence[Added]) -> tuple[str, list[Outcome]]:
    """Return the text of the new file, and what has become of each key."""
    document = Section()
    document.put(("recipe",), Value(conversion.recipe, (), Comments(_opening(conversion))))
    names = {
        step.leaf.path: put.path
        for step in conversion.steps
        for put in _puts(step.result)
        if put.same and put.path not in conversion.refused
    }
    for path in _section_order(conversion):
        document.section(path)
    outcomes: list[Outcome] = []
    remarks: dict[tuple[Path, str], list[str]] = {}
    for step in conversion.steps:
        outcome, lines = _one(conversion, step, names, document)
        outcomes.append(outcome)
        if lines and outcome.reason:
            remarks.setdefault((step.section, outcome.reason), []).extend(lines)
    told: set[str] = set()
    for each in added:
        if each.path not in conversion.refused:
            listed = isinstance(each.value, list)
            text = f"[{', '.join(map(inline, each.value))}]" if listed else inline(each.value)
            above = () if each.why in told else (f"# Added: {each.why}",)
            told.add(each.why)
            document.put(each.path, Value(text, (), Comments(above)))
    for path, comments in conversion.sections.items():
        section = find_section(document, path)
        if section is not None:
            section.comments = comments
        elif any(comments):
            document.remark(path[:-1], [*comments.above, *([comments.behind] if comments.behind else [])])
    for (section, reason), lines in remarks.items():
        document.remark(section, left_out(reason, lines))
    end = conversion.comments.at_end(conversion.file.sources[0])
    if end:
        document.remark((), end)
    return document.text(), outcomes


def _opening(conversion: _Conversion) -> tuple[str, ...]:
    """Return the comment at the beginning of the new file."""
    name = os.path.basename(conversion.file.sources[0].name)
    return (f"# From `{name}` of {conversion.project}, by `rlinf import`.", *conversion.header)


def find_section(document: Section, path: Path) -> Section | None:
    """Return the section at a path, where there is one."""
    here: Section | Value = document
    for segment in path:
        below = here.children.get(segment) if isinstance(here, Section) else None
        if below is None:
            return None
        here = below
    return here if isinstance(here, Section) else None


def _section_order(conversion: _Conversion) -> list[Path]:
    """Return the top sections in the order of the new file: machines first, then as in the old one."""
    found = [put.path[:1] for step in conversion.steps for put in _puts(step.result) if len(put.path) > 1]
    return [*dict.fromkeys([("cluster",), *found])]


def _one(
    conversion: _Conversion, step: _Step, names: Mapping[Path, Path], document: Section
) -> tuple[Outcome, list[str]]:
    """Write one key; return what has become of it, and its lines in the remark where it was left out."""
    leaf, result = step.leaf, step.result
    if isinstance(result, LeftOut):
        return _lost(step, result.reason, Fate.NOT_NEEDED if result.quiet else Fate.LEFT_OUT)
    notes: list[str] = []
    targets: list[str] = []
    for put in _puts(result):
        refused = conversion.refused.get(put.path)
        if refused is not None:
            return _lost(step, refused)
        try:
            value, note = _value(conversion, put, leaf, names)
        except UnresolvableError as error:
            return _lost(step, str(error))
        news = [each for each in (put.note, note) if each]
        changed = tuple(f"# Changed in meaning: {each}" for each in news)
        value.comments = step.comments._replace(above=(*step.comments.above, *changed))
        document.put(put.path, value)
        targets.append(format_path(put.path))
        notes += news
    same = targets == [leaf.name]
    fate = Fate.CARRIED if same else Fate.RENAMED
    return Outcome(leaf.name, fate, tuple(targets), None, "; ".join(notes) or None, leaf.place), []


def _lost(step: _Step, reason: str, fate: Fate = Fate.LEFT_OUT) -> tuple[Outcome, list[str]]:
    leaf = step.leaf
    kept = [*step.comments.above, f"{leaf.name}: {short(leaf.node)}"]
    if step.comments.behind:
        kept[-1] += f"  {step.comments.behind}"
    return Outcome(leaf.name, fate, (), reason, None, leaf.place), kept


def _value(conversion: _Conversion, put: Put, leaf: Leaf, names: Mapping[Path, Path]) -> tuple[Value, str | None]:
    """Return a value as YAML, its references in our form, and what that changes."""
    value = put.value
    if isinstance(value, ScalarNode):
        text, note = _scalar(conversion, value, leaf.path, names)
        return Value(text), note
    if isinstance(value, SequenceNode):
        items: list[tuple[Comments, str]] = []
        notes: list[str] = []
        for index, item in enumerate(value.items):
            assert isinstance(item, ScalarNode)
            text, note = _scalar(conversion, item, (*leaf.path, index), names)
            items.append((conversion.comments.of_item(item), text))
            notes += [note] if note else []
        return list_value(items, Comments()), "; ".join(notes) or None
    if isinstance(value, list):
        return Value(f"[{', '.join(map(inline, value))}]"), None
    return Value(inline(value)), None


def _scalar(
    conversion: _Conversion, node: ScalarNode, path: Path, names: Mapping[Path, Path]
) -> tuple[str, str | None]:
    if "${" not in node.raw:
        return scalar_text(node.raw, plain=node.plain), None
    found = conversion.references.rewritten(node, path, names)
    return scalar_text(found.raw, plain=found.plain), found.note


def _refusals(conversion: _Conversion, job: Job) -> dict[Path, str]:
    """Return the values that the recipe refuses and the file can do without, each with the reason."""
    written = {put.path for step in conversion.steps for put in _puts(step.result)} - set(conversion.refused)
    found: dict[Path, str] = {}
    for each in job.diagnostics:
        if each.severity is not Severity.ERROR or each.code in OF_THIS_MACHINE or each.code in _SIZES:
            continue
        at = next((each.path[:size] for size in range(len(each.path), 0, -1) if each.path[:size] in written), None)
        if at is None or at[-1] in _NEVER_LEFT_OUT or at[0] == "cluster":
            continue
        found[at] = each.message + (f": {each.help}" if each.help else "")
    return found
