"""Ray by hand on hosts of namespaces, and drivers on them that do one step after the other.

What `rlinf up` does is not used here: these are the clusters of people who start Ray themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.host import Host

PORT = 6379
_STORE_BYTES = 80 << 20
_READY_SECONDS = 90.0


class RayHosts:
    """Ray on some hosts, the first of which is the head.

    Args:
        folder: a new one for its files, which all hosts see: their /tmp is their own.
        hosts: where it runs.

    Attributes:
        hosts: the hosts.
        address: the head's.
        environment: what processes need that join it.
    """

    def __init__(self, folder: Path, *hosts: Host) -> None:
        self.hosts = hosts
        self.folder = folder
        folder.mkdir()
        self.address = f"{hosts[0].address}:{PORT}"
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def begin(
        self,
        host: Host,
        *,
        label: int | None = None,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        """Start Ray on a host, without waiting for it.

        Args:
            host: the host.
            label: the rank that `rlinf up` would give it as a label.
            env: of its Ray.
            python: the interpreter that runs it.
        """
        is_head = host is self.hosts[0]
        place = ["--head", f"--port={PORT}", "--include-dashboard=false"] if is_head else [f"--address={self.address}"]
        labels = [] if label is None else ["--labels", f"rlinf.io/rank={label}"]
        log = (self.folder / f"{host.name}.log").open("w")
        with log:
            self._processes[host.name] = host.spawn(
                # Straight to the entry point: `ray` on the path may be another one.
                with_env(
                    {**self.environment, **(env or {})},
                    [python, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"],
                    [f"--node-ip-address={host.address}", "--disable-usage-stats"],
                    ["--temp-dir=/tmp/ray", f"--object-store-memory={_STORE_BYTES}", *place, *labels],
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_head(self) -> None:
        """Until others can join: one that comes too early tries again after seconds only."""
        head = self.hosts[0]
        end = time.monotonic() + _READY_SECONDS
        code = f"import socket; socket.create_connection(('{head.address}', {PORT}), 2)"
        while head.run([sys.executable, "-I", "-S", "-c", code], check=False).returncode:
            if time.monotonic() > end or self._processes[head.name].poll() is not None:
                raise RuntimeError((self.folder / f"{head.name}.log").read_text())
            time.sleep(0.1)

    def end(self) -> None:
        """End it on all hosts that are still there."""
        for host in self.hosts:
            process = self._processes.pop(host.name, None)
            if process is not None:
                if host.alive:
                    # All of it at once: nothing of these hosts is anybody else's, and they keep their sshd.
                    for pid, command in host.processes().items():
                        if "ray" in command or "rlinf" in command:
                            host.run(["kill", "-KILL", str(pid)], check=False)
                    host.sh("rm -rf /tmp/ray /tmp/rlinf-*")
                process.kill()
                process.wait(timeout=30)


def with_env(env: Mapping[str, str], *argv: list[str]) -> list[str]:
    """Return a command with more in its environment."""
    return ["env", *(f"{name}={value}" for name, value in env.items()), *(word for part in argv for word in part)]


class Driver:
    """A driver on a host: a script whose steps are called one by one."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    def begin(self, step: str, *args: Any) -> None:
        """Call a step of the script without waiting for what it returns."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([step, *args]) + "\n")
        self.process.stdin.flush()

    def result(self, seconds: float = 100.0) -> Any:
        """Return what the step returned that was called first of those whose result was not asked for."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise AssertionError(f"no answer within {seconds:g} s\n{self._log.read_text()}")
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the driver ended\n{self._log.read_text()}")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{answer['error']}\n{self._log.read_text()}")
        return answer["value"]

    def call(self, step: str, *args: Any) -> Any:
        """Return what a step of the script returns, as JSON carries it."""
        self.begin(step, *args)
        return self.result()

    def end(self) -> int:
        """Let the script come to its end; its exit status."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            raise


@contextlib.contextmanager
def driver(ray: RayHosts, host: Host, script: Path, *arguments: str) -> Generator[Driver]:
    """A driver on a host, from a script that ends with `serve(globals())`."""
    log = ray.folder / "driver.log"
    env = {**ray.environment, "RLINF_ADDRESS": ray.address, "PYTHONPATH": os.pathsep.join(sys.path[:1])}
    with log.open("w") as err:
        process = host.spawn(
            with_env(env, [sys.executable, str(script), *arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
        )
    made = Driver(process, log)
    try:
        yield made
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)
