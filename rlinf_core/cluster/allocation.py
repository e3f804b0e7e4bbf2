"""One process on one node: with the interpreter and the environment of that node, checked before Ray is asked.

Ray waits without end for an interpreter that does not exist or lacks ray, and for an environment that does not
fit in one argument of a process. Both are therefore found here first.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from typing import Any

from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.errors import ClusterError

# Ray hands the whole runtime_env over in one argument, and Linux refuses one of more than 128 KiB.
MAX_ENVIRONMENT_BYTES = 64 * 1024
_PREFLIGHT_SECONDS = 60.0
_PREFLIGHT = "import json, sys, ray, rlinf_core; print(json.dumps([*sys.version_info[:2], ray.__version__]))"


def runtime_env(variables: Mapping[str, str], interpreter: str | None, where: str) -> dict[str, Any] | None:
    """Ray's runtime_env for a node's variables and interpreter; None when the node declares nothing.

    Args:
        variables: as declared for the node; Ray expands `${PATH}` and the like on the node itself.
        interpreter: absolute path, or None for the one that Ray was started with.
        where: what this is for, for the error.

    Raises:
        ClusterError: the variables are too large to reach a process.
    """
    size = sum(len(name) + len(value.encode()) + 8 for name, value in variables.items())
    if size > MAX_ENVIRONMENT_BYTES:
        largest = max(variables, key=lambda name: len(variables[name]))
        raise ClusterError(
            f"the environment variables take {size} bytes, a process can be given {MAX_ENVIRONMENT_BYTES}",
            where=where,
            help=f"shorten them; the largest is `{largest}` with {len(variables[largest].encode())} bytes",
        )
    env: dict[str, Any] = {}
    if variables:
        env["env_vars"] = dict(variables)
    if interpreter:
        # Ray puts it into a shell command as it is.
        env["py_executable"] = shlex.quote(interpreter)
    return env or None


def check_interpreter(path: str) -> str | None:
    """Return what keeps `path` on this machine from running workers of this process's Ray, or None when nothing does.

    Its Python must be the same minor version, its ray the same version, and it must find rlinf.
    """
    import sys

    ray = ray_api()

    try:
        done = subprocess.run(
            [path, "-c", _PREFLIGHT], capture_output=True, text=True, timeout=_PREFLIGHT_SECONDS, check=False
        )
    except FileNotFoundError:
        return "it does not exist"
    except PermissionError:
        return "it may not be executed"
    except OSError as error:
        return f"it cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it did not answer within {_PREFLIGHT_SECONDS:g} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"it ended with exit code {done.returncode}"
    *python, version = json.loads(done.stdout.splitlines()[-1])
    if python != list(sys.version_info[:2]):
        return f"it is Python {'.'.join(map(str, python))}, Ray runs on {sys.version_info[0]}.{sys.version_info[1]}"
    if version != ray.__version__:
        return f"it has ray {version}, the cluster runs {ray.__version__}"
    return None
