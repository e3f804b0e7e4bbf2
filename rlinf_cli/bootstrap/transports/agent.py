"""Asking a node: the agent's source and the request go over standard input, and its lines of JSON come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from rlinf_cli.bootstrap.inventory import NodeTarget
from rlinf_cli.bootstrap.transports.transport import CommandOutcome, Result, Transport
from rlinf_core.foreign.strict_json import load_json

# In the order in which they import each other. All of them travel.
PARTS: Final = (
    "rlinf_core.foreign.strangers",
    "rlinf_core.node.node_env",
    "rlinf_core.node.node_processes",
    "rlinf_core.node.node_facts",
    "rlinf_cli.bootstrap.node.node_holdings",
    "rlinf_cli.bootstrap.node.node_probe",
    "rlinf_cli.bootstrap.node.node_inspect",
    "rlinf_cli.bootstrap.node.node_links",
    "rlinf_cli.bootstrap.node.node_ray",
    "rlinf_cli.bootstrap.node.node_members",
    "rlinf_cli.bootstrap.node.node_run",
    "rlinf_cli.bootstrap.node.node_agent",
)
_PACKAGES: Final = (
    "rlinf_core",
    "rlinf_core.foreign",
    "rlinf_core.node",
    "rlinf_cli",
    "rlinf_cli.bootstrap",
    "rlinf_cli.bootstrap.node",
)
# The whole of what is seen in a process list: no quotes but those of the shell, no newline, for any login shell.
_LOADER: Final = "import sys;n=int(sys.stdin.buffer.readline());exec(sys.stdin.buffer.read(n))"
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
    exec(compile(source, name, 'exec'), module.__dict__)
sys.exit(sys.modules[{main!r}].main())
"""
_MISSING: Final = frozenset((126, 127))


class AgentReply(NamedTuple):
    """A node's answer to a request.

    Attributes:
        data: what was asked for, or None.
        message: what is in the way, empty when nothing is.
        why, help: about it.
        rc: the exit code that goes with it, where there is one.
        lines: the last lines of what failed.
        result: how the run went.
    """

    data: dict[str, Any] | None
    message: str
    why: str
    help: str
    rc: int | None
    lines: str
    result: Result

    @property
    def ok(self) -> bool:
        return self.data is not None


def path_of(part: str) -> Path:
    """Return the file of a part."""
    spec = find_spec(part)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module named {part!r}", name=part)
    return Path(spec.origin)


@cache
def source(main: str = "node_agent") -> bytes:
    """Return what the loader executes: the parts as modules of the names that they have here, and `main()` of one
    of them.
    """
    parts = [(name, path_of(name).read_text(encoding="utf-8")) for name in PARTS]
    text = _CARRIER.format(parts=parts, packages=_PACKAGES, main=f"{_PACKAGES[-1]}.{main}").encode()
    return b"%d\n%s" % (len(text), text)


def command(interpreter: str) -> list[str]:
    """Return what is run on a node to have the agent read its standard input."""
    return [interpreter, "-c", _LOADER]


def script(request: dict[str, Any]) -> bytes:
    """Return what the agent reads: itself, and the request."""
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
    """Return what `node` answers to `request`; never raises for what a node can do.

    Args:
        transport: the way to it.
        node: who is asked.
        request: a verb of the agent's and what it needs, as data of JSON.
        deadline: seconds after which the node counts as silent, from when it is its turn.
        interpreter: another one than the node's own.
        on_hello: called once the agent runs.
    """

    def line(text: bytes) -> None:
        if on_hello is not None and b'"hello"' in text:
            on_hello()

    path = interpreter or node.interpreter
    # The script is made when it is this node's turn: a thousand of them at once would fill the memory.
    async with transport.turns or nullcontext():
        result = await transport.run(node, command(path), script(request), deadline=deadline, on_line=line)
    return _understood(node, path, result, deadline)


def _understood(node: NodeTarget, interpreter: str, result: Result, deadline: float) -> AgentReply:
    events = list(_events(result.stdout))
    last = events[-1] if events else {}
    if last.get("event") == "result":
        last.pop("event")
        return AgentReply(last, "", "", "", 0, "", result)
    if last.get("event") == "error":
        message, why, hint, lines = (str(last.get(name) or "") for name in ("message", "why", "help", "lines"))
        rc = last.get("rc")
        return AgentReply(None, message, why, hint, rc if isinstance(rc, int) else None, lines, result)
    spoken = result.last_lines()
    if result.kind is CommandOutcome.TIMEOUT:
        message = f"no answer within {deadline:g} s"
        why = "the connection was made, and nothing came any more" if events else "nothing was heard from it"
        return AgentReply(None, message, why, result.help or "", None, spoken, result)
    if result.kind is not CommandOutcome.DONE:
        return AgentReply(None, str(result.kind), _first_cause(spoken), result.help or "", result.rc, spoken, result)
    if result.rc in _MISSING:
        said = "may not be executed" if result.rc == 126 else "does not exist"
        hint = (
            "correct `python_interpreter_path`"
            if node.declared_interpreter
            else (
                "install Python there, or give the node's group a `python_interpreter_path`;"
                " without one a node runs the same path as `rlinf` here"
            )
        )
        return AgentReply(None, f"the interpreter `{interpreter}` {said}", spoken, hint, result.rc, spoken, result)
    message = f"`{interpreter}` cannot run the agent" if not events else "the agent ended without an answer"
    hint = "`python_interpreter_path` must be a Python 3.11 or newer"
    return AgentReply(None, message, f"it ended with exit code {result.rc}", hint, result.rc, spoken, result)


def _first_cause(spoken: str) -> str:
    """Return the last line that ssh said: the lines before it are banners and warnings."""
    lines = [line.strip() for line in spoken.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _events(output: bytes) -> list[dict[str, Any]]:
    """Return the lines that are the agent's; a login script may print others before."""
    found: list[dict[str, Any]] = []
    for line in output.splitlines():
        try:
            data = load_json(line)
        except ValueError:
            continue
        if isinstance(data, dict) and "event" in data:
            found.append(cast("dict[str, Any]", data))
    return found
