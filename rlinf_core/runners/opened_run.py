"""A run, and its policy, as notebooks, programs and comparisons read them.

run = load_run("runs/embodied-20260314-101502")
pandas.DataFrame(run.metrics).plot("step", "env/return")
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from rlinf_core.config.diagnostics import Diagnostics, Severity
from rlinf_core.config.tree import to_data
from rlinf_core.errors import ConfigError, RunError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.foreign.terminal_text import escaped
from rlinf_core.runners.metrics import Metrics, metrics_in
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import Checkpoint, is_checkpoint, sound_checkpoint
from rlinf_core.runners.storage.checkpoint_store import CheckpointStore
from rlinf_core.runners.storage.run_events import RunEvent, story_with_faults
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE, runs_in
from rlinf_core.runners.storage.run_status import RunStatus
from rlinf_core.scalars import plain

if TYPE_CHECKING:
    from rlinf_core.job.load import Job
    from rlinf_core.job.recipe import Policy, Recipe

# Columns of a record beside its metrics.
_STEP: Final = "step"
_TIME: Final = "time"
_LONGEST_REASON: Final = 120
# Runs that an error about a folder of runs names.
_NAMED_RUNS: Final = 2
# Invalid lines of the metrics that `faults` has.
_MOST_FAULTS: Final = 3
_DESCRIPTION: Final = "policy.json"


class Run:
    """A run, read from its folder; made by `load_run`.

    Each part is read when it is first used, and kept: open the run again for what it has written since. All files are
    read as data: nothing of the folder is imported or executed, and no command, path or address in it is followed, but
    the path of its checkpoints.

    Attributes:
        folder: the run folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @property
    def path(self) -> Path:
        """The path of the folder, absolute."""
        return self.folder.path

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        return self.folder.state.recipe

    @property
    def status(self) -> RunStatus:
        """Whether it is running, or how it ended; `failed` also for a run whose process vanished."""
        return self.folder.state.outcome[0]

    @property
    def reason(self) -> str:
        """The reason of a failure, in one line; else empty."""
        return self.folder.state.outcome[1]

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.folder.state.step

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration as nested mappings, defaults included and secrets masked.

        Raises:
            RunError: it cannot be read.
        """
        diagnostics = Diagnostics()
        where = str(self.folder.config_file)
        try:
            content = read_bounded(self.folder.config_file)
        except OSError as error:
            why = error.strerror or str(error)
            raise RunError("the configuration of a run cannot be read", where=where, why=why) from None
        # Its reader is heavier than the rest.
        from rlinf_core.config.reading import load_source, read

        source = load_source("-", diagnostics, stdin=content)
        tree = read(source, diagnostics) if source is not None else None
        if tree is None or not diagnostics.ok:
            why = next(finding.message for finding in diagnostics if finding.severity is Severity.ERROR)
            raise RunError("the configuration of a run cannot be read", where=where, why=why)
        return cast("dict[str, Any]", plain(to_data(tree)))

    @cached_property
    def steps(self) -> list[Metrics]:
        """The metrics of each step, in order; a torn last line is left out, see also `faults`.

        Raises:
            RunError: they cannot be read.
        """
        return self._lines[0]

    @cached_property
    def _lines(self) -> tuple[list[Metrics], list[str]]:
        try:
            return metrics_in(self.folder.metrics_file).with_faults(_MOST_FAULTS)
        except OSError as error:
            where, why = str(self.folder.metrics_file), error.strerror or str(error)
            raise RunError("the metrics of a run cannot be read", where=where, why=why) from None

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """A record for each step: `step`, `time` in seconds since 1970, and the metrics by name, possibly NaN.

        `pandas.DataFrame(run.metrics)` has a column for each metric.

        Raises:
            RunError: they cannot be read.
        """
        own = (_STEP, _TIME)
        return [
            {_STEP: line.step, _TIME: line.time, **{n: value for n, value in line.metrics.items() if n not in own}}
            for line in self.steps
        ]

    @property
    def result(self) -> dict[str, float]:
        """The metrics of the last evaluation, as in `eval/return`; those of the last step if nothing was evaluated.

        Raises:
            RunError: they cannot be read.
        """
        for line in reversed(self.steps):
            evaluation = {name: value for name, value in line.metrics.items() if name.startswith("eval/")}
            if evaluation:
                return evaluation
        return dict(self.steps[-1].metrics) if self.steps else {}

    @property
    def events(self) -> list[RunEvent]:
        """Its start, checkpoints, restarts and end, in order."""
        return self._story[0]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Its complete checkpoints, lowest step first. Their files are not verified (`Checkpoint.verify`).

        Raises:
            RunError: their folder cannot be read.
        """
        store = self.folder.checkpoints
        try:
            return store.complete()
        except OSError as error:
            where, why = str(store.folder), error.strerror or str(error)
            raise RunError("the checkpoints of a run cannot be read", where=where, why=why) from None

    @cached_property
    def faults(self) -> list[str]:
        """Unreadable lines that `steps` and `events` skip, in words; of the metrics at most three."""
        return [*self._lines[1], *self._story[1]]

    @cached_property
    def _story(self) -> tuple[list[RunEvent], list[str]]:
        return story_with_faults(self.path)

    def __repr__(self) -> str:
        reason = " ".join(self.reason.split())
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]} ..."
        ended = f"{self.status} at step {self.step}" + (f": {reason}" if reason else "")
        # Its texts may be others': a terminal must not act on them.
        return escaped(f"<Run {self.name}: recipe {self.recipe}, {ended}>").replace("\n", " ")


