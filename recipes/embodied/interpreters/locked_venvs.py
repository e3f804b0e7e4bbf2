"""Interpreters for simulators: virtual environments created from lock files that come with rlinf.

Simulators need incompatible versions of MuJoCo and numpy, so that each gets its own interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.env_config import stepping
from recipes.embodied.config.env_types import ENV_TYPES, has_setup, is_simulator
from recipes.embodied.envs.simulators.packages import LOCKS
from recipes.embodied.interpreters.simulators_at_once import ProbeRequest
from recipes.embodied.rules.env_rules import facts_of
from rlinf_core import ConfigError, RLinfError
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.job.recipe import Trial

DEFAULT_FOLDER: Final = Path("~/.rlinf/envs")
# The file that names the environment type of a folder.
_MARK: Final = "rlinf-env.json"
# Variables that would lead an interpreter to other packages, or contradict `MUJOCO_GL`.
NOT_PASSED: Final = ("PYTHONPATH", "PYTHONHOME", "PYOPENGL_PLATFORM")
_INSTALL_SECONDS: Final = 3600
# Seconds between progress lines about an installation, and lines of output in an error.
_TELL_SECONDS: Final = 15.0
_LAST_LINES: Final = 8
_PROBE_SECONDS: Final = 600.0
PROBE: Final = "recipes.embodied.interpreters.simulator_probe"
# Renderers that work without a display, the faster one first.
_RENDERERS: Final = ("egl", "osmesa")

Emit = Callable[[str], None]


class SetupError(RLinfError):
    """An interpreter for a simulator cannot be made, or cannot run the simulator."""


class Made(NamedTuple):
    """An interpreter for a simulator.

    Attributes:
        env_type: the environment type.
        python: the path of the interpreter.
        facts: the report of `simulator_probe`.
        renderer: the value of `MUJOCO_GL` with which it renders; None: it cannot render.
    """

    env_type: str
    python: Path
    facts: dict[str, Any]
    renderer: str | None


def simulators() -> list[str]:
    """Return the environment types that get their own interpreter."""
    return [name for name in ENV_TYPES if has_setup(name)]


def setup(env_type: str, folder: Path | None, emit: Emit) -> Made:
    """Create an interpreter for a simulator, install its lock file and this rlinf, and test it.

    Args:
        env_type: one of `simulators`.
        folder: the virtual environment; by default `~/.rlinf/envs/ENV_TYPE`. An existing one for this type is updated.
        emit: receives progress lines.

    Raises:
        ConfigError: there is no such type.
        SetupError: the folder has other contents, a command failed, or the simulator does not run.
    """
    if env_type not in simulators():
        from rlinf_core.suggest import did_you_mean, quoted

        installable = simulators()
        help = did_you_mean(env_type, installable) or f"known: {quoted(installable)}"
        raise ConfigError(f"`rlinf venv setup` does not support `{env_type}`", help=help)
    folder = (folder or DEFAULT_FOLDER / env_type).expanduser().absolute()
    python = folder / "bin" / "python"
    _check_folder(folder, env_type)
    pip = _installer(folder, python, emit)
    (folder / _MARK).write_text(json.dumps({"env_type": env_type}) + "\n", encoding="utf-8")
    lock = LOCKS / f"{env_type}.txt"
    count = sum(1 for line in lock.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    emit(f"installing {count} packages of {lock.name}; takes minutes the first time")
    _run([*pip, "--requirement", str(lock), *_same_ray()], emit)
    emit("installing rlinf")
    _run([*pip, "--no-deps", *own_requirement()], emit)
    return checked(env_type, python, emit)


def checked(env_type: str, python: Path, emit: Emit) -> Made:
    """Try a simulator in an interpreter, with each renderer until one works.

    Raises:
        SetupError: the simulator does not run there.
    """
    chosen = os.environ.get("MUJOCO_GL")
    facts: dict[str, Any] = {}
    for renderer in (chosen,) if chosen else _RENDERERS:
        emit(f"testing `{env_type}`, rendering with MUJOCO_GL={renderer}")
        facts = probe(env_type, python, {"MUJOCO_GL": renderer})
        if "fault" in facts:
            fault = facts["fault"]
            raise SetupError(
                f"`{python}` cannot run `{env_type}`: {fault['message']}", why=fault["why"], help=fault["help"]
            )
        if "frame" in facts:
            return Made(env_type, python, facts, renderer)
    return Made(env_type, python, facts, None)


def probe(env_type: str, python: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Return the report of `simulator_probe` in an interpreter, with additional environment variables."""
    command = [str(python), "-P", "-m", PROBE, env_type]
    environment = {name: value for name, value in os.environ.items() if name not in NOT_PASSED}
    why = ""
    try:
        done = subprocess.run(
            command,
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
        error_lines = done.stderr.strip().splitlines()
        why = error_lines[-1] if error_lines else f"exit code {done.returncode}"
        return load_json_object(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        why = f"no response within {_PROBE_SECONDS:g} s"
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, IndexError):
        pass
    return {"fault": {"message": "it cannot be queried", "why": why, "help": f"run `{' '.join(command)}` to see more"}}


def lines_of(made: Made) -> str:
    """Return the lines of a job file that run env workers in an interpreter."""
    renderer = f"\n          env_vars: [{{MUJOCO_GL: {made.renderer}}}]" if made.renderer else ""
    return f"""cluster:
  component_placement:
    env: {{node_group: {made.env_type}, placement: 0}}
  node_groups:
    - label: {made.env_type}
      node_ranks: 0
      env_configs:
        - node_ranks: 0
          python_interpreter_path: {json.dumps(str(made.python))}{renderer}
env:
  train: {{env_type: {made.env_type}, task: {ENV_TYPES[made.env_type].task}}}"""


def trials(config: EmbodiedConfig) -> list[Trial]:
    """Return the checks of `rlinf doctor`: a configuration's simulators, as many at once as an env worker holds, and a
    rendered frame if it uses images.
    """
    wanted: dict[str, ProbeRequest] = {}
    evaluates = config.runner.val_check_interval > 0 or config.runner.only_eval
    for environments in (config.env.train, config.env.eval):
        kind = environments.env_type
        if not is_simulator(kind):
            continue
        request = wanted.get(kind, ProbeRequest(frame=False, task=environments.task, options=environments.options))
        batches = list(request.batches)
        if environments is config.env.train or evaluates:
            stages = config.rollout.pipeline_stage_num
            number = stepping(environments).num_processes
            processes = 1 if number is None else max(1, number)
            batches += [(environments.total_num_envs // stages, processes)] * stages
        frame = request.frame or facts_of(config, environments).has_images is not False
        options = environments.options if frame and not request.frame else request.options
        wanted[kind] = request._replace(frame=frame, options=options, batches=batches)
    return [
        Trial("env", "simulator", PROBE, (kind, json.dumps(request._asdict())), _PROBE_SECONDS, each_process=True)
        for kind, request in wanted.items()
    ]


def own_requirement() -> list[str]:
    """Return the pip requirement of this rlinf: its folder, editable, when it runs from one; else its version."""
    root = Path(__file__).resolve().parents[3]
    if (root / "pyproject.toml").is_file():
        return ["--editable", str(root)]
    distribution = metadata.distribution("rlinf-cli")
    url = json.loads(distribution.read_text("direct_url.json") or "{}").get("url")
    return [f"rlinf-cli @ {url}" if url else f"rlinf-cli=={distribution.version}"]


def _check_folder(folder: Path, env_type: str) -> None:
    mark = folder / _MARK
    if mark.is_file():
        try:
            marked = load_json_object(mark.read_bytes())["env_type"]
        except (ValueError, KeyError, OSError):
            marked = None
        if marked == env_type:
            return
        raise SetupError(f"`{folder}` was made for `{marked}`", help="give another folder with `--path`")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SetupError(
            f"`{folder}` exists and was not created by `rlinf venv setup`",
            help="give another folder with `--path`, or remove it",
        )


def _installer(folder: Path, python: Path, emit: Emit) -> list[str]:
    """Create the virtual environment if it does not exist; return the command that installs into it."""
    uv = shutil.which("uv")
    if not python.exists():
        emit(f"making `{folder}`")
        how = [uv, "venv", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        _run([*how, str(folder)], emit)
    if uv:
        return [uv, "pip", "install", "--python", str(python)]
    return [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def _same_ray() -> list[str]:
    """Return the requirement of Ray in this interpreter's version, which all workers of a cluster must share."""
    try:
        return [f"ray=={metadata.version('ray')}"]
    except metadata.PackageNotFoundError:
        return []


def _run(command: Sequence[str], emit: Emit) -> None:
    """Run a command to its end; its latest output is reported at intervals.

    Raises:
        SetupError: the command failed, or did not end in time.
    """
    said: deque[str] = deque(maxlen=_LAST_LINES)
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise SetupError(f"`{command[0]}` cannot be run", why=error.strerror) from error
    with process:
        assert process.stdout is not None
        lines = (text for line in process.stdout if (text := line.strip()))
        reader = threading.Thread(target=said.extend, args=(lines,), daemon=True)
        reader.start()
        while process.poll() is None:
            try:
                process.wait(_TELL_SECONDS)
            except subprocess.TimeoutExpired:
                seconds = time.monotonic() - began
                emit(f"{seconds:.0f} s: {said[-1][:100] if said else 'nothing was said yet'}")
                if seconds > _INSTALL_SECONDS:
                    process.kill()
                    raise SetupError(f"`{' '.join(command)}` did not end within {_INSTALL_SECONDS} s") from None
        reader.join()
    if process.returncode:
        raise SetupError(f"`{' '.join(command)}` failed", why="\n".join(said) or f"exit code {process.returncode}")
