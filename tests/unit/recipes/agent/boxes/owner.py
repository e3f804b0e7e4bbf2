"""An owner of boxes whose commands would outlive it: prints what it has, and waits to be killed."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from recipes.agent.boxes.boxes import MIB, BoxHost, BoxLimits


def _holders(starter: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{starter}/task/{starter}/children").read_text().split()]


async def main() -> None:
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    boxes = BoxHost(folder, 4096)
    async with AsyncExitStack() as stack:
        names: list[str] = []
        for _ in range(number):
            box = await stack.enter_async_context(
                boxes.box([folder / "layers/host"], BoxLimits(memory=128 * MIB), workdir="/app")
            )
            names.append(box.name)
            daemon = f"setsid bash -c ': {box.name}; trap \"\" TERM HUP INT; while true; do sleep 600; done' &"
            await box.run(["bash", "-c", daemon], timeout=30)
        assert boxes._starter is not None
        starter = boxes._starter.pid
        facts = {"names": names, "starter": starter, "holders": _holders(starter)}
        print(json.dumps(facts), flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())
