"""Resolution of `runner.resume_dir`, and matching of runs with configurations.

A run is identified by its configuration: `auto` resumes the newest run with the same configuration and seeds. Only the
keys in `FREE_KEYS` may differ, such as those for the length of a run, evaluation, saving and logging.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, cast

from pydantic import BaseModel

from rlinf_core.config.sections.runner import RESUME_NEWEST
from rlinf_core.config.tree import MappingNode, to_data
from rlinf_core.errors import CheckpointError, ConfigError, RunError
from rlinf_core.foreign.files import read_text
from rlinf_core.runners.storage.checkpoint import (
    GLANCE,
    Checkpoint,
    first_sound,
    load_manifest,
    open_checkpoint,
    sound_checkpoint,
)
from rlinf_core.runners.storage.checkpoint_store import CheckpointStore
from rlinf_core.runners.storage.run_state import STATE, RunState, read_state, runs_in, unreadable_runs
from rlinf_core.scalars import plain

# Keys that may differ between a run and its resumption; a key covers everything below it.
FREE_KEYS: Final = (
    *(
        "runner.max_steps",
        "runner.max_epochs",
        "runner.resume_dir",
        "runner.max_restarts",
        "runner.trace",
        "runner.metrics_port",
    ),
    *("runner.only_eval", "runner.skip_checks"),
    *("runner.val_check_interval", "runner.val_before_train", "runner.sample_interval"),
    *("runner.save_interval", "runner.snapshot_interval", "runner.save_on_interrupt", "runner.keep_checkpoints"),
    *("runner.logger.log_path", "runner.logger.project_name", "runner.logger.logger_backends"),
)
_LOGGER: Final = logging.getLogger("rlinf")
_MOST_CANDIDATES: Final = 5
_MOST_DIFFERENCES: Final = 4
_LONGEST_VALUE: Final = 40
# The most values of a configuration: YAML aliases can expand a short text without limit.
_MOST_VALUES: Final = 100_000

Values = Mapping[str, object]
"""The values of a configuration by the path of their key, for example `actor.optim.lr`."""


class _Candidate(NamedTuple):
    path: Path
    state: RunState
    store: CheckpointStore

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.store.latest()


def values_of(config_text: str, model: type[BaseModel] | None = None) -> Values | None:
    """Return the identifying values of a resolved configuration; None if the text cannot be read or is too large.

    Args:
        config_text: the text of the configuration, as YAML.
        model: the model of its recipe, to move keys that an earlier rlinf wrote to where they are now, and to leave
            out those that hold their default or that only other kinds of their section have; None to keep all keys.
    """
    # Imported here: the reader takes longer to import than the rest.
    from rlinf_core.config.diagnostics import Diagnostics
    from rlinf_core.config.reading import STDIN_NAME, decode, read, split_components

    findings = Diagnostics()
    source = decode(STDIN_NAME, config_text.encode("utf-8", "replace"), findings)
    tree = None if source is None else read(source, findings)
    # An earlier rlinf kept keys such as `actor,env`.
    split = None if tree is None else split_components(tree, (), findings)
    if split is None or not findings.ok:
        return None
    if model is not None and isinstance(split, MappingNode):
        split = _as_now(model, split)
    values = dict(islice(_leaves(plain(to_data(split)), ""), _MOST_VALUES + 1))
    if model is not None:
        values = {name: value for name, value in values.items() if value != {}}
    return values if len(values) <= _MOST_VALUES else None


def _as_now(model: type[BaseModel], tree: MappingNode) -> MappingNode:
    """Return the configuration of a run with the keys of this rlinf, without those that hold their default."""
    from rlinf_core.config.diagnostics import Diagnostics
    from rlinf_core.config.foreign_names import foreign_names
    from rlinf_core.config.validating.kinds import without_defaults, without_idle_keys

    names = foreign_names()
    tree = tree if names is None else names.with_our_names(model, tree, Diagnostics()).tree
    return without_defaults(model, without_idle_keys(model, tree))


def config_id(values: Values) -> str:
    """Return a digest of the values of a configuration."""
    return sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def find_source(
    resume_dir: str | None, log_path: Path, experiment: str, config_text: str | None = None
) -> Checkpoint | None:
    """Return the checkpoint for `runner.resume_dir`; None for a fresh start.

    Args:
        resume_dir: the `resume_dir` of the configuration.
        log_path: the folder of the runs.
        experiment: the experiment that `auto` searches.
        config_text: the resolved configuration that the run for `auto` must have; None for any.

    Raises:
        CheckpointError: there is no complete checkpoint there, or no run of the experiment has this configuration.
    """
    if resume_dir is None:
        return None
    if resume_dir == RESUME_NEWEST:
        for broken in unreadable_runs(log_path):
            _LOGGER.warning("`runner.resume_dir=auto` cannot consider %s: %s", broken.path, broken.why)
        candidates = _candidates(log_path, experiment)
        if config_text is not None and (values := values_of(config_text)) is not None:
            candidates = _of_configuration(candidates, config_text, values)
        # Within a run, order by step, not by time: the clock may have been changed between checkpoints.
        runs = sorted((run.store.folders() for run in candidates), key=_last_written, reverse=True)
        return first_sound([folder for folders in runs for folder in folders])
    path = Path(resume_dir).absolute()
    store = _store_in(path)
    return sound_checkpoint(path) if store is None else _existing(store.latest_sound(), path)


def named_source(path: Path) -> Checkpoint:
    """Return the checkpoint of a path: a run, its folder of checkpoints, or one checkpoint. No file is verified.

    Raises:
        CheckpointError: there is no complete checkpoint.
        RunError: run.json of the run is invalid.
    """
    path = path.absolute()
    store = _store_in(path)
    return open_checkpoint(path) if store is None else _existing(store.latest(), path)


def damage_of_source(path: Path) -> list[str]:
    """Return descriptions of the damaged checkpoints of a path, after a check that reads at most 1 GiB of each.

    Raises:
        CheckpointError: the path is a single checkpoint, which is damaged.
        RunError: run.json of the run is invalid.
    """
    path = path.absolute()
    store = _store_in(path)
    if store is not None:
        return store.damaged(GLANCE)
    checkpoint = open_checkpoint(path)
    if sum(checkpoint.manifest.files.values()) <= GLANCE:
        checkpoint.verify()
    return []


def _store_in(path: Path) -> CheckpointStore | None:
    if (path / STATE).is_file():
        return CheckpointStore(path / read_state(path).checkpoints)
    # Not by the file `latest`, which a killed run may not have written.
    store = CheckpointStore(path)
    return store if store.folders() else None


def _existing(checkpoint: Checkpoint | None, path: Path) -> Checkpoint:
    if checkpoint is None:
        raise CheckpointError("there is no complete checkpoint to resume from", where=str(path))
    return checkpoint


def _last_written(folders: Sequence[Path]) -> float:
    """Return the time when the last of a run's checkpoints was written; 0 without checkpoints."""
    return max(map(_written, folders), default=0.0)


