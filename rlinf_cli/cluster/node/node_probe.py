"""The facts about a node and its processes (versions, addresses, space, hardware, ports), and the removal of leftovers.

Sent to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rlinf_cli.cluster.node import questions
from rlinf_core.node.device_claims import listing
from rlinf_core.node.node_env import merged
from rlinf_core.node.node_facts import (
    WITHOUT_WORKING_FOLDER,
    folder_of,
    machine,
    read_record,
    running,
    temporary_folder,
)
from rlinf_core.process import proc
from rlinf_core.process.proc import MARK, command, open_files, pids, processes_of, read

_LISTEN = "0A"


def command_of(pid: int) -> str | None:
    """Return the command of a process in the form of Ray's records of drivers, or None without such a process."""
    words = command(pid).decode("utf-8", "replace").split("\0")[:-1]
    return subprocess.list2cmdline(words) if os.path.exists(f"/proc/{pid}") else None


class Holdings(NamedTuple):
    """The resources of a cluster's processes besides private memory.

    Attributes:
        ports: the TCP ports on which they listen.
        shared: their files in /dev/shm.
        folders: their folders besides the cluster's own, such as socket folders.
    """

    ports: list[int]
    shared: list[str]
    folders: list[str]


def holdings(processes: list[int], since: float) -> Holdings:
    """Return the current resources of processes, to verify after their end that the resources are gone.

    A shared-memory file older than `since`, or of another user, does not count even if they use it.
    """
    prefix = os.path.join(temporary_folder(), "rlinf-")
    owners = listeners()
    ports = sorted(port for port, pid in owners.items() if pid in set(processes))
    shared: set[str] = set()
    folders: set[str] = set()
    for pid in processes:
        for path in _mapped(pid):
            if path.startswith("/dev/shm/"):
                shared.add(path)
        for target in open_files(pid).values():
            if target.startswith("/dev/shm/") and not target.endswith(" (deleted)"):
                shared.add(target)
            elif target.startswith(prefix) and os.path.isdir(target):
                folders.add(target)
    return Holdings(ports, sorted(path for path in shared if _is_own(path, since)), sorted(folders))


def _is_own(path: str, since: float) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return info.st_uid == os.getuid() and info.st_ctime >= since


def _mapped(pid: int) -> list[str]:
    lines = read(f"/proc/{pid}/maps").decode("utf-8", "replace").splitlines()
    paths = {line.split(None, 5)[5] for line in lines if "/dev/shm/" in line}
    return [path for path in paths if not path.endswith(" (deleted)")]


def listeners() -> dict[int, int]:
    """Return every listening TCP port of this network namespace, with its pid, or 0 if that is not visible."""
    port_of: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in (line.split() for line in read(table).decode("ascii", "replace").splitlines()[1:]):
            if len(row) > 9 and row[3] == _LISTEN:
                port_of[f"socket:[{row[9]}]"] = int(row[1].rpartition(":")[2], 16)
    owner = dict.fromkeys(port_of.values(), 0)
    for pid in pids():
        for target in open_files(pid).values():
            port = port_of.get(target)
            if port is not None:
                owner[port] = pid
    return owner


def described(pid: int) -> str:
    """Return a process in words for messages, as in ``pid 123, `sshd` ``."""
    if not pid:
        return "a process of another user"
    name = read(f"/proc/{pid}/comm").decode("utf-8", "replace").strip()
    return f"pid {pid}, `{name}`" if name else f"pid {pid}"


def cluster_of(pid: int) -> str | None:
    """Return the name of the `rlinf up` cluster to which a process of this user belongs, or None."""
    variables = read(f"/proc/{pid}/environ").split(b"\0")
    mark = f"{MARK}=".encode()
    owners = [os.fsdecode(variable[len(mark) :]) for variable in variables if variable.startswith(mark)]
    # Any process may set the variable, and its value becomes part of a path, so it must be alphanumeric.
    record = read_record(folder_of(owners[0])) if owners and owners[0].isalnum() else None
    name = record.get("name") if record else None
    return name if isinstance(name, str) else None


def answers(address: str, port: int, seconds: float = 0.5) -> OSError | None:
    """Return None if a process accepts connections at the address, else the error."""
    try:
        with socket.create_connection((address, port), timeout=seconds):
            return None
    except OSError as error:
        return error


