"""A node for boxes, whose image is made of this machine's own programs."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.agent.boxes.boxes import Boxes
from recipes.agent.images.host_layer import write_host_layer

MEMORY = 4096


@pytest.fixture(scope="session")
def box_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a node's boxes, with the layer `layers/host`."""
    folder = tmp_path_factory.mktemp("boxes")

    async def make() -> None:
        boxes = Boxes(folder, MEMORY)
        with tempfile.TemporaryFile() as archive:
            write_host_layer(archive)
            archive.seek(0)
            await boxes.unpack(archive.fileno(), folder / "layers/host", 1 << 30, 100_000)
        await boxes.close()

    async def remove() -> None:
        boxes = Boxes(folder, MEMORY)
        assert not list((folder / "live").iterdir())
        for layer in (folder / "layers").iterdir():
            await boxes.remove(layer)
        await boxes.close()

    asyncio.run(make())
    yield folder
    asyncio.run(remove())
