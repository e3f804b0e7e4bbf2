"""Measures the data plane against the limits of the machine, all in one run: memcpy, a unix socket, TCP, a Ray call.

    python benchmarks/runtime/bench_data_plane.py [--quick] [--json FILE] [--against COMMIT]

Each line is a ratio: the median of several, with its spread (the quarters of the measurements). Absolute numbers
depend on the machine and on what else runs there; ratios of one run less so. Goals are those of docs/dev/data-plane.md;
exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import against
from rlinf_core.address import WorkerAddress
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import StaticResolver
from rlinf_core.collective.handshake import ClusterSecret

MB = 1 << 20
HERE = WorkerAddress("bench", 0)


@dataclass(frozen=True)
class Result:
    """One line of the table. `low` and `high` are the quarters of the single ratios."""

    what: str
    measured: str
    ratio: float
    low: float
    high: float
    goal: str
    met: bool


def compare(
    what: str, ours: Sequence[float], reference: Sequence[float], *, speed: bool, goal: float, unit: str = "ms"
) -> Result:
    """Compare times in seconds. With `speed` the ratio is of speeds and the goal a lower bound; else of times."""
    middle, base = statistics.median(ours), statistics.median(reference)
    ratios = sorted((base / one if speed else one / base) for one in ours)
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    scale = {"ms": 1e3, "us": 1e6}[unit]
    ratio = base / middle if speed else middle / base
    return Result(
        what,
        f"{middle * scale:.1f} {unit} against {base * scale:.1f} {unit}",
        ratio,
        quarters[0],
        quarters[2],
        f">= {goal}x" if speed else f"<= {goal}x",
        ratio >= goal if speed else ratio <= goal,
    )


def times(function: Callable[[], object], count: int) -> list[float]:
    taken: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return taken


# The other process


class Player:
    """A process with an endpoint that does what it is told: `("echo", count)` and the like, see `play`."""

    def __init__(self, name: str, secret: ClusterSecret, ip: str, prefix: Sequence[str] = ()) -> None:
        self.address = WorkerAddress.from_name(name)
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [*prefix, sys.executable, __file__, "--player", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._pipe.send((name, secret.key, ip))
        self.info = self._pipe.recv()

    def tell(self, *what: Any) -> None:
        self._pipe.send(what)

    def answer(self) -> Any:
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send(("stop",))
        self._process.wait(20)


def play(pipe: Connection) -> None:
    """Live the life of a player."""
    import numpy as np

    name, key, ip = pipe.recv()
    me = WorkerAddress.from_name(name)
    endpoint = Endpoint(ClusterSecret(key), ip=ip)
    pipe.send(endpoint.info)
    group: CollectiveGroup | None = None
    sink = np.zeros(256 * MB, np.uint8)
    while True:
        command, *arguments = pipe.recv()
        if command == "stop":
            break
        if command == "meet":
            peer, infos = arguments
            group = CollectiveGroup(endpoint, me, [peer], StaticResolver(infos))
            pipe.send(None)
        elif group is not None:
            _perform(group, command, arguments, sink, pipe)
    endpoint.close()


def _perform(group: CollectiveGroup, command: str, arguments: list[Any], sink: Any, pipe: Connection) -> None:
    import numpy as np

    peer = next(member for member in group.members if member != group.me)
    (count,) = arguments
    for _ in range(count):
        if command == "echo":
            group.send(group.recv(peer), peer)
        elif command == "take":
            array = group.recv(peer)
            group.send(int(array[-1]), peer)
            del array
        elif command == "copy out":
            value = group.recv(peer)
            array = value["batch"][0]["x"] if isinstance(value, dict) else value.numpy()
            flat = array.reshape(-1).view(np.uint8)
            np.copyto(sink[: flat.nbytes], flat)
            del value, array, flat
            group.send(None, peer)
        elif command == "fill":
            group.recv_tensor(sink, peer)
            group.send(None, peer)
        elif command == "peak":
            start = _own_memory()
            array = group.recv(peer)
            pipe.send(_own_memory() - start)
            del array


def _own_memory() -> int:
    """Private and shared bytes that this process has touched, each shared page counted by its share."""
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


# The limits


def ray_call(count: int) -> list[float] | None:
    """Round trips of a plain Ray actor call, or None without Ray."""
    try:
        import ray
    except ImportError:
        return None
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * MB, logging_level="ERROR"
    )

    class Echo:
        def echo(self, value: int) -> int:
            return value

    actor: Any = ray.remote(Echo).options(num_cpus=0).remote()
    for _ in range(200):
        ray.get(actor.echo.remote(1))
    taken = times(lambda: ray.get(actor.echo.remote(1)), count)
    ray.shutdown()
    return taken


def unix_socket(count: int) -> list[float]:
    """Round trips of 100 bytes between two processes."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        while data := theirs.recv(4096):
            theirs.send(data)
        os._exit(0)
    theirs.close()

    def once() -> None:
        ours.send(b"x" * 100)
        ours.recv(4096)

    taken = times(once, count)
    ours.close()
    os.waitpid(child, 0)
    return taken