def _written(folder: Path) -> float:
    """Return the time when a checkpoint was written, even if it is damaged."""
    try:
        return load_manifest(folder).time
    except CheckpointError:
        return folder.stat().st_mtime


def run_of(checkpoint: Path, log_path: Path) -> Path | None:
    """Return the run folder of a checkpoint; None for a checkpoint that was copied elsewhere."""
    store = checkpoint.resolve().parent
    # The second path is for checkpoints outside of their run's folder (`actor.checkpoint_save_path`).
    for path in (store.parent, log_path / store.name):
        try:
            state = read_state(path)
        except RunError:
            continue
        if (path / state.checkpoints).resolve() == store:
            return path
    return None


def run_to_resume(checkpoint: Checkpoint, log_path: Path, recipe: str) -> Path | None:
    """Return the run folder of a checkpoint, as `run_of`, from which a run of a recipe resumes.

    Raises:
        CheckpointError: its run is of another recipe.
    """
    path = run_of(checkpoint.path, log_path)
    theirs = recipe if path is None else read_state(path).recipe
    if theirs != recipe:
        why = f"its run is of recipe `{theirs}`, this one of `{recipe}`"
        help = "name a checkpoint of this recipe, or start without `runner.resume_dir`"
        where = str(checkpoint.path)
        raise CheckpointError("a run cannot resume from another recipe", where=where, why=why, help=help)
    return path