def remove(path: str) -> str | None:
    """Remove a file or a folder with its contents; return the path if something is left, else None."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        pass
    return path if os.path.lexists(path) else None


def reap_sockets() -> None:
    """Remove the socket folders of dead processes; a living process holds a lock on its folder."""
    prefix = f"rlinf-{os.getuid()}-"
    for base in {temporary_folder(), "/tmp"}:
        for name in os.listdir(base):
            path = os.path.join(base, name)
            if not name.startswith(prefix):
                continue
            try:
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                if os.fstat(lock).st_uid != os.getuid():
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except OSError:
                pass  # its process is alive
            finally:
                os.close(lock)


def tail(path: str, lines: int = 12, size: int = 16384) -> str:
    """Return the last lines of a log."""
    text = proc.tail(path, size)
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


_QUESTION_SECONDS = 20.0
_SOFTWARE_SECONDS = 30.0


def code_folder(cluster: str) -> str:
    """Return the folder for code from `--sync`, beside the cluster's folder because it is made before Ray starts."""
    return f"{folder_of(cluster)}.code"


def environment(request: dict[str, Any]) -> dict[str, str]:
    """Return the environment for processes on this node: its own, with `env` and the synced code."""
    env = merged(os.environ, request.get("env", {}), ())
    if request.get("code"):
        env = merged(env, {"PYTHONPATH": code_folder(request["cluster"])}, ["PYTHONPATH"])
    # The user's own settings must not change how our Ray authenticates.
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS"):
        env.pop(name, None)
    return env


def ask_interpreter(
    env: dict[str, str],
    question: str,
    *arguments: str,
    interpreter: str = sys.executable,
    seconds: float = _QUESTION_SECONDS,
) -> dict[str, Any]:
    """Return an interpreter's answer to one of `questions`: `{"found": ...}` or `{"fault": "..."}`."""
    source = getattr(questions, "__source__", None)
    if source is None:
        # On a node the modules are sent as source, with `__source__`. Elsewhere there is a file.
        with open(str(questions.__file__), encoding="utf-8") as file:
            source = file.read()
    code = f"exec(compile({source!r}, 'questions', 'exec'))"
    return run_code(code, env, interpreter, seconds, question, *arguments)


