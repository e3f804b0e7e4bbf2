"""Requests to a node: the agent's source and the request are sent over standard input; lines of JSON come back.

`archive` packs the code that `--sync` sends, and `run_on_head` runs the driver of another machine's user.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from rlinf_cli.cluster.inventory import NodeTarget, recorded_targets
from rlinf_cli.cluster.node import node_agent
from rlinf_cli.cluster.transport import CommandOutcome, CommandResult, Transport, ssh_arguments, ssh_environment
from rlinf_core import env_vars
from rlinf_core.errors import ClusterError, ConfigError
from rlinf_core.foreign.strict_json import load_json
from rlinf_core.node.cluster_records import ClusterRecord
from rlinf_core.suggest import clipped

# The agent only needs the source of this module.
QUESTIONS: Final = "rlinf_cli.cluster.node.questions"
# The modules of the agent, in import order.
PARTS: Final = (
    "rlinf_core.foreign.strangers",
    "rlinf_core.process.proc",
    "rlinf_core.process.proc",
    "rlinf_core.node.node_env",
    "rlinf_core.node.node_facts",
    "rlinf_core.node.device_claims",
    QUESTIONS,
    "rlinf_cli.cluster.node.node_probe",
    "rlinf_cli.cluster.node.node_ray",
    "rlinf_cli.cluster.node.node_agent",
)
# The packages of these modules, each after its parent.
_PACKAGES: Final = sorted(
    {".".join(names[:depth]) for names in (part.split(".") for part in PARTS) for depth in range(1, len(names))}
)
# The message of the loader if no number precedes the program.
_TAKEN: Final = "rlinf: a login script of this machine, such as ~/.bashrc, read the standard input of the command"
_LOADER: Final = (
    'import sys;b=sys.stdin.buffer;n=next((l for l in b if l.strip()),b"").strip();'
    f'n.isdigit() or sys.exit("{_TAKEN}");exec(b.read(int(n)))'
)
# Empty lines for login scripts that read a few lines of standard input, such as an answer to a question.
_SPARE_LINES: Final = b"\n" * 16
_CARRIER: Final = """\
sys.path[:] = [p for p in sys.path if p]
import types
if sys.version_info < (3, 8):
    print('{{"event": "error", "message": "its Python is %d.%d, rlinf needs 3.11 or newer"}}' % sys.version_info[:2])
    sys.exit(1)
parts = {parts!r}
for name in {packages!r}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, source in parts:
    module = sys.modules[name] = types.ModuleType(name)
    package, _, own = name.rpartition('.')
    setattr(sys.modules[package], own, module)
    if name == {questions!r}:
        module.__source__ = source
    else:
        exec(compile(source, name, 'exec'), module.__dict__)
sys.exit(sys.modules[{agent!r}].{main}())
"""
_MISSING: Final = frozenset((126, 127))


class AgentReply(NamedTuple):
    """A node's reply to a request.

    Attributes:
        message: the error, empty on success.
        rc: the exit code of the failed command, if any.
        lines: the last lines of the failed command.
    """

    data: dict[str, Any] | None
    message: str
    why: str
    help: str
    rc: int | None
    lines: str
    result: CommandResult


def path_of(part: str) -> Path:
    """Return the file of a part."""
    spec = find_spec(part)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module named {part!r}", name=part)
    return Path(spec.origin)


@cache
def source(main: str = "main") -> bytes:
    """Return the loader's input: a program that makes the parts modules under their own names and calls `main`."""
    parts = [(name, path_of(name).read_text(encoding="utf-8")) for name in PARTS]
    text = _CARRIER.format(parts=parts, packages=_PACKAGES, questions=QUESTIONS, agent=PARTS[-1], main=main).encode()
    return b"%s%d\n%s" % (_SPARE_LINES, len(text), text)


def command(interpreter: str) -> list[str]:
    """Return the command that runs the agent from standard input on a node."""
    return [interpreter, "-c", _LOADER]


def script(request: dict[str, Any]) -> bytes:
    """Return the agent's input: its source, and the request."""
    return source() + json.dumps(request).encode() + b"\n"


