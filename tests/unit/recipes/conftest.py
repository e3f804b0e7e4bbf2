"""Files of the recipes through the whole pipeline."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.agent.boxes.boxes import BoxHost
from recipes.agent.boxes.image_store import HOST, ImageStore
from recipes.language.sandbox import sandbox
from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.job.no_effect import NO_EFFECT

SECRET = "a secret that no program may read"
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


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What an attacker knows of this machine: a file, a variable, this process, and sockets that answer."""
    folder = tmp_path_factory.mktemp("host")
    secret = folder / "secret"
    secret.write_text(SECRET, encoding="utf-8")
    listening = socket.create_server(("127.0.0.1", 0))
    path, name = str(folder / "s"), f"rlinf-{os.getpid()}"
    unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    unix.bind(path)
    abstract.bind(f"\0{name}")
    for item in (unix, abstract):
        item.listen()
    with pytest.MonkeyPatch.context() as patch, listening, unix, abstract:
        patch.setenv("RLINF_TEST_SECRET", SECRET)
        yield {
            "secret": str(secret),
            "value": SECRET,
            "code": os.path.realpath(sandbox.__file__),
            "pid": os.getpid(),
            "port": listening.getsockname()[1],
            "address": socket.gethostbyname(socket.gethostname()),
            "socket": path,
            "abstract": name,
            "key": _secret_key(),
        }
    assert secret.read_text(encoding="utf-8") == SECRET


def _secret_key() -> int:
    """Return a key of the session that this process is in, which all its children would possess."""
    add_key, session_keyring = 248, -3
    key = ctypes.CDLL(None).syscall(add_key, b"user", b"rlinf-test", SECRET.encode(), len(SECRET), session_keyring)
    assert key > 0
    return int(key)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
