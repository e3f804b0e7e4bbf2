"""Images: built and loaded once, by digest, and removed when nobody uses them."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.boxes.boxes import BoxHost, BoxLimits
from recipes.agent.images.archives import load_archive, save_archive
from recipes.agent.images.building import archive_of, image_of
from recipes.agent.images.store import Image, ImageStore
from rlinf_core import ConfigError
from tests.unit.recipes.agent.harbor.made_tasks import write_files

pytestmark = pytest.mark.security

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


def with_store(folder: Path, act: Callable[[ImageStore], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        boxes = BoxHost(folder, 4096)
        store = ImageStore(boxes)
        try:
            async with asyncio.timeout(60):
                return await act(store)
        finally:
            store.close()
            await boxes.close()

    return asyncio.run(run())


async def said(store: ImageStore, image: Image, script: str) -> bytes:
    async with store.boxes.box(store.layers(image), BoxLimits(), env=image.env, workdir=image.workdir) as box:
        return (await box.run(["bash", "-c", script], user=image.user, timeout=30)).output


def test_a_dockerfile_is_built_with_files_and_variables(box_folder: Path, tmp_path: Path) -> None:
    dockerfile = (
        "ARG BASE=host\nFROM rlinf/$BASE\nENV WHO=me\nARG HOW=well\nWORKDIR /work/deep\nCOPY --chmod=700 a.sh /bin/a\n"
        "COPY folder/ more/\nCOPY b.txt c.txt ./\nADD packed.tar /from\nRUN echo $WHO $HOW > said && rm b.txt\n"
        'RUN ["touch", "listed"]\nCMD ["bash"]\n'
    )
    files = {
        "Dockerfile": dockerfile,
        "a.sh": "echo a\n",
        "folder/x": "1",
        "folder/in/y": "2",
        "b.txt": "",
        "c.txt": "",
    }
    write_files(tmp_path, {**files, ".dockerignore": "*.log\n", "folder/z.log": ""})
    with tarfile.open(tmp_path / "packed.tar", "w") as archive:
        archive.add(tmp_path / "b.txt", "inner/b")

    async def act(store: ImageStore) -> bytes:
        image = await image_of(store, tmp_path, None, seconds=60)
        assert (image.workdir, image.env["WHO"]) == ("/work/deep", "me")
        return await said(store, image, "a; pwd; cat said; find . -type f | sort; ls /from/inner")

    assert with_store(box_folder, act) == (
        b"a\n/work/deep\nme well\n./c.txt\n./listed\n./more/in/y\n./more/x\n./said\nb\n"
    )


def test_an_image_is_built_once_by_ten_that_ask_at_once(box_folder: Path, tmp_path: Path) -> None:
    write_files(tmp_path, {"Dockerfile": "FROM rlinf/host\nRUN cat /proc/sys/kernel/random/uuid > /id\n"})

    async def act(store: ImageStore) -> set[bytes]:
        others = [ImageStore(store.boxes) for _ in range(9)]
        images = await asyncio.gather(*(image_of(one, tmp_path, None, seconds=60) for one in (store, *others)))
        for other in others:
            other.close()
        return {await said(store, image, "cat /id") for image in images[:2]} | {image.digest for image in images}

    assert len(with_store(box_folder, act)) == 2


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("FROM python:3.12\n", "`python:3.12` is not on this node"),
        ("FROM rlinf/host\nRUN echo no >&2; exit 3\n", "Dockerfile:2: `RUN echo no >&2; exit 3` failed"),
        ("FROM rlinf/host\nCOPY ../secret /\n", "no file below"),
        ("FROM rlinf/host\nCOPY missing /\n", "no file below"),
        ("FROM rlinf/host\nCOPY link /\n", "no file below"),
        ("FROM rlinf/host\nRUN sleep 600\n", "took longer than"),
    ],
)
def test_what_cannot_be_built_says_where(dockerfile: str, why: str, box_folder: Path, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "environment", {"Dockerfile": dockerfile})
    (tmp_path / "secret").write_text("no")
    (folder / "link").symlink_to("../secret")
    with pytest.raises(ConfigError) as error:
        with_store(
            box_folder, lambda store: image_of(store, folder, None, seconds=0.5 if "sleep" in dockerfile else 60)
        )
    assert why in f"{error.value.message} {error.value.why}"


def test_an_image_is_kept_while_it_is_used(tmp_path: Path) -> None:
    node, folder = (
        tmp_path / "node",
        write_files(tmp_path / "environment", {"Dockerfile": "FROM scratch\nCOPY Dockerfile /a\n"}),
    )

    async def act(store: ImageStore) -> None:
        image = await image_of(store, folder, None, seconds=60)
        other = ImageStore(store.boxes)
        assert image.digest not in dict(await other.prune(-1.0, delete=True))
        store.close()
        assert image.digest not in dict(await other.prune(3600.0, delete=True))
        assert image.digest in dict(await other.prune(-1.0, delete=False))
        assert other.find(image.digest) == image
        assert image.digest in dict(await other.prune(-1.0, delete=True))
        assert other.find(image.digest) is None
        assert not (node / "layers" / image.digest).exists()

    with_store(node, act)


# Archives


def layer_of(*members: tuple[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in members:
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def write_archive(path: Path, layers: list[bytes], *, oci: bool, packed: bool = False, **changed: Any) -> Path:
    digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    blobs = [gzip.compress(layer) if packed else layer for layer in layers]
    config = {
        "os": "linux",
        "architecture": MACHINE,
        "config": {"Env": ["A=b"], "WorkingDir": "/w"},
        "rootfs": {"diff_ids": digests},
        **changed,
    }
    files: dict[str, bytes] = {}

    def blob(data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        files[f"blobs/sha256/{digest}"] = data
        return f"sha256:{digest}"

    if oci:
        described = {
            "config": {"digest": blob(json.dumps(config).encode())},
            "layers": [{"digest": blob(b)} for b in blobs],
        }
        files["index.json"] = json.dumps({"manifests": [{"digest": blob(json.dumps(described).encode())}]}).encode()
    else:
        names = [f"{number}/layer.tar" for number in range(len(blobs))]
        files |= {"c.json": json.dumps(config).encode(), **dict(zip(names, blobs, strict=True))}
        files["manifest.json"] = json.dumps([{"Config": "c.json", "Layers": names}]).encode()
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("oci", "packed"), [(True, True), pytest.param(True, False, marks=pytest.mark.nightly), (False, False)]
)
def test_an_archive_is_loaded_with_its_layers_in_order(
    oci: bool, packed: bool, box_folder: Path, tmp_path: Path
) -> None:
    lower = layer_of(("one", "1"), ("two", "2"), ("d/x", "x"), ("d/y", "y"))
    upper = layer_of((".wh.one", ""), ("two", "second"), ("d/.wh..wh..opq", ""), ("d/z", "z"))
    path = write_archive(tmp_path / "a.tar", [lower, upper], oci=oci, packed=packed)

    async def act(store: ImageStore) -> bytes:
        image = await load_archive(store, path, "loaded:1")
        assert store.named("loaded:1") == image
        assert (image.env, image.workdir, len(image.layers)) == ({"A": "b"}, "/w", 2)
        over = Image("both", (*image.layers, (await store.base("rlinf/host")).layers[0]))
        return await said(store, over, "cat /two; ls /one /d 2>/dev/null")

    assert with_store(box_folder, act) == b"second/d:\nz\n"


def test_a_dockerfile_begins_from_a_loaded_image(box_folder: Path, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.tar", [layer_of(("one", "1"))], oci=False)
    folder = write_files(tmp_path / "e", {"Dockerfile": "FROM small:1\nCOPY Dockerfile /two\n"})

    async def act(store: ImageStore) -> Image:
        await load_archive(store, path, "small:1")
        return await image_of(store, folder, None, seconds=60)

    image = with_store(box_folder, act)
    assert (len(image.layers), image.env, image.workdir) == (2, {"A": "b"}, "/w")


@pytest.mark.nightly
def test_an_image_is_sent_to_a_node_that_loads_it_once(box_folder: Path, tmp_path: Path) -> None:
    dockerfile = "FROM rlinf/host\nENV A=b\nRUN rm /etc/group && echo 1 > one && chmod 700 one\nUSER nobody\n"
    folder = write_files(tmp_path / "set/task/environment", {"Dockerfile": dockerfile})

    async def save(store: ImageStore) -> int:
        image = await image_of(store, folder, None, seconds=60)
        archive_of(folder).parent.mkdir()
        return await save_archive(store, image, archive_of(folder))

    async def first_uses(store: ImageStore) -> tuple[set[str], bytes, list[str]]:
        others = [ImageStore(store.boxes) for _ in range(9)]
        images = await asyncio.gather(*(image_of(one, folder, None, seconds=60) for one in (store, *others)))
        for other in others:
            other.close()
        text = await said(store, replace(images[0], user=""), "ls /etc/group; cat /app/one; echo $A; stat -c %a one")
        layers = [path.name for path in (store.boxes.folder / "layers").iterdir()]
        for layer in layers:
            await store.boxes.remove(store.boxes.folder / "layers" / layer)
        return {image.digest for image in images}, text, layers

    size = with_store(box_folder, save)
    digests, text, layers = with_store(tmp_path / "other", first_uses)
    assert size > 1 << 20
    assert (len(digests), text, len(layers)) == (1, b"1\nb\n700\n", 2)


def test_a_small_image_is_the_same_on_another_node(box_folder: Path, tmp_path: Path) -> None:
    environment = write_files(
        tmp_path / "set/task/environment", {"Dockerfile": "FROM scratch\nENV A=b\nCOPY a /deep/\n"}
    )
    write_files(environment, {"a": "1"})

    async def save(store: ImageStore) -> Image:
        image = await image_of(store, environment, None, seconds=60)
        archive_of(environment).parent.mkdir()
        await save_archive(store, image, archive_of(environment))
        return image

    async def load(store: ImageStore) -> tuple[Image, str]:
        image = await image_of(store, environment, None, seconds=60)
        (layer,) = store.layers(image)
        text = (layer / "deep/a").read_text()
        await store.boxes.remove(layer)
        return image, text

    image = with_store(box_folder, save)
    loaded, text = with_store(tmp_path / "other", load)
    assert text == "1"
    assert (loaded.env, loaded.workdir) == (image.env, image.workdir) == ({"A": "b"}, "/")


@pytest.mark.parametrize(
    ("layer", "changed", "why"),
    [
        (layer_of(("../out", "1")), {}, "leads out"),
        (layer_of(("a", "1")), {"rootfs": {"diff_ids": [f"sha256:{'0' * 64}"]}}, "not what its digest says"),
        (layer_of(("a", "1")), {"rootfs": {"diff_ids": ["sha256:../../x"]}}, "no digest that is known"),
        (layer_of(("a", "1")), {"rootfs": {"diff_ids": []}}, "has 1 layers"),
        (layer_of(("a", "1")), {"architecture": "s390x"}, "linux/s390x"),
        (b"no archive", {}, "that can be loaded"),
    ],
)
def test_an_archive_that_is_not_what_it_says_is_refused(
    layer: bytes, changed: dict[str, Any], why: str, box_folder: Path, tmp_path: Path
) -> None:
    path = write_archive(tmp_path / "a.tar", [layer], oci=False, **changed)
    with pytest.raises(ConfigError) as error:
        with_store(box_folder, lambda store: load_archive(store, path, "bad"))
    assert why in f"{error.value.message} {error.value.why}"
    assert not (box_folder / "out").exists()
    assert not list((box_folder / "layers").glob("*.part"))


@pytest.mark.parametrize("text", [b"", b"\x1f\x8b", b"x" * 4096])
def test_what_is_no_archive_is_refused(text: bytes, box_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="no image that can be loaded"):
        with_store(box_folder, lambda store: load_archive(store, path, "bad"))
