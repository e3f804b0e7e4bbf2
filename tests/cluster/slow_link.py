"""A relay of TCP that delays what goes through it, for machines whose kernel has no such queue.

python -m tests.cluster.slow_link PORT HOST HOST_PORT    # then a delay in seconds, of each direction, in each line
"""

from __future__ import annotations

import asyncio
import sys


class SlowLink:
    """A relay to one address.

    Args:
        host: to which it relays.
        port: of `host`.

    Attributes:
        delay: seconds that bytes are held back for, in each direction; never overtaken by later ones.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port, self.delay = host, port, 0.0
        self._running: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            for running in (self._take(source, held), _give(held, target)):
                task = asyncio.create_task(running)
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _take(self, source: asyncio.StreamReader, held: asyncio.Queue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            data = await source.read(2**16)
            held.put_nowait((asyncio.get_running_loop().time() + self.delay, data))


async def _give(held: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter) -> None:
    """Hand on what is held when its moment has come; an end of the stream, too."""
    while True:
        moment, data = await held.get()
        await asyncio.sleep(moment - asyncio.get_running_loop().time())
        if not data:
            target.close()
            return
        target.write(data)


async def _serve(port: int, link: SlowLink) -> None:
    async with await asyncio.start_server(link.accept, "0.0.0.0", port):
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            link.delay = float(line)
            print("ready", flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), SlowLink(sys.argv[2], int(sys.argv[3]))))