def memcpy(size: int, count: int) -> list[float]:
    import numpy as np

    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return times(lambda: np.copyto(target, source), count)


_TCP_SINK = """
import socket, sys
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
server.bind((sys.argv[1], 0)); server.listen(1)
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
memory = memoryview(bytearray(256 << 20))
while True:
    filled = 0
    while filled < len(memory):
        count = connection.recv_into(memory[filled:])
        if not count: sys.exit()
        filled += count
    connection.sendall(b"!")
"""


def tcp_stream(ip: str, prefix: Sequence[str], count: int) -> list[float]:
    """256 MB over one TCP stream with 4 MB buffers into memory that is used again, acknowledged."""
    import numpy as np

    sink = subprocess.Popen([*prefix, sys.executable, "-c", _TCP_SINK, ip], stdout=subprocess.PIPE, text=True)
    assert sink.stdout is not None
    port = int(sink.stdout.readline())
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MB)
    sock.connect((ip, port))
    data = np.ones(256 * MB, np.uint8)

    def once() -> None:
        sock.sendall(data)
        sock.recv(1)

    taken = times(once, count + 1)[1:]
    sock.close()
    sink.wait(10)
    return taken


# The measurements


class Stage:
    """This process's endpoint and its players."""

    def __init__(self, ip: str = "127.0.0.1") -> None:
        self.secret = ClusterSecret.generate()
        self.endpoint = Endpoint(self.secret, ip=ip)
        self.infos = {HERE: self.endpoint.info}
        self.players: list[Player] = []

    def add(self, name: str, ip: str = "127.0.0.1", prefix: Sequence[str] = ()) -> Player:
        player = Player(name, self.secret, ip, prefix)
        self.players.append(player)
        self.infos[player.address] = player.info
        player.tell("meet", HERE, {HERE: self.endpoint.info})
        player.answer()
        return player

    def group(self) -> CollectiveGroup:
        return CollectiveGroup(self.endpoint, HERE, list(self.infos), StaticResolver(self.infos))

    def stop(self) -> None:
        for player in self.players:
            player.stop()
        self.endpoint.close()


