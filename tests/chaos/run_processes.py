"""The processes of an active run that this command has started, by kind, and signals to them and no others."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from rlinf_cli.runs.active import Inspector
from rlinf_core.cluster.engine import folders_of, running_jobs
from rlinf_core.errors import RLinfError
from rlinf_core.node.process_life import ProcessIdentity, UnprovenProcessError, identity_here, opened
from rlinf_core.process.proc import processes_of, spell_command, stat
from rlinf_core.supervision.lives import DRIVER, INSPECTOR
from tests.chaos.fault_table import Target

# A part of the command or the title of processes of Ray.
_TITLES: Final[tuple[tuple[str, Target], ...]] = (
    ("gcs/gcs_server", Target.GCS_SERVER),
    ("raylet/raylet", Target.RAYLET),
    ("log_monitor.py", Target.LOG_MONITOR),
    ("ray::DashboardAgent", Target.RAY_AGENT),
    ("dashboard/agent.py", Target.RAY_AGENT),
    ("ray::RuntimeEnvAgent", Target.RAY_AGENT),
    ("runtime_env/agent", Target.RAY_AGENT),
    ("ray::ManagerProcess", Target.MANAGER),
    ("ray::ChannelProcess", Target.CHANNEL),
)
# Processes that no component has got yet.
_SPARE: Final = "ray::IDLE"
# The manager knows these by name.
_NAMED: Final = frozenset({Target.WORKER, Target.CHANNEL})


class RunProcess(NamedTuple):
    """A process of a run.

    Attributes:
        name: the name, as the run calls it, as in `EnvGroup:0`; its kind where it has none.
    """

    name: str
    target: Target
    identity: ProcessIdentity


class RunProcesses:
    """The processes of one run on this machine.

    Args:
        driver: the driver that this command has started, and not yet waited for.
        groups: the component of each worker group.
    """

    def __init__(self, driver: ProcessIdentity, groups: Mapping[str, str]) -> None:
        self.driver = driver
        self._groups = groups
        # The names by pid, as the manager knows them.
        self._names: dict[int, str] = {}
        # A restart makes another.
        self._folders: dict[Path, None] = {}

    def folders(self) -> list[Path]:
        """Return the private folders that the driver has made so far, which its processes are marked with."""
        self._folders.update(dict.fromkeys(folders_of(self.driver)))
        return list(self._folders)

    def _ask_names(self) -> None:
        """Ask the run's manager for the names of its workers; those known before stay where it does not answer."""
        with contextlib.suppress(RLinfError, OSError):
            record = next((record for record in running_jobs() if record.pid == self.driver.pid), None)
            if record is not None:
                with Inspector(record) as inspector:
                    peers = inspector.snapshot(stacks=False).peers
                names = {peer.info.pid: name for name, peer in peers.items()}
                self._names = {
                    pid: name for pid, name in names.items() if name != DRIVER and not name.startswith(INSPECTOR)
                }

    def of(self, target: Target) -> list[RunProcess]:
        """Return the living processes of a kind, in an order that depends on their names alone."""
        if target is Target.DRIVER:
            return [RunProcess(DRIVER, target, self.driver)]
        pids = set(self.left())
        listed = [process for pid in pids if (process := self._known(pid)) is not None]
        if any(process.identity.pid not in self._names for process in listed if process.target in _NAMED):
            self._ask_names()
            listed = [process for pid in pids if (process := self._known(pid)) is not None]
        workers = {process.identity.pid for process in listed if process.target is Target.WORKER}
        if target is Target.CHILD:
            known = {process.identity.pid for process in listed}
            listed = [
                RunProcess(f"child of {self._names.get(parent, 'a worker')}", Target.CHILD, identity)
                for pid in pids - known
                if (parent := stat(pid).parent) in workers and (identity := _identity(pid)) is not None
            ]
        if target is Target.ACTOR:
            actors = [process for process in listed if self._component(process.name) == "actor"]
            listed, target = actors, Target.WORKER
        return sorted(
            (process for process in listed if process.target is target),
            key=lambda process: (process.name, process.identity.pid),
        )

    def left(self) -> list[int]:
        """Return the processes of the run that live, without its driver."""
        return [pid for folder in self.folders() for pid in processes_of(str(folder), str(folder))]

    @contextlib.contextmanager
    def held(self, process: RunProcess) -> Generator[int | None, None, None]:
        """Hold a process within the block, and yield its handle for `send`; None where it has ended, or is not
        certainly one of this run."""
        try:
            with opened(process.identity) as handle:
                # What was opened has this pid, so that its marks are those of this very process.
                own = process.target is Target.DRIVER or process.identity.pid in self.left()
                yield handle if own else None
        except (ProcessLookupError, UnprovenProcessError, PermissionError):
            yield None

    def _known(self, pid: int) -> RunProcess | None:
        identity = _identity(pid)
        title = spell_command(pid)
        if identity is None or _SPARE in title:
            return None
        name = self._names.get(pid)
        target = next((target for words, target in _TITLES if words in title), None)
        if target is None and (name is not None or title.startswith("ray::")):
            target = Target.WORKER
        return None if target is None else RunProcess(name or str(target), target, identity)

    def _component(self, name: str) -> str:
        group = name.partition(":")[0]
        return self._groups.get(group, group)


def _identity(pid: int) -> ProcessIdentity | None:
    try:
        return identity_here(pid)
    except ProcessLookupError:
        return None
