"""A link of IP between this machine and a network namespace that delays and loses packets.

    python -m tests.integration.recipes.robots.fci.fci_link NAMESPACE NEAR FAR

For kernels without such a queue: two TUN devices, whose packets this process hands on. `NEAR` is the address of this
machine, `FAR` that of the namespace. A line `SECONDS SHARE` on stdin sets the delay and the share of lost packets, in
each direction, and is answered by `ready`.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from typing import Final

_TUNSETIFF: Final = 0x400454CA
_TUN_WITHOUT_HEADER: Final = 0x0001 | 0x1000
_PACKET: Final = 2048  # bytes, more than the devices' 1500
_SOON: Final = 20e-6  # seconds: a select takes as long


class Device:
    """One end of the link.

    Args:
        name: the name of the device.
        address: its address, and that of the other end.
        namespace: where it is put; "": it stays here.
    """

    def __init__(self, name: str, address: tuple[str, str], namespace: str = "") -> None:
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.fd, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _TUN_WITHOUT_HEADER))
        inside = ["-n", namespace] if namespace else []
        if namespace:
            _ip("link", "set", name, "netns", namespace)
        _ip(*inside, "address", "add", address[0], "peer", address[1], "dev", name)
        _ip(*inside, "link", "set", name, "up")
        self.held: deque[tuple[float, bytes]] = deque()

    def release(self, now: float) -> float:
        """Write the packets whose moment has come; return when the next one comes."""
        while self.held and self.held[0][0] <= now + _SOON:
            os.write(self.fd, self.held.popleft()[1])
        return self.held[0][0] if self.held else float("inf")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main(namespace: str, near: str, far: str) -> None:
    here = Device(f"near{os.getpid()}", (near, far))
    there = Device(f"far{os.getpid()}", (far, near), namespace)
    delay = lost = 0.0
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        wait = min(here.release(now), there.release(now)) - now
        ready, _, _ = select.select([here.fd, there.fd, sys.stdin], [], [], max(0.0, min(wait, 1.0)))
        moment = time.monotonic() + delay
        for source, target in ((here, there), (there, here)):
            if source.fd in ready:
                packet = os.read(source.fd, _PACKET)
                if random.random() >= lost:
                    target.held.append((moment, packet))
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            delay, lost = map(float, line.split())
            print("ready", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