async def ask(
    transport: Transport,
    node: NodeTarget,
    request: dict[str, Any],
    *,
    deadline: float,
    interpreter: str | None = None,
    on_hello: Callable[[], None] | None = None,
) -> AgentReply:
    """Send `request` to `node` and return the reply; no failure of a node raises.

    Args:
        request: a verb of the agent and its arguments, as JSON data.
        deadline: the seconds, from the start of its turn, after which the node counts as silent.
        interpreter: the interpreter to use instead of the node's.
        on_hello: called once the agent runs.
    """

    def line(text: bytes) -> None:
        if on_hello is not None and b'"hello"' in text:
            on_hello()

    path = interpreter or node.interpreter
    # Built at this node's turn, because a thousand scripts at once would fill the memory.
    async with transport.turns or nullcontext():
        result = await transport.run(node, command(path), script(request), deadline=deadline, on_line=line)
    return _understood(node, path, result, deadline)


def _understood(node: NodeTarget, interpreter: str, result: CommandResult, deadline: float) -> AgentReply:
    events = list(_events(result.stdout))
    last = events[-1] if events else {}
    if last.get("event") == "result":
        last.pop("event")
        return AgentReply(last, "", "", "", 0, "", result)
    if last.get("event") == "error":
        message, why, hint, lines = (clipped(str(last.get(name) or "")) for name in ("message", "why", "help", "lines"))
        rc = last.get("rc")
        return AgentReply(None, message, why, hint, rc if isinstance(rc, int) else None, lines, result)
    return _unanswered(node, interpreter, result, deadline, spoke=bool(events))


def _unanswered(
    node: NodeTarget, interpreter: str, result: CommandResult, deadline: float, *, spoke: bool
) -> AgentReply:
    """Return the reply for a node that gave none; `spoke` says whether its agent ran."""
    spoken = result.last_lines()

    def reply(message: str, why: str, help: str, rc: int | None = result.rc) -> AgentReply:
        return AgentReply(None, message, why, help, rc, spoken, result)

    if _TAKEN.encode() in result.stderr:
        why = "a script that it runs at the login, such as ~/.bashrc or ~/.profile, reads it"
        help = "let the script read only where the shell is interactive: `case $- in *i*) ...;; esac`"
        return reply("the login shell took the standard input of the command", why, help)
    if result.kind is CommandOutcome.TIMEOUT:
        silent = f"`{interpreter}`, or a script of the login shell before it, printed nothing"
        why = "it connected, but then sent nothing" if spoke else silent
        return reply(f"no answer within {deadline:g} s", why, result.help or f"try `{interpreter} -V` there", None)
    if result.kind is not CommandOutcome.DONE:
        # The lines before ssh's last are banners and warnings.
        return reply(str(result.kind), result.last_lines(1).strip(), result.help or "")
    if result.rc in _MISSING:
        help = (
            "install Python there, or set `python_interpreter_path` for the node's group; by default it is the path of"
            " the interpreter that runs `rlinf` here"
        )
        problem = "is not executable" if result.rc == 126 else "does not exist"
        declared = "correct `python_interpreter_path`"
        return reply(
            f"the interpreter `{interpreter}` {problem}", spoken, declared if node.declared_interpreter else help
        )
    message = "the agent ended without an answer" if spoke else f"`{interpreter}` cannot run the agent"
    help = "`python_interpreter_path` must be a Python 3.11 or newer"
    return reply(message, f"it ended with exit code {result.rc}", help)


def _events(output: bytes) -> list[dict[str, Any]]:
    """Return the agent's events, ignoring other lines, which login scripts may print."""
    events: list[dict[str, Any]] = []
    for line in output.splitlines():
        try:
            data = load_json(line)
        except ValueError:
            continue
        if isinstance(data, dict) and "event" in data:
            events.append(cast("dict[str, Any]", data))
    return events