def load_run(path: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, also while it continues.

    Args:
        path: its folder, as `rlinf runs` shows it.

    Raises:
        RunError: it is not a run folder, or its state cannot be read.
    """
    folder = Path(path)
    if folder.is_dir() and not os.path.lexists(folder / STATE):
        raise folder_without_run(folder)
    return Run(RunFolder.open(folder))


def folder_without_run(folder: Path, otherwise: str = "name a run folder") -> RunError:
    """Return the error for a folder named in the place of a run; `otherwise` is its advice if no runs are in it."""
    runs = sorted(runs_in(folder), key=lambda run: (run[1].created, run[0].name))
    newest = [str(path) for path, _ in runs[-_NAMED_RUNS:]]
    help = f"name one of its runs, such as {' or '.join(newest)}" if newest else otherwise
    return RunError("this folder is not a run", where=str(folder), help=help)


def load_policy(path: str | Path, *, checkpoint: str | Path | None = None, device: str = "cpu") -> Policy:
    """Return a trained policy, ready to act. It needs neither a cluster nor the environment.

    Args:
        path: a run folder, for its newest checkpoint; a checkpoint `global_step_N`; or a folder that `rlinf
            export --format safetensors` wrote.
        checkpoint: another checkpoint of the run.
        device: its torch device.

    Raises:
        RunError: there is no such folder.
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: the recipe does not support this, or the policy is of another recipe.
    """
    from rlinf_core.job.find_recipe import find_recipe
    from rlinf_core.job.load import load_job

    folder = Path(path)
    job: Job | None = None
    recipe: Recipe | None = None
    if (run := _run_of(folder)) is not None:
        # Findings about this machine, such as a missing simulator, do not matter here.
        job = load_job(str(run.config_file))
        recipe = job.recipe
    if checkpoint is not None or is_checkpoint(folder):
        folder = sound_checkpoint(Path(checkpoint or folder)).path
    else:
        if run is not None and (folder / STATE).is_file():
            folder = run.checkpoints.require_sound().path
        elif (newest := CheckpointStore(folder).latest_sound()) is not None:
            folder = newest.path
    if recipe is None:
        recipe = find_recipe(_recipe_of(folder))
    function = recipe.load(recipe.policy)
    if function is None:
        raise ConfigError(f"recipe `{recipe.name}` does not support `load_policy`")
    return function(folder, job.config if job is not None else None, device)


def note_step(folder: Path, step: int) -> None:
    """Add the training step of the weights to the description of an exported policy, if it has one."""
    file = folder / _DESCRIPTION
    if file.is_file():
        about = {**load_json_object(read_bounded(file)), "step": step}
        durable.write_whole(file, json.dumps(about, indent=1) + "\n")


def _run_of(folder: Path) -> RunFolder | None:
    """Return the run of a run folder, its `checkpoints` or one of its checkpoints, if it exists."""
    for path in (folder, folder.absolute().parent, folder.absolute().parent.parent):
        if (path / STATE).is_file():
            return RunFolder.open(path)
    return None


def _recipe_of(folder: Path) -> str:
    """Return the recipe's name of a policy folder outside of a run."""
    try:
        return str(load_json_object(read_bounded(folder / _DESCRIPTION))["recipe"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "there is no policy in the folder",
            where=str(folder),
            why=f"`{_DESCRIPTION}` is missing" if isinstance(error, OSError) else f"`{_DESCRIPTION}`: {error}",
            help="name a run, a checkpoint, or a folder of `rlinf export --format safetensors`",
        ) from None
