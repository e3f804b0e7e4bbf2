"""The state of a run, in `run.json`, and the marks of its checkpoint folders. Imports no heavy package."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import Field

from rlinf_core.errors import RunError
from rlinf_core.foreign.files import FileModel, Moment, Name, Step, read_fault, read_model
from rlinf_core.node.process_life import Presence, ProcessIdentity, look
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.run_status import RunStatus
from rlinf_core.suggest import encodable

SCHEMA: Final = "rlinf.run/1"
STATE: Final = "run.json"
_MOST_BYTES: Final = 1 << 20
MARK: Final = ".rlinf-run.json"
_MARK_SCHEMA: Final = "rlinf.checkpoints/1"
_MOST_MARK_BYTES: Final = 1 << 16
# The most characters of a reason: the message of an exception may contain a whole tensor.
_MOST_REASON: Final = 4000
# The reason of a run whose process is gone without an end status.
_VANISHED: Final = "its process vanished: it was killed, or its machine went down"

Ending = Literal["running", "finished", "failed", "interrupted"]


class Attempt(FileModel):
    """The fields of a run's state that belong to one attempt; a failed attempt to resume restores them.

    Attributes:
        status: a `RunStatus` other than `unknown`.
        step: the last finished step.
        reason: why it failed, in one line; else empty.
        pid, start, host, boot, pid_namespace, machine: the identity of its driver process, see `ProcessIdentity`.
        address: the address of its Ray, for example `10.0.0.1:6379`; empty before it is known.
        ended: the time when the run ended, or None.
        resumed_from: the checkpoint that it last resumed from, or None.
    """

    status: Ending = "running"
    step: Step = 0
    reason: Annotated[str, Field(max_length=65536)] = ""
    pid: Annotated[int, Field(ge=0, le=2**22)] = 0
    start: Annotated[str, Field(max_length=64)] = ""
    host: Annotated[str, Field(max_length=256)] = ""
    boot: Annotated[str, Field(max_length=64)] = ""
    pid_namespace: Annotated[int, Field(ge=0, lt=2**64)] = 0
    machine: Annotated[str, Field(max_length=64)] = ""
    address: Annotated[str, Field(max_length=512)] = ""
    ended: Moment | None = None
    resumed_from: Name | None = None


class RunState(Attempt):
    """The state of a run, in `run.json`. Times are seconds since 1970.

    Attributes:
        recipe: the recipe's name.
        experiment: the prefix of its folder's name.
        kind: `training`, or `rehearsal` for a run that did no real work.
        config_id: a digest of its configuration without free keys, see `resuming`; empty if unknown.
        run_id: a random id from the creation of the folder, equal in all copies; empty for runs of an earlier rlinf.
        created, updated: the times when the folder was created, and when this state was written.
        checkpoints: the folder of its checkpoints.
        earlier: the previous attempt, while a resumed run has no workers yet; else None.
    """

    recipe: Name
    experiment: Name
    kind: Literal["training", "rehearsal"] = "training"
    run_id: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    config_id: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    created: Moment = 0.0
    updated: Moment = 0.0
    checkpoints: Annotated[Name, Field(min_length=1)] = "checkpoints"
    earlier: Attempt | None = None

    @property
    def process(self) -> ProcessIdentity:
        """The driver process of the run, past or present."""
        return ProcessIdentity(self.pid, self.start, self.host, self.boot, self.pid_namespace, self.machine)

    @property
    def presence(self) -> Presence:
        """Whether the driver is alive, as far as visible from here; GONE for a run with an end status."""
        return look(self.process, self.updated) if self.status == RunStatus.RUNNING else Presence.GONE

    @property
    def outcome(self) -> tuple[RunStatus, str]:
        """The status of the run and its reason, also if its driver could not record them."""
        if self.status != RunStatus.RUNNING:
            return RunStatus(self.status), self.reason
        match self.presence:
            case Presence.ALIVE:
                return RunStatus.RUNNING, self.reason
            case Presence.UNKNOWN:
                return RunStatus.UNKNOWN, f"its driver was {self.process}, which is not visible from here"
            case Presence.GONE:
                return self.as_before().outcome if self.earlier is not None else (RunStatus.FAILED, _VANISHED)

    @property
    def alive(self) -> bool:
        """Whether the run is active, with a driver visible from here."""
        return self.presence is Presence.ALIVE

    @property
    def going_on(self) -> bool:
        """Whether the run is or may be active: its driver is alive, or cannot be checked from here."""
        return self.presence is not Presence.GONE

    def changed(self, **changes: Any) -> Self:
        """Return a state with changed fields.

        Raises:
            ValueError: a value is invalid for its field.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        # No reader of JSON takes halves of characters.
        reason = encodable(str(changes.get("reason", self.reason)))
        return type(self).model_validate({**fields, **changes, "reason": reason[:_MOST_REASON]})

    def before_attempt(self) -> Attempt | None:
        """Return the attempt to restore if a new one fails to start; None for a run without an attempt."""
        if self.earlier is not None:
            return self.earlier
        return Attempt(**{name: getattr(self, name) for name in Attempt.model_fields}) if self.pid else None

    def as_before(self) -> Self:
        """Return the state with the current attempt, which failed to start, replaced by the earlier one."""
        earlier = self.earlier or Attempt()
        return self.changed(**{name: getattr(earlier, name) for name in Attempt.model_fields}, earlier=None)

    def encoded(self) -> str:
        """Return the text of `run.json`."""
        return json.dumps({"schema": SCHEMA, **self.model_dump(mode="json")}, indent=2) + "\n"


