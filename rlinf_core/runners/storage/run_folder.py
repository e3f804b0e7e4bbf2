"""The folder of a run: its files and its state.

    runs/embodied-20260314-101502/
      run.json        see `rlinf_core.runners.storage.run_state`
      config.yaml     the resolved configuration, secrets masked; config.1.yaml, ...: before it was resumed with another
      metrics.jsonl   one JSON object for each step
      logs/COMPONENT/rank_N.log
      checkpoints/    see `rlinf_core.runners.storage.checkpoint`
      memory.json     the peak memory of each process, by phase
      profile.json    the durations of the timed calls of each component, by rows
      trace.json      with `runner.trace: true`
      profiles/       with `runner.profiler`
      curve.png, curve.svg
      events.jsonl    its start, checkpoints, restarts and end, one JSON object per line
      evidence/       the evidence of failures and restarts, see `rlinf_core.runners.storage.run_events`
      origins.json, placement.json, report.html

It imports no heavy package, since commands use it, too.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

from rlinf_core.config.composing.origins import resolved_text
from rlinf_core.config.secrets import mask
from rlinf_core.config.sections.runner import RunnerConfig, RunSettings
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import FileModel, Step, read_text, write_fault
from rlinf_core.node.process_life import Presence, own_identity
from rlinf_core.process import pacing
from rlinf_core.process.known_secrets import hidden
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import Checkpoint, config_hash
from rlinf_core.runners.storage.checkpoint_store import KEEP_ALL, CheckpointStore
from rlinf_core.runners.storage.durable import RecordFile, parse_model
from rlinf_core.runners.storage.resuming import config_id, find_source, run_to_resume, values_of
from rlinf_core.runners.storage.run_state import STATE, Attempt, RunState, mark, read_state, runs_in, why_not_own
from rlinf_core.runners.storage.run_status import RunStatus

if TYPE_CHECKING:
    from rlinf_core.job.load import Job
    from rlinf_core.job.recipe import Fact

_UNSAFE: Final = re.compile(r"[^\w.-]+")


class RunFolder:
    """The folder of one run; made by `create`, found by `open` and `latest`.

    Attributes:
        path: the folder, absolute.
        resumed_from: the checkpoint that this process resumes from, or None; set by `create`.
    """

    def __init__(self, path: Path, state: RunState, keep: int = KEEP_ALL, resumed_from: Path | None = None) -> None:
        self.path = path
        self.resumed_from = resumed_from
        self._state = state
        self._keep = keep
        # The resolved configuration of a resumed run, written once its workers have started.
        self._pending_config: str | None = None
        # Closes the driver's open handle of the folder.
        self._let_go: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(
        cls,
        runner: RunSettings,
        recipe: str,
        checkpoint_save_path: str | None = None,
        facts: Mapping[str, Fact] | None = None,
        config_text: str | None = None,
    ) -> Self:
        """Return the folder of a run that starts in this process.

        Without `runner.resume_dir`, or with `auto` for an experiment without checkpoints, it is a new folder. Else it
        is the folder of the run of the checkpoint to resume from. If that run has newer checkpoints, cannot be written,
        or is a copy whose checkpoints belong to another folder, it stays unchanged, and this run starts in a new folder
        with the metrics up to the checkpoint.

        Args:
            runner: the run's section `runner`.
            recipe: the recipe's name.
            checkpoint_save_path: `actor.checkpoint_save_path`: checkpoints go to a folder named after the run in it.
            facts: the values that must match the checkpoint (`Manifest.facts`); None for no check here.
            config_text: the resolved configuration, secrets masked, which a run resumed by `auto` must share (see
                `resuming`); None for any.

        Raises:
            CheckpointError: there is no complete checkpoint at `resume_dir`, it does not match or is of another recipe,
                or `auto` finds only runs of other configurations; no folder is changed.
            RunError: the folder cannot be written, or the run to resume is still active.
        """
        log_path = Path(runner.logger.log_path).absolute()
        experiment = runner.logger.experiment_name or recipe
        resume_dir = runner.resume_dir if isinstance(runner, RunnerConfig) else None
        source = find_source(resume_dir, log_path, experiment, config_text)
        path = None if source is None else run_to_resume(source, log_path, recipe)
        home = None if path is None else cls.open(path)
        if source is not None and facts is not None:
            source.check(facts)
        try:
            if home is None or source is None:
                folder = cls._make(log_path, recipe, experiment, checkpoint_save_path)
                folder._begin(runner, source)
                return folder
            # Of two concurrent commands only one resumes the run.
            writable = os.access(home.path, os.W_OK) and os.access(home.path / STATE, os.W_OK)
            with durable.claimed(home.path / STATE, os.O_RDWR if writable else os.O_RDONLY) as ours:
                if not ours or home.refresh().going_on:
                    raise _going_on(home)
                newest = home.checkpoints.latest()
                own = writable and why_not_own(home.path, home.state) is None
                if own and newest is not None and newest.step == source.step:
                    folder = cls(home.path, home.state)
                else:
                    folder = cls._make(log_path, recipe, experiment, checkpoint_save_path)
                    _copy_metrics(home.metrics_file, folder.metrics_file, source.step)
                    _copy_configs(home, folder)
                folder._begin(runner, source)
                return folder
        except OSError as error:
            raise _unwritable(log_path, error) from error

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Return the run folder at `path`, for reading.

        Raises:
            RunError: `path` is not a run folder.
        """
        folder = Path(path).absolute()
        return cls(folder, read_state(folder))

    @classmethod
    def latest(cls, log_path: str | Path, experiment: str | None = None) -> Self | None:
        """Return the newest run folder in `log_path`, of one experiment or of any, or None."""
        runs = [cls(path, state) for path, state in runs_in(Path(log_path).absolute())]
        wanted = [run for run in runs if experiment in (None, run.state.experiment)]
        return max(wanted, key=lambda run: (run.state.created, run.path.name), default=None)

    @classmethod
    def _make(cls, log_path: Path, recipe: str, experiment: str, checkpoint_save_path: str | None) -> Self:
        """Return a new folder with a state; existing folders are never reused."""
        log_path.mkdir(parents=True, exist_ok=True)
        # An experiment name may contain characters invalid in folder names; a leading dot would hide the folder.
        names = _stamped(_UNSAFE.sub("_", experiment).lstrip(".") or "run")
        while True:
            path = log_path / next(names)
            elsewhere = None if checkpoint_save_path is None else Path(checkpoint_save_path).absolute() / path.name
            if _made(path, elsewhere):
                break
        run_id = uuid4().hex
        if elsewhere is not None:
            mark(elsewhere, path, run_id)
        checkpoints = "checkpoints" if elsewhere is None else str(elsewhere)
        state = RunState(
            recipe=recipe,
            experiment=experiment,
            kind="training" if pacing.wanted is None else "rehearsal",
            run_id=run_id,
            created=time.time(),
            checkpoints=checkpoints,
        )
        folder = cls(path, state)
        folder.logs.mkdir()
        return folder

    def _begin(self, runner: RunSettings, source: Checkpoint | None) -> None:
        """Record this process as the run's driver; the earlier state of a resumed run is kept until `started`."""
        if isinstance(runner, RunnerConfig):
            self._keep = runner.keep_checkpoints
        self.resumed_from = source.path if source else None
        # Left open: a process in `run.json` is only signalled if it has the folder open.
        opened = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._let_go = weakref.finalize(self, os.close, opened)
        earlier = self._state.before_attempt()
        fields = Attempt.model_validate(
            {
                **own_identity()._asdict(),
                "step": source.step if source else 0,
                "resumed_from": str(source.path) if source else None,
            }
        )
        self.update(**dict(fields), earlier=earlier)

    @property
    def config_file(self) -> Path:
        """The resolved configuration, secrets masked."""
        return self.path / "config.yaml"

    @property
    def earlier_config_files(self) -> list[Path]:
        """The configurations before the run was resumed with another one, oldest first: `config.1.yaml`, ..."""
        files = self.path.glob("config.*.yaml")
        numbers = {int(number): file for file in files if (number := file.name.split(".")[1]).isdecimal()}
        return [file for _, file in sorted(numbers.items())]

    @property
    def metrics_file(self) -> Path:
        """One JSON object for each step; `rlinf_core.runners.metrics` writes and reads it."""
        return self.path / "metrics.jsonl"

    @property
    def trace_file(self) -> Path:
        """The trace for Chrome and Perfetto, with `runner.trace: true`."""
        return self.path / "trace.json"

    @property
    def memory_file(self) -> Path:
        """The peak memory of each process, by phase."""
        return self.path / "memory.json"

    @property
    def profile_file(self) -> Path:
        """The durations of the timed calls of each component, by rows."""
        return self.path / "profile.json"

    @property
    def logs(self) -> Path:
        """The folder of the workers' logs."""
        return self.path / "logs"

    def log_file(self, component: str, rank: int) -> Path:
        """Return the log of one worker. On another machine it exists only if this folder is shared."""
        return self.logs / component / f"rank_{rank}.log"

    @property
    def checkpoints(self) -> CheckpointStore:
        """The run's checkpoints."""
        return CheckpointStore(self.path / self._state.checkpoints, self._keep)

    @property
    def state(self) -> RunState:
        """The state of the run, as last read or written by this object."""
        return self._state

    def refresh(self) -> RunState:
        """Reread the state from disk.

        Raises:
            RunError: the state cannot be read.
        """
        self._state = read_state(self.path)
        return self._state

    def update(self, **changes: Any) -> None:
        """Change fields of the state, by their names in `RunState`, and write it.

        Raises:
            RunError: the folder cannot be written.
        """
        self._write(self._state.changed(**changes, updated=time.time()))

    def _write(self, state: RunState) -> None:
        try:
            durable.write_short(self.path / STATE, state.encoded())
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._state = state

    def started(self) -> None:
        """Record that the workers have started, so that an earlier state is no longer restored.

        Raises:
            RunError: the folder cannot be written.
        """
        text, self._pending_config = self._pending_config, None
        if text is not None:
            self._keep_config(text)
        if self._state.earlier is not None:
            self.update(earlier=None)

    def end(self, status: str, reason: str = "") -> None:
        """Record the end of the run: its `RunStatus`, and the first line of the reason for a failure.

        A resumed run that fails before `started` gets its previous state back.

        Raises:
            RunError: the folder cannot be written.
        """
        try:
            if self._state.earlier is not None and status != RunStatus.FINISHED:
                self._write(self._state.as_before().changed(updated=time.time()))
                return
            line = (hidden(reason).strip().splitlines() or [""])[0]
            self.update(status=status, reason=line, ended=time.time(), earlier=None)
        finally:
            self._let_go()

    def write_config(self, job: Job) -> str:
        """Save the resolved configuration, with defaults and with secrets masked; return its `config_hash`.

        Raises:
            RunError: the folder cannot be written.
        """
        return self.write_config_text(config_text_of(job))

    def write_config_text(self, text: str) -> str:
        """Save YAML as the run's configuration, and return its `config_hash`.

        An earlier, different configuration is renamed with a number. For a resumed run, `started` writes the file.

        Raises:
            RunError: the folder cannot be written.
        """
        if self._state.earlier is not None:
            self._pending_config = text
        else:
            self._keep_config(text)
        return config_hash(text)

    def _keep_config(self, text: str) -> None:
        try:
            if os.path.lexists(self.config_file) and _other_text(self.config_file, text):
                durable.keep_old(self.config_file)
            durable.write_whole(self.config_file, text)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        values = values_of(text)
        self.update(config_id=config_id(values) if values is not None else "")