def run_code(code: str, env: dict[str, str], interpreter: str, seconds: float, *arguments: str) -> dict[str, Any]:
    """Return the JSON that code prints in an interpreter: `{"found": ...}` or `{"fault": "..."}`."""
    try:
        done = subprocess.run(
            [interpreter, "-c", WITHOUT_WORKING_FOLDER + code, *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            return {"fault": lines[-1] if lines else f"exit code {done.returncode}"}
        return {"found": json.loads(done.stdout.decode().splitlines()[-1])}
    except subprocess.TimeoutExpired:
        return {"fault": f"no answer within {seconds:g} s"}
    except (OSError, ValueError, IndexError) as error:
        return {"fault": str(error) or type(error).__name__}


def software(env: dict[str, str], interpreter: str = sys.executable, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return the versions that an interpreter reports, including those of `packages`, or its error as `fault`."""
    reply = ask_interpreter(env, "software", *packages, interpreter=interpreter, seconds=_SOFTWARE_SECONDS)
    unknown = {"python": list(sys.version_info[:3]), "ray": None, "rlinf": None, "fingerprint": None}
    return reply["found"] if "found" in reply else {**unknown, "fault": reply["fault"]}


def address_of_login() -> str | None:
    """Return the address at which ssh reached this machine, or None without ssh."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else None


def primary_address() -> str:
    """Return the address of the default route; loopback without a network."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("8.8.8.8", 80))  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def taken_ports(ports: dict[str, int], own: set[int]) -> list[list[Any]]:
    """Return the `ports` on which a process other than `own` listens, each as [use, port, process]."""
    owners = listeners()

    def listener(pid: int) -> str:
        cluster = cluster_of(pid)
        return described(pid) + (f" of cluster `{cluster}` (`rlinf down --name {cluster}`)" if cluster else "")

    return [
        [name, port, listener(owners[port])]
        for name, port in ports.items()
        if port in owners and owners[port] not in own
    ]


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of this node."""
    cluster = request["cluster"]
    folder = folder_of(cluster)
    env = environment(request)
    existing = os.path.dirname(os.path.dirname(folder))
    record = running(folder)
    disk = shutil.disk_usage(existing)
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "machine": machine(),
        "interpreter": sys.executable,
        "address": address_of_login(),
        "primary": primary_address(),
        "folder": folder,
        "disk_free": disk.free,
        "shm_free": shm.f_bavail * shm.f_frsize if shm else 0,
        "cores": os.cpu_count() or 1,
        "record": record,
        "holders": listing(),
        "taken": taken_ports(request.get("ports", {}), set(processes_of(cluster, folder))),
        **software(env, packages=request.get("packages", ())),
    }


# Seconds for a robot to accept a connection.
_ROBOT_SECONDS = 3.0


def inspect(request: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of this node for `doctor`: those of `probe`, accelerators, robots, cameras and limits.

    Args:
        request: the request, as of `probe`, with `addresses` of robots as host and port, `cameras`, the makes to look
            for, `camera_environment`, the environment that looks for them, `recipe`, the name in the file or None, and
            `environments`, the other environments of the node, as `node_env` reads them.
    """
    env, name = environment(request), request.get("recipe")
    cameras_env, cameras_by = _declared(env, request.get("camera_environment"))
    with ThreadPoolExecutor(8) as pool:
        accelerators = pool.submit(ask_interpreter, env, "accelerators")
        cameras = {
            make: pool.submit(ask_interpreter, cameras_env, "cameras", make, interpreter=cameras_by)
            for make in request.get("cameras", ())
        }
        recipe = pool.submit(recipe_of, name, env) if name else None
        others = [pool.submit(_software, other, env, request) for other in request.get("environments", ())]
        addresses = [tuple(address) for address in request.get("addresses", ())]
        robots = list(pool.map(_reach, addresses, [cameras_env] * len(addresses)))
        common = probe(request)
    now = time.time()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        **common,
        # The caller compares this with the times of its request and of the reply.
        "time": now,
        "accelerators": accelerators.result(),
        "cameras": {make: future.result() for make, future in cameras.items()},
        "robots": robots,
        "recipe": recipe.result() if recipe is not None else None,
        "environments": [future.result() for future in others],
        "files_soft": soft,
        "files_hard": hard,
        "memory": _memory(),
        "ephemeral": _ephemeral(),
    }


def try_out(request: dict[str, Any]) -> dict[str, Any]:
    """Run a trial program in the environment of a group's processes.

    Args:
        request: the request, as of `probe`, with `module` and `arguments` of the program, `seconds`, its time limit,
            and `environment`, as `node_env` reads it, or None for that of the node.

    Returns:
        `{"found": ...}` with the record that the program printed, or `{"fault": "..."}`.
    """
    env, interpreter = _declared(environment(request), request.get("environment"))
    code = "import runpy; runpy.run_module({!r}, run_name='__main__')\n".format(request["module"])
    return run_code(code, env, interpreter, float(request["seconds"]), *request["arguments"])


def _declared(env: dict[str, str], declared: dict[str, Any] | None) -> tuple[dict[str, str], str]:
    """Return the environment and interpreter of a group's processes, or of the node's for None."""
    if declared is None:
        return env, sys.executable
    return merged(env, declared["env"], declared["prepended"]), declared["interpreter"]


def _software(declared: dict[str, Any], own: dict[str, str], request: dict[str, Any]) -> dict[str, Any]:
    """Return the versions of another interpreter of the node, in its declared environment."""
    env, interpreter = _declared(own, declared)
    facts, recipe = software(env, interpreter, request.get("packages", ())), request.get("recipe")
    return {**facts, "recipe": recipe_of(recipe, env, interpreter) if recipe and "fault" not in facts else None}


def recipe_of(name: str, env: dict[str, str], interpreter: str = sys.executable) -> dict[str, Any]:
    """Return a recipe's entry point in an interpreter with a digest of its package, as in `ask_interpreter`."""
    return ask_interpreter(env, "recipe", name, interpreter=interpreter)


def _reach(address: tuple[str, int], env: Mapping[str, str]) -> list[Any]:
    """Return [host, port, None or the connection error]; a host `$NAME` is a variable of `env`."""
    host, port = address
    meant = env.get(host[1:]) if host.startswith("$") else host
    if not meant:
        return [host, port, f"the node's environment has no variable `{host[1:]}`"]
    try:
        with socket.create_connection((meant, port), timeout=_ROBOT_SECONDS):
            return [host, port, None]
    except socket.timeout:  # noqa: UP041 - one and the same only from 3.10 on
        return [host, port, f"no answer within {_ROBOT_SECONDS:g} s"]
    except OSError as error:
        return [host, port, (error.strerror or str(error)).lower()]


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _ephemeral() -> list[int]:
    """Return the first and last ephemeral port of the system."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            first, last = file.read().split()
    except (OSError, ValueError):
        return []
    return [int(first), int(last)]
