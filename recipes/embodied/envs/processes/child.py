"""A simulator process: runs simulations on behalf of an env worker.

    python -m recipes.embodied.envs.processes.child NUMBER COMMANDS ANSWERS LIFELINE MEMORY

The last four are inherited descriptors: pipes for commands and answers, a socket that ends this process with its
worker, and the shared memory. The process imports numpy and what the simulator needs.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from recipes.embodied.envs.observation_keys import INSTRUCTIONS
from recipes.embodied.envs.processes.link import HEAD_BYTES, JsonPipe, Pulse, SharedArrays
from recipes.embodied.envs.processes.simulation_batch import SimulationBatch
from recipes.embodied.envs.processes.simulator import BatchRequest, Start
from recipes.embodied.envs.repeating import SimulatorError
from rlinf_core import ConfigError
from rlinf_core.node import stacks

_CHOICE = "MUJOCO_EGL_DEVICE_ID"


def render_on_own_accelerator() -> None:
    """Make MuJoCo render with EGL on the accelerator of this process's worker.

    By default it takes the first accelerator of the node, because EGL ignores the variable that hides the others. EGL
    lists accelerators in the order of their numbers, followed by other devices. Nothing is chosen if the worker has no
    accelerator or several, if accelerators do not render, or if the job file chooses.
    """
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if os.environ.get("MUJOCO_GL") != "egl" or _CHOICE in os.environ or not own.isdecimal():
        return
    if int(own) < egl_devices():
        os.environ[_CHOICE] = own


def egl_devices() -> int:
    """Return the number of devices that EGL lists; 0 without EGL."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return 0
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    address = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
    if not address:
        return 0
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(address)
    count = ctypes.c_int(0)
    return count.value if query(0, None, ctypes.byref(count)) else 0


# The answer to most steps; a constant object, so that it is encoded only once.
_NOTHING_NEW: Final[Mapping[str, Any]] = {"done": {}}


def end_with(lifeline: int) -> None:
    """Have the kernel kill this process when the other end of a socket is closed, whatever it is doing.

    A waiting thread would not run while a hanging simulator holds the interpreter's lock.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    try:
        gone = os.read(lifeline, 1) == b""  # its worker ended before the signal was set up
    except BlockingIOError:
        gone = False
    if gone:
        os._exit(1)


class SimulatorProcess:
    """The simulations of this process, and the shared memory of their actions and results.

    Args:
        number: the number of this process among those of its worker.
        memory: descriptor of the shared memory.
    """

    def __init__(self, number: int, memory: int) -> None:
        self._memory = memory
        self._pulse = Pulse(mmap.mmap(memory, HEAD_BYTES), number)
        self._batch: SimulationBatch | None = None
        # The instructions that the worker already has, by row.
        self._texts: dict[int, str] = {}

    def answer(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a command and return its answer."""
        result = getattr(self, f"_{command}")(**arguments)
        self._pulse.beat(0, "waiting")
        errors = {} if self._batch is None else self._batch.take_errors()
        if errors:
            return {"done": result, "errors": {self._first + row: [*error] for row, error in errors.items()}}
        return _NOTHING_NEW if result == {} else {"done": result}

    def _make(self, request: list[Any], first: int) -> dict[str, Any]:
        """Make the simulations; `first` is the row of the first one in the arrays."""
        self._first = self._pulse.first_row = first
        self._batch = SimulationBatch(BatchRequest(*request), self._pulse.beat)
        return {**self._batch.facts._asdict(), "spec": asdict(self._batch.facts.spec)}

    def _map(self, size: int, count: int, chunk: int) -> None:
        arrays = SharedArrays(mmap.mmap(self._memory, size), self.batch.facts.spec, count, chunk)
        own = slice(self._first, self._first + len(self.batch.simulations))
        self._actions = arrays.actions[:, own]
        self._outcomes = arrays.outcomes_of(own)
        self._observations = {name: array[own] for name, array in arrays.observations.items()}

    def _reset(self, rows: list[int], starts: list[list[int]]) -> dict[int, str]:
        self.batch.reset([row - self._first for row in rows], [Start(*start) for start in starts])
        return self._observe()

    def _step(self, steps: list[int], ends: bool, observed: bool) -> dict[int, str]:
        """Execute `steps` actions of each environment, fewer if its episode ends, and observe if `observed`."""
        self.batch.step_chunk(self._actions, steps, self._outcomes, ends=ends)
        return self._observe() if observed else {}

    def _observe(self) -> dict[int, str]:
        """Write the observations that have changed; return the changed texts by row."""
        texts: dict[int, str] = {}
        batch = self.batch
        for number in batch.refresh():
            for name, value in batch.row(number).items():
                if name != INSTRUCTIONS:
                    self._observations[name][number] = value
                elif self._texts.get(number) != value:
                    texts[self._first + number] = self._texts[number] = value
        return texts

    def _expert(self) -> bool:
        """Write the actions of the experts into the array of actions; return whether there are experts."""
        actions = self.batch.expert()
        if actions is not None:
            self._actions[0] = actions
        return actions is not None

    @property
    def batch(self) -> SimulationBatch:
        """The simulations; they must have been made."""
        if self._batch is None:
            raise RuntimeError("used before `make`")
        return self._batch

    def close(self) -> None:
        """Release what the simulators hold."""
        if self._batch is not None:
            self._batch.close()


def main(number: int, commands: int, answers: int, lifeline: int, memory: int) -> None:
    """Answer commands until `close`."""
    end_with(lifeline)
    faulthandler.enable()
    stacks.register()
    render_on_own_accelerator()
    # Ctrl-C in a terminal reaches every process; this one ends when its worker tells it to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = JsonPipe(commands, answers)
    process = SimulatorProcess(number, memory)
    while True:
        try:
            command, arguments = pipe.receive()
        except EOFError:
            break
        if command == "close":
            process.close()
            break
        try:
            answer = process.answer(command, arguments)
        except ConfigError as error:
            answer = {"config": [error.message, error.where, error.why, error.help]}
        except SimulatorError as error:
            answer = {"simulator": [error.message, error.why, error.help]}
        except Exception as error:  # noqa: BLE001 - a simulator may raise anything; its worker raises it
            traceback.print_exc()
            answer = {"raised": f"{type(error).__name__}: {error}"}
        pipe.send(answer)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