def config_text_of(job: Job) -> str:
    """Return the resolved configuration of a job as YAML, with defaults and with secrets masked."""
    if job.tree is None:
        raise ValueError("a job that could not be read has no configuration to save")
    return resolved_text(mask(job.tree, job.secret), job.config)


def unused_path(folder: Path, name: str, ending: str = "") -> Path:
    """Return a path in `folder` that does not exist, such as `name-20260314-101502` with the current time."""
    return next(path for stamped in _stamped(name) if not os.path.lexists(path := folder / f"{stamped}{ending}"))


def _stamped(name: str) -> Iterator[str]:
    """Yield a name with the current time, then the same with `-2`, `-3` and so on."""
    stamped = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    yield stamped
    yield from (f"{stamped}-{number}" for number in count(2))


def _made(run: Path, checkpoints: Path | None) -> bool:
    """Create the folders of a new run; return False if the name is taken."""
    try:
        run.mkdir()
    except FileExistsError:
        return False
    if checkpoints is None:
        return True
    try:
        checkpoints.parent.mkdir(parents=True, exist_ok=True)
        checkpoints.mkdir()
    except OSError as error:
        run.rmdir()
        if isinstance(error, FileExistsError):
            return False
        raise
    return True


def _other_text(path: Path, text: str) -> bool:
    try:
        return read_text(path) != text
    except OSError:
        return True


