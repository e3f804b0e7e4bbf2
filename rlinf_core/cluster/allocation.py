"""The command that starts a process on a node: its interpreter and variables, checked before Ray is asked.

Ray waits forever for an interpreter that does not exist or lacks ray, and for an environment that does not fit in one
process argument. It also expands `$NAME` in variables, and inherits those of a launching worker. So the whole
environment is written to a file on the node, which `node/node_env.py` reads there.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_core.cluster.ray_api import ray_api, session_folder
from rlinf_core.errors import ClusterError
from rlinf_core.node import node_env
from rlinf_core.node.node_facts import WITHOUT_WORKING_FOLDER
from rlinf_core.placement.environment import PATH_LISTS
from rlinf_core.waiting import stretched

# Linux rejects a string of more than 128 KiB; this leaves room for everything else.
MAX_ENVIRONMENT_BYTES = 64 * 1024
_PREFLIGHT_SECONDS = 60.0
_PREFLIGHT = (
    WITHOUT_WORKING_FOLDER + "import json, ray, rlinf_core; print(json.dumps([*sys.version_info[:2], ray.__version__]))"
)


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    """The interpreter and the variables of a process, as sent to its node.

    Without an interpreter, Ray's own is used. Variables are pairs, exactly as in the process.
    """

    interpreter: str | None
    variables: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, variables: Mapping[str, str], interpreter: str | None, where: str) -> ProcessCommand | None:
        """Return the command for variables and an interpreter; None if there are neither.

        Raises:
            ClusterError: the variables are too large for a process.
        """
        size = sum(len(name) + len(value.encode()) + 2 for name, value in variables.items())
        if size > MAX_ENVIRONMENT_BYTES:
            largest = max(variables, key=lambda name: len(variables[name]))
            raise ClusterError(
                f"the environment variables take {size} bytes, the limit for a process is {MAX_ENVIRONMENT_BYTES}",
                where=where,
                help=f"shorten them; the largest is `{largest}` with {len(variables[largest].encode())} bytes",
            )
        if not variables and interpreter is None:
            return None
        return cls(interpreter, tuple(variables.items()))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A node's answer to a command: what Ray is to run in place of its own Python, or the error."""

    executable: str
    fault: str | None = None


def prepare(command: ProcessCommand) -> Prepared:
    """Write the environment of a command to a private file on this node, and check its interpreter."""
    interpreter = command.interpreter or sys.executable
    words = [interpreter]
    if command.variables:
        variables = dict(command.variables)
        lists = [name for name in variables if name in PATH_LISTS]
        path = node_env.write(session_folder(), {"interpreter": interpreter, "env": variables, "prepended": lists})
        words = node_env.command(sys.executable, path)
    fault = _fault_of(words) if command.interpreter is not None else None
    return Prepared(shlex.join(words), fault)


def _fault_of(words: list[str]) -> str | None:
    """Return why an interpreter cannot run workers of this node's Ray, or None if it can.

    Its Python must be the same minor version, its ray the same version, and it must find rlinf.
    """
    ray, seconds = ray_api(), stretched(_PREFLIGHT_SECONDS)
    try:
        done = subprocess.run(
            [*words, "-c", _PREFLIGHT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError:
        return "it does not exist"
    except PermissionError:
        return "it is not executable"
    except OSError as error:
        return f"it cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it did not answer within {seconds:g} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"it ended with exit code {done.returncode}"
    *python, version = json.loads(done.stdout.splitlines()[-1])
    if python != list(sys.version_info[:2]):
        return f"it is Python {'.'.join(map(str, python))}, Ray runs on {sys.version_info[0]}.{sys.version_info[1]}"
    if version != ray.__version__:
        return f"it has ray {version}, the cluster runs {ray.__version__}"
    return None


def runtime_env(prepared: Prepared | None, *, in_worker: bool) -> dict[str, Any] | None:
    """Return Ray's runtime_env of a process; without a command that of Ray's own Python in the node's environment.

    Otherwise Ray would inherit the environment of a launching worker.
    """
    if prepared is not None:
        # Ray inserts it unquoted into a shell command.
        return {"py_executable": prepared.executable}
    return {"py_executable": ""} if in_worker else None
