"""The fates of keys, and the rules shared by projects for keys whose values change or depend on other keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias, cast

from rlinf_cli.importing.hydra_source import plain
from rlinf_cli.importing.references import References, UnresolvableError
from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.tree import Node, Path, ScalarNode, SequenceNode, find, format_path


class Fate(StrEnum):
    """The fate of a key, in a word or two."""

    CARRIED = "carried"
    RENAMED = "renamed"
    NOT_NEEDED = "not needed"
    LEFT_OUT = "not available"


class ReferenceText(str):
    """A reference in rlinf's form, `${path}` or `${env:NAME}`, to be written unchanged."""


@dataclass(frozen=True)
class NewValue:
    """A value of the new file.

    Attributes:
        path: its path in the new file.
        value: the node of the old file, references included, or a new value.
        note: the new meaning, if it changed.
        same: whether the value is the old key's, so that references to the old key may become references to it.
    """

    path: Path
    value: ScalarNode | SequenceNode | str | int | float | bool | None
    note: str | None = None
    same: bool = False


@dataclass(frozen=True)
class LeftOut:
    """A key without a value in the new file; `reason` gives cause and remedy; `quiet` if nothing is lost."""

    reason: str
    quiet: bool = False


@dataclass(frozen=True)
class Leaf:
    """A key of the composed file that holds a scalar, or a list of scalars."""

    path: Path
    node: Node
    place: str = ""

    @property
    def name(self) -> str:
        """The path in words."""
        return format_path(self.path)


@dataclass(frozen=True)
class KeyOutcome:
    """The outcome for one key.

    Attributes:
        source: its path in the composed old file.
        fate: its fate.
        targets: its paths in the new file; empty if it was left out.
        reason: the reason for leaving it out, or None.
        note: the change of its meaning, or None.
        place: its file and line.
    """

    source: str
    fate: Fate
    targets: tuple[str, ...] = ()
    reason: str | None = None
    note: str | None = None
    place: str = ""


class Added(NamedTuple):
    """A value of the new file that the old file does not have.

    Attributes:
        path, value: the path and the value.
        why: the reason, in words.
    """

    path: Path
    value: Any
    why: str


class Values:
    """The values of a composed file, with references resolved."""

    def __init__(self, references: References) -> None:
        self.references = references

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a path as plain data; the default if it is missing or unknown."""
        at = to_path(parse_path(path)[0])
        try:
            value = self.references.value(at)
        except UnresolvableError:
            node = find(self.references.tree, at)
            value = None if node is None or isinstance(node, ScalarNode) else plain(node)
        return default if value is None else value

    def count(self, path: str, default: int) -> int:
        """Return the integer at a path; the default if it is not an integer of at least 1."""
        value = self.get(path)
        return int(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    def of(self, leaf: Leaf) -> Any:
        """Return the value of a key as plain data; None if it is unknown."""
        try:
            return self.references.value(leaf.path)
        except UnresolvableError:
            return None


Result: TypeAlias = "NewValue | LeftOut | tuple[NewValue, ...]"
Rule: TypeAlias = Callable[[Leaf, Values], Result]

_PRECISIONS: Final = {
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "32": "fp32",
    "16": "fp16",
    "32-true": "fp32",
    "bf16-true": "bf16",
}


def same(path: str, leaf: Leaf, note: str | None = None) -> NewValue:
    """Return the rule result: the key's value under another path."""
    assert isinstance(leaf.node, ScalarNode | SequenceNode)
    return NewValue(to_path(parse_path(path)[0]), leaf.node, note, same=True)


def cases(leaf: Leaf, values: Values, to: str, cases: Mapping[str, str], note: str | None = None) -> Result:
    """Convert a choice, some of whose values have other names here; `{}` in `note` stands for the old name."""
    written = str(values.of(leaf))
    return new(to, cases[written], note and note.format(written)) if written in cases else same(to, leaf)


def new(path: str, value: Any, note: str | None = None) -> NewValue:
    """Return the rule result: a new value at a path."""
    return NewValue(to_path(parse_path(path)[0]), value, note)


def precision(leaf: Leaf, values: Values, to: str) -> Result:
    """Convert the name of a dtype."""
    written = str(values.of(leaf)).lower()
    return new(to, _PRECISIONS[written]) if written in _PRECISIONS else same(to, leaf)


def steps_or_never(leaf: Leaf, values: Values, to: str, note: str | None = None) -> Result:
    """Convert a number of steps, where 0 and null mean never."""
    value = values.of(leaf)
    if value in (0, None) and "${" not in getattr(leaf.node, "raw", ""):
        return new(to, -1)
    return same(to, leaf, None if value == -1 else note)


def loggers(leaf: Leaf, values: Values, to: str) -> Result:
    """Convert logger backends."""
    known = ("tensorboard", "wandb", "swanlab", "trackio", "mlflow")
    written = values.of(leaf)
    names = [str(item) for item in cast("list[Any]", written if isinstance(written, list) else [written])]
    kept = [name for name in names if name in known]
    others = [name for name in names if name not in known and name not in ("console", "None")]
    note = f"{', '.join(others)}: not among {', '.join(known)}" if others else None
    if kept == names and isinstance(leaf.node, SequenceNode):
        return same(to, leaf)
    if kept:
        return new(to, kept, note)
    always = "metrics are always shown and written to `metrics.jsonl`"
    return LeftOut(f"{note}; {always}" if note else always)


def top_k(leaf: Leaf, values: Values, to: str) -> Result:
    """Convert top-k sampling, where -1 means all tokens here."""
    value = values.of(leaf)
    takes_all = isinstance(value, int) and (value <= 0 or value >= 100_000)
    return new(to, -1) if takes_all and value != -1 else same(to, leaf)


def betas(leaf: Leaf, values: Values, to: str) -> Result:
    """Convert AdamW's two betas in one list."""
    written = values.of(leaf)
    pair = cast("list[Any]", written) if isinstance(written, list) else []
    if len(pair) != 2:
        return LeftOut("write `adam_beta1` and `adam_beta2`")
    return (new(f"{to}.adam_beta1", pair[0]), new(f"{to}.adam_beta2", pair[1]))


Table: TypeAlias = Mapping[str, Rule]