class _StateFile(RunState):
    """The content of `run.json`."""

    schema_: Annotated[Literal["rlinf.run/1"], Field(alias="schema")]

    def state(self) -> RunState:
        return RunState.model_construct(**{name: getattr(self, name) for name in RunState.model_fields})


class UnreadableRun(NamedTuple):
    """A folder whose `run.json` cannot be used, and why."""

    path: Path
    why: str


def read_state(folder: Path) -> RunState:
    """Return the state of the run in a folder.

    Raises:
        RunError: it is not a run folder, or a field of `run.json` is invalid.
    """
    try:
        return read_model(folder / STATE, _StateFile, _MOST_BYTES).state()
    except (FileNotFoundError, NotADirectoryError):
        raise RunError("this is not a run folder", where=str(folder), why=f"there is no `{STATE}` in it") from None
    except OSError as error:
        raise RunError(
            "the state of a run cannot be read",
            where=str(folder),
            why=f"`{STATE}` {read_fault(error)}",
            help="the run was not touched; fix the file, or delete the folder by hand",
        ) from None


def runs_in(log_path: Path) -> Iterator[tuple[Path, RunState]]:
    """Yield the run folders in `log_path`, each with its state; other contents are ignored."""
    for path, state in _look_into(log_path):
        if isinstance(state, RunState):
            yield path, state


def unreadable_runs(log_path: Path) -> list[UnreadableRun]:
    """Return the folders in `log_path` with an unusable `run.json`."""
    return [UnreadableRun(path, state) for path, state in _look_into(log_path) if isinstance(state, str)]


def _look_into(log_path: Path) -> Iterator[tuple[Path, RunState | str]]:
    """Yield the run folders in `log_path`, each with its state or the error of reading it.

    A link to a run beside it, such as `latest`, is left out: the run is not there twice.

    Raises:
        RunError: `log_path` exists, and cannot be read.
    """
    try:
        paths = sorted(log_path.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError("the folder of runs cannot be read", where=str(log_path), why=error.strerror) from None
    for path in paths:
        try:
            if path.is_symlink() and os.path.dirname(os.path.realpath(path)) == os.path.realpath(log_path):
                continue
        except OSError:
            continue  # a link that cannot be read
        try:
            yield path, read_state(path)
        except RunError as error:
            try:
                (path / STATE).lstat()
            except OSError:
                continue
            yield path, error.why or error.message


class Mark(FileModel):
    """The mark, in a checkpoint folder outside of its run's folder, of the run that owns it.

    `run.json` may name any folder, and a copy of a run names the same folder as the original. So an outside folder
    belongs to a run only if its mark has the run's id, and the path and inode of the run's folder.

    Attributes:
        run_id: the id of the run.
        folder, inode: the path and inode of the run's folder, which a copy does not share.
        place: the path of the checkpoint folder itself, which a copy does not share.
    """

    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    folder: Annotated[str, Field(max_length=4096)]
    inode: Annotated[int, Field(gt=0)]
    place: Annotated[str, Field(max_length=4096)]


def outside(run: Path, state: RunState) -> Path | None:
    """Return the folder of a run's checkpoints if it is outside of the run's folder; else None."""
    run, path = Path(os.path.normpath(run)), Path(os.path.normpath(run / state.checkpoints))
    return None if path.is_relative_to(run) and path != run else path


def mark(checkpoints: Path, run: Path, run_id: str) -> None:
    """Mark a new checkpoint folder as owned by the run in the folder `run`.

    Raises:
        OSError: the mark cannot be written.
    """
    owner = Mark(run_id=run_id, folder=str(run.resolve()), inode=run.stat().st_ino, place=str(checkpoints.resolve()))
    durable.write_whole(checkpoints / MARK, json.dumps({"schema": _MARK_SCHEMA, **owner.model_dump()}, indent=1) + "\n")


def why_not_own(run: Path, state: RunState) -> str | None:
    """Return why a run may not write to or delete its checkpoint folder; None if it may."""
    path = outside(run, state)
    if path is None:
        return _why_linked(run, state)
    if path.is_symlink():
        return "it is a link"
    if not state.run_id:
        return "the run is from an earlier rlinf, which left no mark there"
    try:
        if not stat.S_ISREG((path / MARK).lstat().st_mode):
            return f"its `{MARK}` is not a file"
        owner = read_model(path / MARK, Mark, _MOST_MARK_BYTES)
    except FileNotFoundError:
        return f"it has no mark of this run, `{MARK}`"
    except OSError:
        return f"its `{MARK}` cannot be read"
    if owner.run_id != state.run_id or owner.place != str(path.resolve()):
        return "it is marked as owned by another run"
    if (owner.folder, owner.inode) != (str(run.resolve()), run.stat().st_ino):
        return f"it is marked as owned by the run in {owner.folder}; this run is a copy, or was moved"
    return None


def _why_linked(run: Path, state: RunState) -> str | None:
    """Return which part of the checkpoint path below the run's folder is a link, as a text, or None."""
    path = run
    for part in Path(os.path.normpath(state.checkpoints)).parts if not os.path.isabs(state.checkpoints) else ():
        path /= part
        if path.is_symlink():
            return f"{path} is a link"
    return None
