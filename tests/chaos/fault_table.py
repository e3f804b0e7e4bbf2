"""The table of faults that `make chaos` plants: one row a fault, read by the planner, the injector, the judge and the
docs; and that of standstills and links, which tests plant, for the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from rlinf_core.errors import ConfigError
from rlinf_core.suggest import did_you_mean, quoted


class Target(StrEnum):
    """A kind of process of a run."""

    WORKER = "worker"
    ACTOR = "actor"
    CHILD = "child of a worker"
    CHANNEL = "channel"
    MANAGER = "manager"
    GCS_SERVER = "gcs_server"
    RAYLET = "raylet"
    LOG_MONITOR = "log monitor"
    RAY_AGENT = "agent of Ray"
    DRIVER = "driver"


class Deed(StrEnum):
    """The ways to disturb a process."""

    KILL = "kill -9"
    TERMINATE = "SIGTERM"
    PAUSE = "SIGSTOP for seconds"
    FREEZE = "SIGSTOP until it is named"
    DAMAGE = "a bit of the newest checkpoint flipped, then kill -9"
    FILL = "no room for files for seconds"


class PlantedFault(NamedTuple):
    """A row of the table.

    Attributes:
        deed: what is done.
        target: the kind of process that it strikes.
        weight: how often it is drawn, relative to the others.
        outcome: what becomes of the run, for the docs.
        ends_command: whether the command `rlinf train` ends by it, and is typed again with `runner.resume_dir=auto`.
    """

    deed: Deed
    target: Target
    weight: int
    outcome: str
    ends_command: bool = False


_AGAIN: Final = "all processes start again; the steps since the checkpoint or snapshot are done again"
_ALONE: Final = "it is started again alone, or all are; at most the steps since the checkpoint are done again"
_WAITED: Final = "it is waited for; nothing is lost"
FAULTS: Final[Mapping[str, PlantedFault]] = {
    "kill-worker": PlantedFault(Deed.KILL, Target.WORKER, 8, _ALONE),
    "kill-child": PlantedFault(Deed.KILL, Target.CHILD, 2, "its worker makes it again, or dies and is started again"),
    "kill-channel": PlantedFault(Deed.KILL, Target.CHANNEL, 2, _AGAIN),
    "kill-manager": PlantedFault(Deed.KILL, Target.MANAGER, 2, _AGAIN),
    "kill-gcs_server": PlantedFault(Deed.KILL, Target.GCS_SERVER, 2, _AGAIN),
    "kill-raylet": PlantedFault(Deed.KILL, Target.RAYLET, 2, _AGAIN),
    "kill-log-monitor": PlantedFault(Deed.KILL, Target.LOG_MONITOR, 1, "nothing is lost: rlinf keeps logs of its own"),
    "kill-agent": PlantedFault(
        Deed.KILL, Target.RAY_AGENT, 1, "Ray ends its raylet, which is named; all processes start again"
    ),
    "kill-driver": PlantedFault(
        Deed.KILL,
        Target.DRIVER,
        2,
        "all processes end; `runner.resume_dir=auto` goes on from the checkpoint",
        ends_command=True,
    ),
    "terminate-driver": PlantedFault(
        Deed.TERMINATE,
        Target.DRIVER,
        1,
        "the step is finished and kept; `runner.resume_dir=auto` goes on",
        ends_command=True,
    ),
    "pause-worker": PlantedFault(Deed.PAUSE, Target.WORKER, 3, _WAITED),
    "pause-channel": PlantedFault(Deed.PAUSE, Target.CHANNEL, 1, _WAITED),
    "pause-manager": PlantedFault(Deed.PAUSE, Target.MANAGER, 1, _WAITED),
    "pause-gcs_server": PlantedFault(Deed.PAUSE, Target.GCS_SERVER, 1, _WAITED),
    "pause-raylet": PlantedFault(Deed.PAUSE, Target.RAYLET, 1, _WAITED),
    "freeze-worker": PlantedFault(Deed.FREEZE, Target.WORKER, 2, "it is named while the run waits; nothing is lost"),
    "damage-checkpoint": PlantedFault(
        Deed.DAMAGE, Target.ACTOR, 2, "the damaged checkpoint is refused; the one before it is used"
    ),
    "fill-driver": PlantedFault(
        Deed.FILL, Target.DRIVER, 1, "the run goes on without that part of its record, or ends with the reason"
    ),
    "fill-actor": PlantedFault(Deed.FILL, Target.ACTOR, 1, "the run ends with the reason where a checkpoint is due"),
}


class Standstill(NamedTuple):
    """A fault that ends no process, or a link.

    Attributes:
        fault: what happens.
        reported: what the driver says of it.
        seconds: the time until then, as measured.
        lost: what is lost.
        test: the test that shows it, in `tests/`.
    """

    fault: str
    reported: str
    seconds: str
    lost: str
    test: str


_WHY: Final = "integration/cli/planted/test_why_causes.py::test_process_that_holds_a_run_up_is_named"
_ENDED: Final = "integration/runtime/failures/test_failures.py::test_holder_is_named_and_ended"
_REPLY: Final = "unit/supervision/test_verdicts.py::test_lost_reply_is_that_of_an_idle_worker"
_HOLDS: Final = "nothing if it goes on; `runner.on_hang: restart` ends it, which costs what its death costs"
STANDSTILLS: Final[Sequence[Standstill]] = (
    Standstill("a worker is stopped (SIGSTOP)", "its name", "3.0", _HOLDS, _WHY),
    Standstill("a worker is a zombie", "its name", "2.4", _HOLDS, _ENDED),
    Standstill("an environment hangs", "the worker, its method and frame", "7.7", _HOLDS, _WHY),
    Standstill("native code holds the interpreter's lock", "the worker and its frame", "8.6", _HOLDS, _WHY),
    Standstill("a reply is lost", "the worker that does not run what is waited for", "6.6", _HOLDS, _REPLY),
    Standstill("a rank enters no all-reduce", "that rank, its frame, and those that wait", "6.1", _HOLDS, _WHY),
    Standstill(
        "the link of a node is cut for 4 s",
        "nothing: messages are on their way",
        "-",
        "nothing",
        "cluster/runtime/test_runtime_netns.py::test_link_cut_for_seconds_is_waited_for",
    ),
    Standstill(
        "the link of a node is cut for ever",
        "the node, whose host no longer answers",
        "16 (load 13)",
        "as where that node is lost",
        "cluster/runtime/test_runtime_netns.py::test_a_vanished_host_is_named_with_its_node",
    ),
)


def chosen_faults(names: Sequence[str]) -> tuple[str, ...]:
    """Return the faults that names select, as `kill-worker`, or `kill` for all that begin so; all without names.

    Raises:
        ConfigError: a name selects none.
    """
    chosen: dict[str, None] = {}
    for name in names:
        matching = [fault for fault in FAULTS if fault == name or fault.startswith(f"{name}-")]
        if not matching:
            help = did_you_mean(name, list(FAULTS)) or f"faults: {quoted(list(FAULTS))}"
            raise ConfigError(f"there is no fault `{name}`", help=help)
        chosen.update(dict.fromkeys(matching))
    return tuple(chosen) or tuple(FAULTS)
