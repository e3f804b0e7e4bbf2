"""Files of the recipes through the whole pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from recipes.agent.boxes.boxes import BoxHost
from recipes.agent.images.host_layer import HOST
from recipes.agent.images.store import ImageStore
from rlinf_cli.job.load import load_with_lint
from rlinf_cli.job.no_effect import NO_EFFECT

# MiB of all boxes of a test.
BOX_MEMORY = 4096
Findings = Callable[..., list[tuple[str, str]]]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: more only wait for each other on models so small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    """Loads a text; the code and the underlined text of everything found, but for keys without effect, which have
    tests of their own (`test_no_effect.py`). `messages=True` adds the messages.
    """

    def find(text: str, *overrides: str, messages: bool = False) -> list[tuple[str, ...]]:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        job = load_with_lint(str(path), overrides, environ={})
        diagnostics = [diagnostic for diagnostic in job.diagnostics if diagnostic.code != NO_EFFECT]
        return [
            (diagnostic.code, diagnostic.span.text, *([diagnostic.message, diagnostic.help or ""] if messages else []))
            for diagnostic in diagnostics
        ]

    return find


@pytest.fixture(scope="session")
def box_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a node's boxes, with the layer `layers/host`: that of the image `rlinf/host`."""
    folder = tmp_path_factory.mktemp("boxes")

    async def make() -> None:
        store = ImageStore(BoxHost(folder, BOX_MEMORY))
        (layer,) = (await store.base(HOST)).layers
        (folder / "layers/host").symlink_to(layer)
        store.close()
        await store.boxes.close()

    async def remove() -> None:
        boxes = BoxHost(folder, BOX_MEMORY)
        assert not list((folder / "live").iterdir())
        (folder / "layers/host").unlink()
        for layer in (folder / "layers").iterdir():
            await boxes.remove(layer)
        await boxes.close()

    asyncio.run(make())
    yield folder
    asyncio.run(remove())
