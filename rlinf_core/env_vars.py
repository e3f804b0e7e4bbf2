"""The environment variables that rlinf reads: each with its default, its type and its meaning, in one place.

    seconds = env_vars.TIMEOUT.get()

An unset or empty variable has its default; an invalid value is an `EnvironmentVariableError`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlinf_core.errors import EnvironmentVariableError
from rlinf_core.suggest import did_you_mean

T = TypeVar("T", covariant=True)

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE | re.ASCII)


# Every variable that rlinf reads, by name, for help pages and `rlinf doctor`.
REGISTER: dict[str, EnvVar[object]] = {}


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One declared variable.

    Attributes:
        default: its value if unset or empty.
        doc: its meaning, with units.
        expected: its valid values, in words.
        parse: the function from text to value; it raises ValueError for an invalid text.
    """

    name: str
    default: T
    doc: str
    expected: str
    parse: Callable[[str], T]

    def __post_init__(self) -> None:
        REGISTER[self.name] = self

    @property
    def is_set(self) -> bool:
        """Whether this process's environment sets it."""
        return bool(os.environ.get(self.name, "").strip())

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the variable's value in `environ` (by default this process's).

        Raises:
            EnvironmentVariableError: its value is invalid.
        """
        raw = (os.environ if environ is None else environ).get(self.name, "").strip()
        if not raw:
            return self.default
        try:
            return self.parse(raw)
        except ValueError:
            raise EnvironmentVariableError(self.name, raw, expected=self.expected, help=self.doc) from None


def _seconds(text: str) -> float:
    value = float(text)
    # Written so that NaN fails too; inf fails because no wait may be unbounded.
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError
    return int(text)


def _size(text: str) -> int:
    match = _SIZE_FORM.fullmatch(text)
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if size <= 0:
        raise ValueError
    return size


def _switch(text: str) -> bool:
    words = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if text.lower() not in words:
        raise ValueError
    return words[text.lower()]


def _level(text: str) -> str:
    if text.upper() not in {"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"}:
        raise ValueError
    return text.upper()


def _claims(text: str) -> str:
    if text in ("wait", "no-wait", "share") or (text.startswith("group:") and 6 < len(text) <= 100):
        return text
    raise ValueError


def _ports(text: str) -> range:
    first, dash, last = text.partition("-")
    ports = range(_count(first.strip()), _count(last.strip()) + 1)
    if not dash or not ports or ports[0] < 1 or ports[-1] > 65535:
        raise ValueError
    return ports


# Valid values in words, and the function that reads them.
_TIME = ("a positive number of seconds, such as `1800` or `0.5`", _seconds)
_COUNT = ("an integer >= 0", _count)
_SIZE = ("a positive size in bytes, such as `256MB`, `2GiB` or `1048576`", _size)
_PORTS = ("a range of ports, first-last", _ports)
_LEVEL = ("one of DEBUG, INFO, WARNING, ERROR, CRITICAL", _level)
_CLAIMS = ("one of wait, no-wait, share, group:NAME", _claims)
_SWITCH = ("1 or 0", _switch)

TIMEOUT = EnvVar(
    "RLINF_TIMEOUT",
    1800.0,
    "Default timeout in seconds of an operation between processes (send, recv, put, get).",
    *_TIME,
)
CALL_TIMEOUT = EnvVar(
    "RLINF_CALL_TIMEOUT",
    86400.0,
    "Default timeout in seconds of `wait` for a call on a worker group; operations within the method have their own"
    " deadlines.",
    *_TIME,
)
CONNECT_TIMEOUT = EnvVar(
    "RLINF_CONNECT_TIMEOUT",
    30.0,
    "Seconds for the first contact with a peer, which may still be launching. If unset, the default is extended up"
    " to tenfold on a machine with overcommitted processors.",
    *_TIME,
)
ADDRESS: EnvVar[str | None] = EnvVar(
    "RLINF_ADDRESS",
    None,
    "The address of the head of the cluster to join, as in `10.0.0.1:6379`, or `local` for a private Ray on this"
    " machine; by default the `rlinf up` cluster of which this machine is a node, else a private Ray.",
    "HOST:PORT, or `local`",
    str,
)
CLUSTER: EnvVar[str | None] = EnvVar(
    "RLINF_CLUSTER",
    None,
    "Name of the `rlinf up` cluster to use; required if there are several.",
    "the name of a cluster",
    str,
)
NODE_RANK: EnvVar[int | None] = EnvVar(
    "RLINF_NODE_RANK",
    None,
    "The rank of this node in the cluster; set it on every node before Ray starts there, or on none.",
    *_COUNT,
)
NET_IF: EnvVar[str | None] = EnvVar(
    "RLINF_NET_IF",
    None,
    "The network interface at which other nodes reach this one, such as `eth0`; by default that of Ray's address.",
    "the name of a network interface",
    str,
)
PORTS: EnvVar[range | None] = EnvVar(
    "RLINF_PORTS",
    None,
    "The TCP ports on which processes of rlinf on this node listen for each other, as in `20672-20999`; `rlinf up` sets"
    " it on every node from `cluster.ports`; by default any free one.",
    *_PORTS,
)
SHM_LIMIT: EnvVar[int | None] = EnvVar(
    "RLINF_SHM_LIMIT",
    None,
    "Bytes of shared memory that one process may hold for messages; by default a share of its allowed memory.",
    *_SIZE,
)
LOG_LEVEL = EnvVar("RLINF_LOG_LEVEL", "INFO", "Minimum severity of messages that workers log.", *_LEVEL)
RUNS = EnvVar(
    "RLINF_RUNS",
    "runs",
    "The folder in which commands look for runs: the `runner.logger.log_path` of their files.",
    "a folder",
    str,
)
CLAIMS = EnvVar(
    "RLINF_CLAIMS",
    "wait",
    "What a job does whose accelerators or robots another job of this user holds: `wait` until they are free, end with"
    " an error (`no-wait`), `share` them, or share them only with jobs of the same group (`group:NAME`).",
    *_CLAIMS,
)
REPORT = EnvVar("RLINF_REPORT", True, "Whether `rlinf train` writes `report.html` at the end of a run.", *_SWITCH)

_PREFIX = "RLINF_"
# Internal variables: set by rlinf for its own processes only.
MARKS = frozenset({"RLINF_RAY"})
# Users may name interpreters by variables such as RLINF_METAWORLD_PYTHON, which files read as `${env:...}`.
_INTERPRETER = "_PYTHON"
# Variables of earlier releases, and the present behavior.
_GONE = {"RLINF_DEVICE_TRANSPORT": "tensors on GPUs always go through host memory"}


def check(environ: Mapping[str, str] | None = None) -> None:
    """Validate every registered variable.

    Raises:
        EnvironmentVariableError: a value is invalid; it also names further invalid ones.
    """
    wrong: list[EnvironmentVariableError] = []
    for variable in REGISTER.values():
        try:
            variable.get(environ)
        except EnvironmentVariableError as error:
            wrong.append(error)
    if wrong:
        first, *others = wrong
        first.why = "further invalid variables: " + "; ".join(error.message for error in others) if others else None
        raise first


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return messages about unknown variables with rlinf's prefix, so that a misspelt one is not ignored."""
    names = sorted(os.environ if environ is None else environ)
    known = [name.removeprefix(_PREFIX) for name in REGISTER]
    messages: list[str] = []
    for name in names:
        if name.startswith(_PREFIX) and name not in REGISTER and name not in MARKS and not name.endswith(_INTERPRETER):
            hint = did_you_mean(name.removeprefix(_PREFIX), known)
            text = f"`{name}` in the environment is not a variable of rlinf"
            if name in _GONE:
                text = f"`{name}` in the environment is not read any more: {_GONE[name]}"
            messages.append(f"{text}; {hint.replace('`', f'`{_PREFIX}', 1)}" if hint and name not in _GONE else text)
    return messages