_SYNCED: Final = ("rlinf_core", "rlinf_cli", "recipes", "configs")
_SKIPPED: Final = frozenset(("__pycache__", ".git", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache"))
# Limits of the archive, which is sent to every node from memory and must hold code, not data.
_MOST_BYTES: Final = 64 * 2**20
_MOST_FILES: Final = 20_000


def archive(folder: Path) -> str:
    """Return the archive of `--sync FOLDER` as text: rlinf's packages, overlaid with the content of `folder`.

    Both are at the archive's root, which the nodes put first on PYTHONPATH. Links are followed, caches skipped.

    Raises:
        ConfigError: there is no such folder, or it is too large to be code.
    """
    if not folder.is_dir():
        raise ConfigError(f"`{folder}` is not a folder", help="`--sync` takes a folder to import Python code from")
    files: dict[str, Path] = {}
    for package in _SYNCED:
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            files.update((f"{package}/{name}", path) for name, path in _files(Path(root)))
    files.update(_files(folder))
    size = sum(path.stat().st_size for path in files.values())
    if size > _MOST_BYTES or len(files) > _MOST_FILES:
        raise ConfigError(
            f"`{folder}` is too large to be copied: {len(files)} files, {size >> 20} MiB",
            why=f"`--sync` is for code: at most {_MOST_FILES} files and {_MOST_BYTES >> 20} MiB",
            help="name a folder with code only, and put data on shared storage",
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as packed:
        for name, path in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = path.stat().st_size
            entry.mode = 0o700 if os.access(path, os.X_OK) else 0o600
            with path.open("rb") as file:
                packed.addfile(entry, file)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files below a folder, with their paths relative to it."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in names:
            path = Path(folder) / name
            if not name.endswith(".pyc") and path.is_file():
                yield path.relative_to(root).as_posix(), path


_SSH_FAILED: Final = 255
# Seconds for a driver to end when asked (see `node_agent.drive`), plus latency.
_END_SECONDS: Final = 45.0


def run_on_head(
    record: ClusterRecord,
    arguments: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
) -> int:
    """Run `python ARGUMENTS` in the login's home on the head with its own interpreter, and return its exit code.

    The driver's output is printed here. Ctrl-C interrupts it, and a second Ctrl-C terminates it. It also ends when this
    process or the connection ends. It joins the cluster's Ray with the address and the token from the head.

    Args:
        record: the cluster.
        arguments: the arguments, as in `["-P", "-m", "rlinf_cli", "train", "-"]`.
        stdin: the driver's standard input.
        env: additional environment variables.

    Raises:
        ClusterError: the head cannot be reached, or the connection was lost.
    """
    head = recorded_targets(record)[0]
    variables = {env_vars.CLUSTER.name: record.name, "PYTHONUNBUFFERED": "1", **(env or {})}
    request = {
        # The agent replaces None by its own interpreter.
        "argv": [None, *arguments],
        "cluster": record.id,
        "code": record.synced,
        "env": variables,
        "stdin": base64.b64encode(stdin).decode("ascii"),
    }
    if head.host is None:
        raise ClusterError(f"cluster `{record.name}` is on this machine", help="run the driver here")
    argv = ["ssh", *ssh_arguments(head), shlex.join(command(head.interpreter))]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, env=ssh_environment(), start_new_session=True
    )  # in its own session, because the driver handles Ctrl-C
    rc = _wait(process, source("drive") + json.dumps(request).encode() + b"\n")
    if rc == _SSH_FAILED:
        raise ClusterError(
            f"the connection to the head of cluster `{record.name}` was lost",
            where=head.name,
            why="ssh ended with exit code 255; its messages are above",
            help=f"check `rlinf status`, and that `ssh {shlex.quote(head.host)}` connects",
        )
    return rc


def _wait(process: subprocess.Popen[bytes], script: bytes) -> int:
    """Write `script` to the process and wait for it; forward Ctrl-C."""
    pipe = process.stdin
    if pipe is None:
        return process.wait()
    interrupts = 0
    try:
        _say(process, script)
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts > 2:
                    raise
                _say(process, node_agent.INTERRUPT + b"\n")
    finally:
        with suppress(OSError):
            pipe.close()
        # At the end of its input, the agent ends the driver and then itself.
        if process.poll() is None:
            try:
                process.wait(_END_SECONDS if interrupts < 3 else 1.0)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.send_signal(signal.SIGTERM)
                process.wait(5.0)


def _say(process: subprocess.Popen[bytes], text: bytes) -> None:
    """Write to the agent; errors are ignored, since the exit code of an agent that is gone says why."""
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.write(text)
            process.stdin.flush()