def small_objects(stage: Stage, player: Player, quick: bool) -> list[Result]:
    count = 2_000 if quick else 10_000
    group = stage.group()
    player.tell("echo", count + 200)

    def once() -> None:
        group.send({"step": 1, "loss": 0.5}, player.address)
        group.recv(player.address)

    for _ in range(200):
        once()
    ours = times(once, count)
    results = [
        compare("round trip, small object / unix socket", ours, unix_socket(count), speed=False, goal=4, unit="us")
    ]
    calls = ray_call(count // 4)
    if calls is not None:
        results.append(
            compare("round trip, small object / Ray actor call", ours, calls, speed=False, goal=0.15, unit="us")
        )
    return results


def large_objects(stage: Stage, player: Player, count: int) -> list[Result]:
    import numpy as np
    import torch

    group = stage.group()
    tensor = torch.ones(16 * MB)
    payloads: dict[str, object] = {
        "tensor of 64 MB": tensor,
        "nested object holding 64 MB": {"batch": [{"x": np.ones((8, 8 * MB), np.uint8)}], "step": 1},
    }
    results: list[Result] = []
    for name, payload in payloads.items():
        player.tell("copy out", count + 2)

        def once(payload: object = payload) -> None:
            group.send(payload, player.address)
            group.recv(player.address)

        once()
        once()
        two = [2 * one for one in memcpy(64 * MB, count)]
        results.append(compare(f"{name}, copied out / two memcpys", times(once, count), two, speed=True, goal=0.5))
    return results


def tensors_in_place(stage: Stage, player: Player, count: int) -> list[Result]:
    import numpy as np

    group = stage.group()
    array = np.ones(256 * MB, np.uint8)
    player.tell("fill", count + 1)

    def once() -> None:
        group.send_tensor(array, player.address)
        group.recv(player.address)

    once()
    ours = times(once, count)
    return [compare("recv_tensor of 256 MB / memcpy", ours, memcpy(256 * MB, count), speed=True, goal=0.4)]


def broadcasts(stage: Stage, count: int) -> list[Result]:
    import torch

    group = stage.group()
    players = stage.players[:3]
    array = torch.ones(64 * MB, dtype=torch.uint8)

    def one_send() -> None:
        group.send(array, players[0].address)
        group.recv(players[0].address)

    def to_all() -> None:
        group.broadcast(array, HERE)
        for player in players:
            group.recv(player.address)

    results: list[Result] = []
    for command, words, goal in (
        ("take", "broadcast of 64 MB to 3, received / one send", 2.0),
        ("copy out", "the same, every receiver copies it out", 3.0),
    ):
        players[0].tell(command, count + 1)
        one_send()
        single = times(one_send, count)
        for player in players:
            player.tell(command, count + 1)
        to_all()
        results.append(compare(words, times(to_all, count), single, speed=False, goal=goal))
    return results


def memory(stage: Stage, player: Player) -> list[Result]:
    """Return how much more memory both processes hold while 256 MB passes, in copies."""
    import numpy as np

    group = stage.group()
    array = np.ones(256 * MB, np.uint8)
    before = _own_memory()
    player.tell("peak", 1)
    group.send(array, player.address)
    grown = player.answer() + _own_memory() - before
    copies = grown / array.nbytes
    return [
        Result("memory while 256 MB passes", f"{grown / MB:.0f} MB", copies, copies, copies, "<= 1 copy", copies <= 1.1)
    ]


def between_hosts(count: int) -> list[Result]:
    """Two network namespaces with a virtual cable: the nearest to two hosts that one machine has."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return []
    cable = Cable()
    try:
        stage = Stage(cable.ours)
        player = stage.add("far:0", cable.theirs, cable.prefix)
        group = stage.group()
        import numpy as np

        array = np.ones(256 * MB, np.uint8)
        player.tell("fill", count + 2)

        def once() -> None:
            group.send_tensor(array, player.address)
            group.recv(player.address)

        once()
        once()
        ours = times(once, count)
        stage.stop()
        reference = tcp_stream(cable.theirs, cable.prefix, count)
    finally:
        cable.remove()
    return [
        compare("256 MB between two network namespaces / one tuned TCP stream", ours, reference, speed=True, goal=0.7)
    ]


class Cable:
    """A second network namespace, connected with this one."""

    ours, theirs = "10.99.77.1", "10.99.77.2"

    def __init__(self) -> None:
        self._name = f"rlinf-{os.getpid()}"
        self.prefix = ("ip", "netns", "exec", self._name)
        self._near = near = f"rl{os.getpid()}a"
        far = f"rl{os.getpid()}b"
        for command in (
            f"netns add {self._name}",
            f"link add {near} type veth peer name {far} netns {self._name}",
            f"addr add {self.ours}/24 dev {near}",
            f"link set {near} up",
            f"-n {self._name} addr add {self.theirs}/24 dev {far}",
            f"-n {self._name} link set {far} up",
            f"-n {self._name} link set lo up",
        ):
            subprocess.run(["ip", *command.split()], check=True)

    def remove(self) -> None:
        subprocess.run(["ip", "link", "del", self._near], check=True)
        subprocess.run(["ip", "netns", "del", self._name], check=True)


def run(quick: bool) -> list[Result]:
    count = 5 if quick else 15
    stage = Stage()
    players = [stage.add(f"player:{rank}") for rank in range(3)]
    results = small_objects(stage, players[0], quick)
    results += large_objects(stage, players[0], count)
    results += tensors_in_place(stage, players[0], count)
    results += broadcasts(stage, count)
    stage.stop()
    stage = Stage()
    results += memory(stage, stage.add("player:0"))
    stage.stop()
    return results + between_hosts(count)


def table(results: Sequence[Result]) -> str:
    rows = [("what", "measured", "ratio", "spread", "goal", "")]
    rows += [
        (
            one.what,
            one.measured,
            f"{one.ratio:.2f}x",
            f"{one.low:.2f} - {one.high:.2f}",
            one.goal,
            "" if one.met else "missed",
        )
        for one in results
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], ("---",) * 6, *rows[1:]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the data plane against the limits of this machine.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--player", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.player is not None:
        play(Connection(arguments.player))
        return 0
    results = run(arguments.quick)
    print(table(results))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(one) for one in results], file, indent=1)
    return 0 if all(one.met for one in results) else 1


if __name__ == "__main__":
    sys.exit(against.main(main, __file__, ("--quick",)))
