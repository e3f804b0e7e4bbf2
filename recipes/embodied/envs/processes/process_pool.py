"""Simulators in separate processes, with the interface of `SimulationBatch`.

An env worker starts them, distributes environments over them, and shares memory with them. They end with it. A process
that dies or hangs is treated as the death of its worker: the error names the process, the environment, and how it
ended.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from recipes.embodied.envs.env_spec import EnvError, EnvSpec, IntArray, Observation
from recipes.embodied.envs.observation_keys import INSTRUCTIONS
from recipes.embodied.envs.processes.link import HEAD_BYTES, MAX_PROCESSES, JsonPipe, Pulse, SharedArrays, memory_bytes
from recipes.embodied.envs.processes.simulator import (
    BatchFacts,
    BatchRequest,
    EpisodeAtDeath,
    Outcomes,
    Start,
    common_spec,
)
from recipes.embodied.envs.repeating import SimulatorError
from recipes.training.arrays import Array
from rlinf_core import ConfigError, WorkerDiedError

_MODULE: Final = "recipes.embodied.envs.processes.child"
_LAST_LINES: Final = 30
# Time limit of a process to exit when told to, and the interval of liveness checks.
_END_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.5
# The least time for the interpreter to start: its imports come before its first sign of life.
_START_SECONDS: Final = 60.0
# Name of a command to a process, and its arguments.
_Command: TypeAlias = tuple[str, Mapping[str, Any]]
# Operations within an episode: a process that dies in one may die in it again.
_OF_EPISODES: Final = frozenset({"resetting", "stepping", "observing"})
_OBSERVE: Final[_Command] = ("observe", {})
_EXPERT: Final[_Command] = ("expert", {})


@lru_cache(maxsize=64)
def _step(steps: tuple[int, ...], ends: bool, observed: bool) -> _Command | None:
    """Return the command to execute actions, or None to rest. Most commands equal the previous one, whose object is
    reused.
    """
    return ("step", {"steps": steps, "ends": ends, "observed": observed}) if any(steps) else None


class SimulatorDiedError(WorkerDiedError):
    """A simulator process exited, or did not respond and was killed.

    A run treats it as the death of the worker, which is replaced up to `runner.max_restarts` times.

    Attributes:
        row: the row of the environment that it was stepping; None if it was stepping none.
        episode: the episode there, if one was under way.
    """

    code = "simulator-died"

    def __init__(self, address: str, *, cause: str, row: int | None = None) -> None:
        super().__init__(address, cause=cause)
        self.row = row
        self.episode: EpisodeAtDeath | None = None


class SimulatorProcesses:
    """The simulations of a batch, distributed over processes.

    Args:
        request: the description of the batch.
        processes: the number of processes.
        seconds: time limit of one operation of one environment.
        owner: the worker, as in `EnvGroup:0`, for errors.

    Raises:
        ConfigError: the simulator or the task is not available, or an option is wrong.
        SimulatorDiedError: a process died while it made its simulations.
    """

    def __init__(self, request: BatchRequest, processes: int, seconds: float, owner: str) -> None:
        count = len(request.groups)
        processes = min(processes, count, MAX_PROCESSES)
        bounds = [number * count // processes for number in range(processes + 1)]
        self._memory = os.memfd_create("rlinf-simulators", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, HEAD_BYTES)
        self._children: list[_Child] = []
        try:
            for number, (first, stop) in enumerate(pairwise(bounds)):
                child = _Child(number, processes, range(first, stop), self._memory, seconds, owner, request.task)
                self._children.append(child)
                child.send(("make", {"request": [*request[:3], list(request.groups[first:stop])], "first": first}))
            self._map([child.done() for child in self._children], request.task, count)
        except BaseException:
            self.close()
            raise

    def _map(self, made: list[dict[str, Any]], task: str, count: int) -> None:
        """Receive the facts that the processes report, and map shared memory of that size."""
        first = BatchFacts(**made[0])
        limits = [reply["max_episode_steps"] for reply in made if reply["max_episode_steps"] is not None]
        faults = [fault for reply in made for fault in reply["start_faults"] or ()]
        self.facts = first._replace(
            spec=common_spec([EnvSpec.of_plain(reply["spec"]) for reply in made], task),
            max_episode_steps=min(limits, default=None),
            tasks=[task for reply in made for task in reply["tasks"]],
            start_faults=None if first.start_faults is None else list(dict.fromkeys(faults)),
        )
        self._texts = np.array([""] * count)
        # Processes whose environments have changed since the last observation.
        self._unseen = set(range(len(self._children)))
        # Results of actions that were executed before `step` asks for them.
        self._ahead: deque[Outcomes] = deque()
        self._make_room(1)

    def _make_room(self, chunk: int) -> None:
        """Map memory for this many actions of each environment."""
        spec, count = self.facts.spec, len(self.facts.tasks)
        size = memory_bytes(spec, count, chunk)
        os.ftruncate(self._memory, size)
        self._arrays = SharedArrays(mmap.mmap(self._memory, size), spec, count, chunk)
        self._all([("map", {"size": size, "count": count, "chunk": chunk})] * len(self._children))

    def reset(self, rows: Sequence[int], starts: Sequence[Start]) -> None:
        """Begin episodes."""
        self._ahead.clear()
        by_row = dict(zip(rows, starts, strict=True))
        dealt = self._dealt(rows)
        self._look(
            [("reset", {"rows": mine, "starts": [by_row[row] for row in mine]}) if mine else None for mine in dealt]
        )

    def step(self, rows: Sequence[int] | None, actions: Array, *, observed: bool = False) -> Outcomes:
        """Carry out actions; see `SimulationBatch`."""
        if not self._ahead:
            counts = [int(rows is None)] * len(actions)
            for row in rows or ():
                counts[row] = 1
            self._carry_out(actions[:, None], counts, ends=True, observed=observed)
        return self._ahead.popleft()

    def foresee(self, actions: Array, steps: IntArray, *, ends: bool) -> None:
        """Execute a chunk now, with one message per process instead of one per action."""
        self._carry_out(actions, steps.tolist(), ends=ends, observed=True)

    def _carry_out(self, actions: Array, counts: list[int], *, ends: bool, observed: bool) -> None:
        chunk = actions.shape[1]
        if len(self._arrays.actions) < chunk:
            self._make_room(chunk)
        self._arrays.actions[:chunk] = actions.swapaxes(0, 1)
        if chunk > 1 or 0 in counts:
            self._arrays.clear_outcomes()
        rows = [child.rows for child in self._children]
        commands = [_step(tuple(counts[own.start : own.stop]), ends, observed) for own in rows]
        if observed:
            self._look(commands)
        else:
            self._unseen.update(number for number, command in enumerate(commands) if command)
            self._all(commands)
        self._ahead = deque(self._arrays.outcomes[:chunk])

    def observe(self) -> Observation:
        """Return the present observations, new arrays."""
        if self._unseen:
            self._look([_OBSERVE if number in self._unseen else None for number in range(len(self._children))])
        observation: Observation = {name: array.copy() for name, array in self._arrays.observations.items()}
        if self.facts.spec.has_instructions:
            observation[INSTRUCTIONS] = self._texts.copy()
        return observation

    def take_errors(self) -> dict[int, EnvError]:
        """See `SimulationBatch`."""
        errors: dict[int, EnvError] = {}
        for child in self._children:
            if child.errors:
                errors |= child.errors
                child.errors.clear()
        return errors

    def expert(self) -> Array | None:
        """Return the actions of the experts; see `SimulationBatch`."""
        available = self._all([_EXPERT] * len(self._children))
        return self._arrays.actions[0].copy() if all(available) else None

    def pictures(self, rows: Sequence[int]) -> None:
        """Return None: simulators in separate processes are recorded only through cameras."""

    def close(self) -> None:
        """End all processes. May be called twice."""
        for child in self._children:
            child.begin_to_end()
        for child in self._children:
            child.end()
        self._children.clear()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _dealt(self, rows: Sequence[int]) -> list[list[int]]:
        return [[row for row in rows if row in child.rows] for child in self._children]

    def _look(self, commands: Sequence[_Command | None]) -> None:
        """Send every process its command; the answers are the changed instructions."""
        answers = self._all(commands)
        if self._unseen:
            self._unseen.difference_update(number for number, command in enumerate(commands) if command)
        if any(answers):
            texts = {row: text for changed in answers for row, text in changed.items()}
            kept = self._texts.tolist()
            for row, text in texts.items():
                kept[int(row)] = text
            self._texts = np.array(kept)

    def _all(self, commands: Sequence[_Command | None]) -> list[Any]:
        """Send every process its command, if any, and return the answers."""
        for child, command in zip(self._children, commands, strict=True):
            if command:
                child.send(command)
        return [child.done() for child, command in zip(self._children, commands, strict=True) if command]


def _code_folders() -> list[str]:
    """Return the source folders of code that is not installed.

    A simulator process finds installed packages through its interpreter. A worker's path ends with the packages of the
    driver's interpreter, which may have other versions of the simulator's dependencies.
    """
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return [
        folder
        for folder in sys.path
        if folder and folder not in installed and not {"site-packages", "lib-dynload"} & set(Path(folder).parts)
    ]


class _Child:
    """One simulator process.

    Args:
        number: its number among the `count` processes of its worker.
        count: the number of them.
        rows: the rows of its environments in the batch.
        memory: descriptor of the shared memory.
        seconds: time limit of one operation of one environment.
        owner: the worker.
        task: the simulated task, for errors.

    Attributes:
        errors: the errors of episodes that it has reported, by row.
    """

    def __init__(
        self, number: int, count: int, rows: range, memory: int, seconds: float, owner: str, task: str
    ) -> None:
        self.rows = rows
        self.errors: dict[int, EnvError] = {}
        self._seconds, self._owner = seconds, owner
        last = rows.stop - 1
        environments = f"environments {rows.start}-{last}" if len(rows) > 1 else f"environment {last}"
        self._name = f"simulator process {number + 1} of {count} (`{task}`, {environments} of its batch)"
        commands, sending = os.pipe()
        receiving, answers = os.pipe()
        self._lifeline, other = socket.socketpair()
        self._pipe = JsonPipe(receiving, sending, min(_LOOK_SECONDS, seconds))
        descriptors = (commands, answers, other.fileno(), memory)
        with FileIO(commands), FileIO(answers, "w"), other:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-u", "-m", _MODULE, str(number), *map(str, descriptors)),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_code_folders())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
            )
        self._pulse = Pulse(mmap.mmap(memory, HEAD_BYTES), number)
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._reader = threading.Thread(target=self._read, name=f"simulator-{number}", daemon=True)
        self._reader.start()

    def send(self, command: _Command) -> None:
        """Give a command."""
        try:
            self._pipe.send(command)
        except OSError:
            raise self._death() from None

    def done(self) -> Any:
        """Return the answer to the last command.

        Raises:
            ConfigError: the process rejects its settings.
            SimulatorError: the simulator raised an exception, and so did the new one.
            SimulatorDiedError: the process has exited, or gave no sign of life in time.
        """
        pulse, since = None, 0.0
        while (answer := self._answer()) is None:
            now = self._pulse.read()
            if now != pulse:
                pulse, since = now, time.monotonic()
            elif time.monotonic() - since > (self._seconds if now[0] else max(self._seconds, _START_SECONDS)):
                raise self._silence()
        return self._result(answer)

    def _answer(self) -> Mapping[str, Any] | None:
        """Return the next answer; None if it has not arrived yet."""
        try:
            return self._pipe.receive()
        except EOFError:
            raise self._death() from None

    def _result(self, answer: Mapping[str, Any]) -> Any:
        if "config" in answer:
            message, where, why, help = answer["config"]
            raise ConfigError(message, where=where, why=why, help=help)
        if "simulator" in answer:
            message, why, help = answer["simulator"]
            raise SimulatorError(f"{self._name}: {message}", where=self._owner, why=why, help=help)
        if "raised" in answer:
            raise SimulatorError(
                f"{self._name} raised {answer['raised']}",
                where=self._owner,
                why=self._place,
                help="the log of the worker has its traceback",
            )
        if "errors" in answer:
            self.errors |= {int(row): EnvError(*error) for row, error in answer["errors"].items()}
        return answer["done"]

    def _death(self) -> SimulatorDiedError:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join(_END_SECONDS)
        if code < 0:
            cause = f"signal {-code} ({signal.Signals(-code).name})"
        else:
            cause = f"it ended with exit code {code}"
        return self._died(f"{cause}, {self._place}")

    def _silence(self) -> SimulatorDiedError:
        """Kill an unresponsive process, and return the error about it."""
        place = self._place
        # SIGABRT makes the interpreter print its stack, even while it runs the simulator's native code.
        self._process.send_signal(signal.SIGABRT)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_END_SECONDS)
        return self._died(f"no response for {self._seconds:g} s, {place}: it was killed")

    def _died(self, cause: str) -> SimulatorDiedError:
        _, row, operation = self._pulse.read()
        at = row if operation in _OF_EPISODES else None
        return SimulatorDiedError(self._owner, cause=f"{self._name}: {cause}{self._last_words}", row=at)

    @property
    def _place(self) -> str:
        _, row, operation = self._pulse.read()
        return operation if operation in ("starting", "waiting") else f"{operation} environment {row}"

    @property
    def _last_words(self) -> str:
        return "; its last words:\n" + "\n".join(f"    {line}" for line in self._said) if self._said else ""

    def _read(self) -> None:
        output = self._process.stdout
        assert output is not None
        for line in output:
            text = line.decode(errors="replace").rstrip()
            self._said.append(text)
            print(text, file=sys.stderr)

    def begin_to_end(self) -> None:
        """Ask the process to end."""
        with suppress(OSError):
            self._pipe.send(("close", {}))

    def end(self) -> None:
        """Wait for the process to exit, and kill it if it does not."""
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lifeline.close()
        self._pipe.close()
        self._reader.join(_END_SECONDS)