def differences(old: Values, new: Values) -> list[str]:
    """Return the differences between two configurations, such as "`actor.optim.lr` is `0.1` there and `0.2` now"."""
    names = [name for name in (*old, *(name for name in new if name not in old)) if old.get(name) != new.get(name)]
    return [f"`{name}` is {_shown(old, name)} there and {_shown(new, name)} now" for name in names]


def _candidates(log_path: Path, experiment: str) -> list[_Candidate]:
    """Return the runs of an experiment, newest first."""
    runs = [(path, state) for path, state in runs_in(log_path) if state.experiment == experiment]
    runs.sort(key=lambda run: (run[1].created, run[0].name), reverse=True)
    return [_Candidate(path, state, CheckpointStore(path / state.checkpoints)) for path, state in runs]


def _of_configuration(candidates: Sequence[_Candidate], config_text: str, values: Values) -> list[_Candidate]:
    """Return the candidates with this configuration, whose values are `values`.

    Raises:
        CheckpointError: there are candidates with checkpoints, but none with this configuration.
    """
    own = config_id(values)
    same = [candidate for candidate in candidates if (candidate.state.config_id or _id_in(candidate.path)) == own]
    model = None
    if not same:
        # An earlier rlinf wrote other keys.
        model = _model_of(values)
        values = values_of(config_text, model) or values
        own = config_id(values)
        same = [candidate for candidate in candidates[:_MOST_CANDIDATES] if _id_in(candidate.path, model) == own]
    others = [candidate for candidate in candidates if candidate.checkpoint is not None]
    if same or not others:
        return same
    listed = [f"{other.path}: {_why_other(other, values, model)}" for other in others[:_MOST_CANDIDATES]]
    if len(others) > _MOST_CANDIDATES:
        listed.append(f"and {len(others) - _MOST_CANDIDATES} older runs")
    raise CheckpointError(
        "`runner.resume_dir=auto` finds no run of this configuration",
        where=str(others[0].path.parent),
        why="\n".join(listed),
        help=f"name the run to continue from, as in `runner.resume_dir={others[0].path}`, or omit"
        " `runner.resume_dir` to start from scratch; only keys of length and logging may differ"
        " (docs/run-folder.md)",
    )


def _model_of(values: Values) -> type[BaseModel] | None:
    """Return the model of the recipe that a configuration names; None for an unknown recipe."""
    from rlinf_core.job.find_recipe import find_variant

    try:
        return find_variant(str(values.get("recipe")), values.get).config_model()
    except ConfigError:
        return None


def _id_in(run: Path, model: type[BaseModel] | None = None) -> str | None:
    """Return the digest of the configuration in a run's folder."""
    values = _values_in(run, model)
    return config_id(values) if values is not None else None


def _values_in(run: Path, model: type[BaseModel] | None) -> Values | None:
    try:
        return values_of(read_text(run / "config.yaml"), model)
    except OSError:
        return None


def _why_other(candidate: _Candidate, values: Values, model: type[BaseModel] | None) -> str:
    old = _values_in(candidate.path, model)
    if old is None:
        return "its configuration cannot be read"
    words = differences(old, values)
    omitted = f"; and {len(words) - _MOST_DIFFERENCES} more" if len(words) > _MOST_DIFFERENCES else ""
    return "; ".join(words[:_MOST_DIFFERENCES]) + omitted or "its configuration file was changed"


def _leaves(data: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield every value with its path, except those of free keys. An empty list or mapping is a value."""
    if path in FREE_KEYS:
        return
    if isinstance(data, dict) and data:
        for key, value in cast("dict[object, object]", data).items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list) and data:
        for index, value in enumerate(cast("list[object]", data)):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        # Normalize numbers, since 1 and 1.0 are equal.
        yield path, int(data) if isinstance(data, float) and data.is_integer() else data


def _shown(values: Values, name: str) -> str:
    if name not in values:
        return "not set"
    value = values[name]
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"`{text}`" if len(text) <= _LONGEST_VALUE else f"`{text[:_LONGEST_VALUE]}...`"
