"""Shared rules for keys whose values change or depend on other keys, which a table of names cannot express."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, cast

from rlinf_cli.importing.omegaconf_references import References, UnresolvableError
from rlinf_cli.importing.outcomes import Leaf, LeftOut, NewValue
from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.tree import MappingNode, Path, ScalarNode, SequenceNode, to_data

# Notes on keys whose meaning differs here.
LOG_PATH: Final = "holds one folder per run; relative to where `rlinf train` starts"
SAVING: Final = "plus a checkpoint at the end; the newest 3 are kept (`runner.keep_checkpoints`)"
EVALUATING: Final = "plus evaluations before the first step (`runner.val_before_train`) and at the end"


class Values:
    """The values of a composed file, references resolved."""

    def __init__(self, references: References) -> None:
        self.references = references

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a path as plain data; the default where it is missing or unknown."""
        at = to_path(parse_path(path)[0])
        try:
            node = self.references.node(at)
            node = None if node is None else self.references.value(node, at)
        except UnresolvableError:
            return default
        data = None if node is None else to_data(node)
        return default if data is None else data

    def count(self, path: str, default: int) -> int:
        """Return the number at a path; the default where it is missing or no number."""
        value = self.get(path)
        return int(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    def of(self, leaf: Leaf) -> Any:
        """Return the value of a key as plain data; None where it is unknown."""
        try:
            return to_data(self.references.value(leaf.node, leaf.path))
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


def to(path: str, note: str | None = None) -> Rule:
    """Return the rule that moves a value to another path."""

    def rule(leaf: Leaf, values: Values) -> Result:
        return LeftOut("it is empty", quiet=True) if isinstance(leaf.node, MappingNode) else same(path, leaf, note)

    return rule


def drop(reason: str, *, quiet: bool = False) -> Rule:
    """Return the rule that drops a key, quietly if nothing is lost by it."""
    return lambda leaf, values: LeftOut(reason, quiet=quiet)


def new(path: str, value: Any, note: str | None = None) -> NewValue:
    """Return the rule result: a new value at a path."""
    return NewValue(to_path(parse_path(path)[0]), value, note)


def precision(path: str) -> Rule:
    """Return the rule for the name of a dtype."""

    def rule(leaf: Leaf, values: Values) -> Result:
        written = str(values.of(leaf)).lower()
        return new(path, _PRECISIONS[written]) if written in _PRECISIONS else same(path, leaf)

    return rule


def steps_or_never(path: str, note: str | None = None) -> Rule:
    """Return the rule for a number of steps, where 0 and null mean never."""

    def rule(leaf: Leaf, values: Values) -> Result:
        value = values.of(leaf)
        if value in (0, None) and "${" not in getattr(leaf.node, "raw", ""):
            return new(path, -1)
        return same(path, leaf, None if value == -1 else note)

    return rule


def loggers(path: str) -> Rule:
    """Return the rule for logger backends."""
    known = ("tensorboard", "wandb", "swanlab", "trackio", "mlflow")

    def rule(leaf: Leaf, values: Values) -> Result:
        written = values.of(leaf)
        names = [str(item) for item in cast("list[Any]", written if isinstance(written, list) else [written])]
        kept = [name for name in names if name in known]
        others = [name for name in names if name not in known and name not in ("console", "None")]
        note = f"{', '.join(others)}: not among {', '.join(known)}" if others else None
        if kept == names and isinstance(leaf.node, SequenceNode):
            return same(path, leaf)
        if kept:
            return new(path, kept, note)
        always = "metrics are always shown and written to `metrics.jsonl`"
        return LeftOut(f"{note}; {always}" if note else always)

    return rule


def top_k(path: str) -> Rule:
    """Return the rule for top-k sampling; all tokens is -1 here."""

    def rule(leaf: Leaf, values: Values) -> Result:
        value = values.of(leaf)
        takes_all = isinstance(value, int) and (value <= 0 or value >= 100_000)
        return new(path, -1) if takes_all and value != -1 else same(path, leaf)

    return rule


def betas(section: str) -> Rule:
    """Return the rule for AdamW's two betas in one list."""

    def rule(leaf: Leaf, values: Values) -> Result:
        written = values.of(leaf)
        pair = cast("list[Any]", written) if isinstance(written, list) else []
        if len(pair) != 2:
            return LeftOut("write `adam_beta1` and `adam_beta2`")
        return (new(f"{section}.adam_beta1", pair[0]), new(f"{section}.adam_beta2", pair[1]))

    return rule


def training_backend(leaf: Leaf, values: Values) -> Result:
    """Leave out how a model is spread over ranks: it is by FSDP2, always."""
    written = str(values.of(leaf))
    if written in ("fsdp", "fsdp2"):
        return LeftOut("training uses FSDP2", quiet=True)
    return LeftOut(f"`{written}` becomes FSDP2: tensor and pipeline parallelism of the trainer are not available")


def offload(target: str) -> Rule:
    """Return the rule for offloading weights and optimizer states to host memory."""

    def rule(leaf: Leaf, values: Values) -> Result:
        if not values.of(leaf):
            return LeftOut("false is the default of `cpu_offload`, the only such setting", quiet=True)
        return new(target, True, "weight and optimizer shards are both offloaded to host memory")

    return rule


Table: TypeAlias = Mapping[str, Rule]
HYDRA: Final[Table] = {
    "hydra.searchpath": drop("the files of the defaults list are merged into this one", quiet=True),
}
COMMON: Final[Table] = {
    **HYDRA,
    "actor.optim.betas": betas("actor.optim"),
    "actor.model.precision": precision("actor.model.precision"),
    "actor.training_backend": training_backend,
}


def path_of(name: str) -> Path:
    """Return a path from its segments."""
    return to_path(parse_path(name)[0])