def _going_on(run: RunFolder) -> RunError:
    state = run.state
    why, help = "another command is resuming it", "wait for its end, or end it with `rlinf stop`"
    match state.presence:
        case Presence.ALIVE:
            why = f"its driver is process {state.pid} on {state.host}"
        case Presence.UNKNOWN:
            why = f"its driver is, or was, {state.process}, which is not visible from here"
            release = f"`rlinf stop {shlex.quote(str(run.path))} --force`"
            help = f"end it there; if it has certainly ended, {release} releases it"
        case Presence.GONE:
            pass
    return RunError("the run to resume is still active", where=str(run.path), why=why, help=help)


class _Stepped(FileModel):
    step: Step


def _copy_metrics(old: Path, new: Path, step: int) -> None:
    """Copy the lines of the metrics up to a step."""

    def kept(line: bytes) -> bytes:
        if parse_model(line, _Stepped).step > step:
            raise ValueError("it is later")
        return line

    durable.write_whole(new, b"".join(RecordFile(old, kept)))


def _copy_configs(old: RunFolder, new: RunFolder) -> None:
    """Copy the configurations with which a run has come to its checkpoint."""
    for file in (*old.earlier_config_files, old.config_file):
        with suppress(FileNotFoundError):
            durable.write_whole(new.path / file.name, read_text(file))


def _unwritable(folder: Path, error: OSError) -> RunError:
    return RunError(
        "the run folder cannot be written",
        where=str(folder),
        why=write_fault(folder, error),
        help="choose a shorter `runner.logger.experiment_name`"
        if error.errno == errno.ENAMETOOLONG
        else "free some space or fix its permissions, or choose another folder with `runner.logger.log_path`",
    )
