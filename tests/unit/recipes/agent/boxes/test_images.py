"""Images: built and loaded once, by digest, and removed when nobody uses them."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.boxes.box import PATH, BoxError
from recipes.agent.boxes.boxes import BoxLimits, own_ids
from recipes.agent.boxes.image_archives import load_archive, save_archive
from recipes.agent.boxes.image_building import archive_of as place_of_archive
from recipes.agent.boxes.image_building import assignments, expand, image_of, read_dockerfile
from recipes.agent.boxes.image_store import Image, ImageStore
from rlinf_core import ConfigError
from tests.unit.recipes.agent.boxes.running import archive_of, stored
from tests.unit.recipes.agent.harbor.made_tasks import write_files

pytestmark = pytest.mark.security

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


def layer_of(*members: tuple[str, str]) -> bytes:
    return archive_of(*((name, "file", text) for name, text in members))


def load(folder: Path, path: Path) -> Any:
    """Load an archive as an image into a node's folder."""

    async def run() -> Any:
        async with stored(folder) as store:
            return await load_archive(store, path, "bad")

    return asyncio.run(run())


# A mark hides what is below its layer, whether it stands before or behind a folder of its name.
MARKED = ((".wh.e", ""), ("e/z", "z"), ("f/z", "z"), (".wh.f", ""))


async def said(store: ImageStore, image: Image, script: str) -> bytes:
    async with store.boxes.box(store.layers(image), BoxLimits(), env=image.env, workdir=image.workdir) as box:
        return (await box.run(["bash", "-c", script], user=image.user, timeout=30)).output


async def test_a_dockerfile_is_built_with_files_and_variables(box_folder: Path, tmp_path: Path) -> None:
    dockerfile = (
        "ARG BASE=host\nARG BOTH\nFROM rlinf/$BASE\nARG BASE\nENV WHO=me\nARG HOW='very well'\n"
        "ENV ALL=$HOW OF=$BASE\nWORKDIR /work/deep\nCOPY --chmod=700 a.sh /bin/a\nCOPY folder/ more/\n"
        "COPY b.txt c.txt ./\nADD packed.tar /from\nRUN echo $WHO $HOW, $ALL of $OF ${BOTH-no} > said && rm b.txt\n"
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
    # Only `**` reaches into folders.
    write_files(tmp_path, {**files, ".dockerignore": "**/*.log\nx\n*y\n", "folder/z.log": ""})
    with tarfile.open(tmp_path / "packed.tar", "w") as archive:
        archive.add(tmp_path / "b.txt", "inner/b")
    async with stored(box_folder) as store:
        image = await image_of(store, tmp_path, None, seconds=60)
        assert (image.workdir, image.env["WHO"]) == ("/work/deep", "me")
        assert await said(store, image, "a; pwd; cat said; find . -type f | sort; ls /from/inner") == (
            b"a\n/work/deep\nme very well, very well of host no\n./c.txt\n./listed\n./more/in/y\n./more/x\n./said\nb\n"
        )


@pytest.mark.skipif(own_ids()["how"] == "single", reason="this user's boxes have one id")
async def test_owners_are_those_of_copied_files_alone(box_folder: Path, tmp_path: Path) -> None:
    copies = "COPY --chown=nobody a /usr/bin/\nCOPY --chown=nobody:root in /new\nCOPY --chown=nobody in /srv/\n"
    files = {"Dockerfile": f"FROM rlinf/host\nENV PATH=/x:$PATH\nRUN mkdir -p /srv/d\n{copies}", "a": "", "in/d/b": ""}
    async with stored(box_folder) as store:
        image = await image_of(store, write_files(tmp_path, files), None, seconds=60)
        paths = "/usr/bin/a /usr/bin/bash /usr/bin /new /new/d/b /srv /srv/d/b"
        assert (await said(store, image, f"stat -c %U:%G {paths}; echo $PATH")).decode().split() == [
            *("nobody:nogroup", "root:root", "root:root", "nobody:root", "nobody:root", "root:root", "nobody:nogroup"),
            f"/x:{PATH}",
        ]


async def test_named_links_are_followed_and_empty_folders_made(box_folder: Path, tmp_path: Path) -> None:
    copies = "COPY link /one\nCOPY link a /two/\nCOPY in /three\nCOPY empty /four\nCOPY --chown=root empty /two\n"
    write_files(tmp_path, {"Dockerfile": f"FROM rlinf/host\n{copies}", "a": "text", "in/b": ""})
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "in/link").symlink_to("b")
    (tmp_path / "empty").mkdir()
    async with stored(box_folder) as store:
        image = await image_of(store, tmp_path, None, seconds=60)
        files = await said(store, image, "cat /one /two/link; find /two /three /four -printf '\\n%p %y%l'")
    lines = files.decode().splitlines()
    assert (lines[0], sorted(lines[1:])) == (
        "texttext",
        ["/four d", "/three d", "/three/b f", "/three/link lb", "/two d", "/two/a f", "/two/link f"],
    )


async def test_an_image_is_built_once_by_ten_that_ask_at_once(box_folder: Path, tmp_path: Path) -> None:
    write_files(tmp_path, {"Dockerfile": "FROM rlinf/host\nRUN cat /proc/sys/kernel/random/uuid > /id\n"})
    async with stored(box_folder) as store:
        others = [ImageStore(store.boxes) for _ in range(9)]
        images = await asyncio.gather(*(image_of(one, tmp_path, None, seconds=60) for one in (store, *others)))
        for other in others:
            other.close()
        assert (
            len({await said(store, image, "cat /id") for image in images[:2]} | {image.digest for image in images}) == 2
        )


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("FROM python:3.12\n", "`python:3.12` is not on this node"),
        ("FROM rlinf/host\nRUN echo no >&2; exit 3\n", "Dockerfile:2: `RUN echo no >&2; exit 3` failed"),
        ("FROM rlinf/host\nCOPY ../secret /\n", "no file below"),
        ("FROM rlinf/host\nCOPY missing /\n", "no file below"),
        ("FROM rlinf/host\nCOPY link /\n", "no file below"),
        ("FROM rlinf/host\nRUN sleep 600\n", "took longer than"),
        ("FROM rlinf/host\nRUN touch /x\nCOPY Dockerfile /x/\n", "Dockerfile:3: `COPY Dockerfile /x/` failed"),
        ("FROM rlinf/host\nSHELL bash\n", "written as JSON"),
        ("FROM rlinf/host\nADD --chmod=600 packed.tar /x\n", "`ADD --chmod` of an archive is not built here"),
    ],
)
async def test_what_cannot_be_built_says_where(dockerfile: str, why: str, box_folder: Path, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "environment", {"Dockerfile": dockerfile})
    (tmp_path / "secret").write_text("no")
    (folder / "link").symlink_to("../secret")
    (folder / "packed.tar").write_bytes(layer_of(("a", "1")))
    async with stored(box_folder) as store:
        with pytest.raises(ConfigError) as error:
            await image_of(store, folder, None, seconds=0.5 if "sleep" in dockerfile else 60)
    assert why in f"{error.value.message} {error.value.why}"


async def test_an_image_is_kept_while_it_is_used(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "environment", {"Dockerfile": "FROM scratch\nCOPY Dockerfile /a\n"})
    async with stored(tmp_path / "node") as store:
        image = await image_of(store, folder, None, seconds=60)
        other = ImageStore(store.boxes)
        assert image.digest not in dict(await other.prune(-1.0, delete=True))
        store.close()
        assert image.digest not in dict(await other.prune(3600.0, delete=True))
        assert image.digest in dict(await other.prune(-1.0, delete=False))
        assert other.find(image.digest) == image
        assert image.digest in dict(await other.prune(-1.0, delete=True))
        assert other.find(image.digest) is None
        assert not (tmp_path / "node/layers" / image.digest).exists()


# Archives


def write_archive(
    path: Path,
    layers: list[bytes],
    *,
    oci: bool,
    packed: bool = False,
    within: Sequence[Sequence[tuple[str, str]]] = (),
    **changed: Any,
) -> Path:
    """Write an image; one of `oci` is within indexes that list it with each of these systems and architectures."""
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
        index = {"manifests": [{"digest": blob(json.dumps(described).encode())}]}
        for platforms in within:
            named = [{"os": os_name, "architecture": machine} for os_name, machine in platforms]
            listed = [{**index["manifests"][0], "platform": platform} for platform in named]
            index = {"manifests": [{"digest": blob(json.dumps({"manifests": listed}).encode())}]}
        files["index.json"] = json.dumps(index).encode()
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
async def test_an_archive_is_loaded_with_its_layers_in_order(
    oci: bool, packed: bool, box_folder: Path, tmp_path: Path
) -> None:
    lower = layer_of(("one", "1"), ("two", "2"), ("d/x", "x"), ("d/y", "y"), ("e/x", "x"), ("f/x", "x"))
    upper = layer_of((".wh.one", ""), ("two", "second"), ("d/.wh..wh..opq", ""), ("d/z", "z"), (".wh.two", ""), *MARKED)
    path = write_archive(tmp_path / "a.tar", [lower, upper], oci=oci, packed=packed)
    async with stored(box_folder) as store:
        image = await load_archive(store, path, "loaded:1")
        assert store.named("loaded:1") == image
        assert (image.env, image.workdir, len(image.layers)) == ({"A": "b"}, "/w", 2)
        over = Image(digest="both", layers=(*image.layers, (await store.base("rlinf/host")).layers[0]))
        assert await said(store, over, "cat /two; ls /one /[def] 2>/dev/null") == b"second/d:\nz\n\n/e:\nz\n\n/f:\nz\n"


ATTESTED = [("linux", MACHINE), ("unknown", "unknown")]


@pytest.mark.parametrize(
    ("within", "why"),
    [
        ([ATTESTED], None),
        ([ATTESTED, [("linux", "s390x"), ("linux", MACHINE)]], None),
        ([[("linux", MACHINE), ("linux", MACHINE)]], "2 images"),
        ([[("linux", "s390x"), ("linux", "riscv64")]], "2 images"),
        ([ATTESTED] * 9, "nested too deep"),
    ],
)
async def test_an_image_is_found_in_indexes(within: Any, why: str | None, box_folder: Path, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.tar", [layer_of(("one", "1"))], oci=True, within=within)
    async with stored(box_folder) as store:
        if why is None:
            assert len((await load_archive(store, path, "a:1")).layers) == 1
            return
        with pytest.raises(ConfigError) as refused:
            await load_archive(store, path, "a:1")
        assert why in (refused.value.why or "")


async def test_an_image_with_many_layers_and_some_of_them_twice_starts(box_folder: Path, tmp_path: Path) -> None:
    layers = [layer_of((f"at/{number}", str(number)), ("top", str(number))) for number in range(120)]
    path = write_archive(tmp_path / "a.tar", [*layers, layers[3]], oci=False)
    async with stored(box_folder) as store:
        image = await load_archive(store, path, "many:1")
        host = (await store.base("rlinf/host")).layers
        over = Image(digest="over", layers=(*image.layers, *host))
        assert await said(store, over, "ls /at | wc -l; cat /top") == b"120\n3"


@pytest.mark.parametrize("name", ["", "scratch", "rlinf/host", "..", "x" * 300])
async def test_a_name_that_no_image_can_have_is_refused(name: str, box_folder: Path, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.tar", [layer_of(("one", "1"))], oci=False)
    async with stored(box_folder) as store:
        with pytest.raises(ConfigError, match="no image can be loaded as"):
            await load_archive(store, path, name)


@pytest.mark.parametrize("name", ["", "..", "x" * 300])
async def test_a_base_that_no_image_can_be_is_refused(name: str, box_folder: Path, tmp_path: Path) -> None:
    write_files(tmp_path, {"Dockerfile": f'ARG BASE="{name}"\nFROM $BASE\n'})
    async with stored(box_folder) as store:
        with pytest.raises(ConfigError, match="no image can be loaded as"):
            await image_of(store, tmp_path, None, seconds=60)


def test_an_image_with_too_many_layers_is_refused(box_folder: Path, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.tar", [b""] * 500, oci=False)
    with pytest.raises(ConfigError, match="500 layers, and a box can have 480"):
        load(box_folder, path)


async def test_no_layer_is_removed_before_its_image_has_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_archive(tmp_path / "a.tar", [layer_of(("one", "1")), layer_of(("two", "2"))], oci=False)
    unpack = ImageStore.unpack
    pruning: list[asyncio.Task[Any]] = []
    async with stored(tmp_path / "node") as store:
        other = ImageStore(store.boxes)

        async def unpacked(self: ImageStore, archive: int, layer: str) -> int:
            size = await unpack(self, archive, layer)
            # Of the first layer, before the second.
            pruning.append(asyncio.create_task(other.prune(-1.0, delete=True)))
            await asyncio.wait(pruning, timeout=0.3)
            return size

        monkeypatch.setattr(ImageStore, "unpack", unpacked)
        image = store.use(await load_archive(store, path, "two:1"))
        await asyncio.gather(*pruning)
        assert [
            (layer / name).read_text() for layer, name in zip(store.layers(image), ("two", "one"), strict=True)
        ] == ["2", "1"]


async def test_an_image_loaded_again_is_kept_for_its_users(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.tar", [layer_of(("one", "1"))], oci=False)
    async with stored(tmp_path / "node") as store:
        image = store.use(await load_archive(store, path, "one:1"))
        other = ImageStore(store.boxes)
        await load_archive(other, path, "another:1")
        assert await other.prune(-1.0, delete=True) == []
        assert other.named("another:1") == image


async def test_a_damaged_record_says_what_to_do(tmp_path: Path) -> None:
    async with stored(tmp_path / "node") as store:
        (store.boxes.folder / "images/a.json").write_text('{"digest": 3}')
        with pytest.raises(ConfigError, match="has an invalid value: `digest` is `3`") as error:
            store.find("a")
        assert "remove" in (error.value.help or "")


async def test_a_dockerfile_begins_from_a_loaded_image(box_folder: Path, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.tar", [layer_of(("one", "1"))], oci=False)
    folder = write_files(tmp_path / "e", {"Dockerfile": "FROM small:1\nCOPY Dockerfile /two\n"})
    async with stored(box_folder) as store:
        await load_archive(store, path, "small:1")
        image = await image_of(store, folder, None, seconds=60)
    assert (len(image.layers), image.env, image.workdir) == (2, {"A": "b"}, "/w")


@pytest.mark.nightly
async def test_an_image_is_sent_to_a_node_that_loads_it_once(box_folder: Path, tmp_path: Path) -> None:
    dockerfile = "FROM rlinf/host\nENV A=b\nRUN rm /etc/group && echo 1 > one && chmod 700 one\nUSER nobody\n"
    folder = write_files(tmp_path / "set/task/environment", {"Dockerfile": dockerfile})
    async with stored(box_folder) as store:
        image = await image_of(store, folder, None, seconds=60)
        place_of_archive(folder).parent.mkdir()
        assert await save_archive(store, image, place_of_archive(folder)) > 1 << 20
    async with stored(tmp_path / "other") as store:
        others = [ImageStore(store.boxes) for _ in range(9)]
        images = await asyncio.gather(*(image_of(one, folder, None, seconds=60) for one in (store, *others)))
        for other in others:
            other.close()
        text = await said(
            store, images[0].model_copy(update={"user": ""}), "ls /etc/group; cat /app/one; echo $A; stat -c %a one"
        )
        layers = [path.name for path in (store.boxes.folder / "layers").iterdir()]
        for layer in layers:
            await store.boxes.remove(store.boxes.folder / "layers" / layer)
    assert (len({image.digest for image in images}), text, len(layers)) == (1, b"1\nb\n700\n", 2)


async def test_a_small_image_is_the_same_on_another_node(box_folder: Path, tmp_path: Path) -> None:
    environment = write_files(
        tmp_path / "set/task/environment", {"Dockerfile": "FROM scratch\nENV A=b\nCOPY a /deep/\n"}
    )
    write_files(environment, {"a": "1"})
    async with stored(box_folder) as store:
        image = await image_of(store, environment, None, seconds=60)
        place_of_archive(environment).parent.mkdir()
        await save_archive(store, image, place_of_archive(environment))
    async with stored(tmp_path / "other") as store:
        loaded = await image_of(store, environment, None, seconds=60)
        (layer,) = store.layers(loaded)
        assert (layer / "deep/a").read_text() == "1"
        await store.boxes.remove(layer)
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
        load(box_folder, path)
    assert why in f"{error.value.message} {error.value.why}"
    assert not (box_folder / "out").exists()
    assert not list((box_folder / "layers").glob("*.part"))


def hostile(name: str, path: Path) -> None:
    """Write an archive that was made to harm whoever reads it."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:

        def add(name: str, data: bytes = b"", **facts: Any) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for fact, value in facts.items():
                setattr(info, fact, value)
            archive.addfile(info, io.BytesIO(data))

        match name:
            case "a link to a description of 9 MiB":
                add("large", b"[" * (9 << 20))
                add("manifest.json", type=tarfile.SYMTYPE, linkname="large")
            case "links in a circle":
                add("manifest.json", type=tarfile.SYMTYPE, linkname="other")
                add("other", type=tarfile.SYMTYPE, linkname="manifest.json")
            case "a description that is nested deep":
                add("manifest.json", b"[" * 100_000)
            case "no list of images":
                add("manifest.json", b'{"a": 1}')
            case "a layer that is not there":
                add("manifest.json", b'[{"Config": "c.json", "Layers": ["gone"]}]')
                layers = {"diff_ids": [f"sha256:{'0' * 64}"]}
                add("c.json", json.dumps({"os": "linux", "architecture": MACHINE, "rootfs": layers}).encode())
            case "no description":
                add("other", b"1")
            case _:
                pass
    if name in ("nothing", "two bytes of gzip", "words"):
        path.write_bytes({"nothing": b"", "two bytes of gzip": b"\x1f\x8b", "words": b"x" * 4096}[name])
    if name.startswith("a compressed layer"):
        packed = gzip.compress(layer_of(("a", os.urandom(20_000).hex())))
        damaged = packed[:9000] + (b"" if name.endswith("cut") else b"\xff" * 40 + packed[9040:])
        write_archive(path, [damaged], oci=False)
    if name == "a layer of zstd":
        write_archive(path, [b"\x28\xb5\x2f\xfd" + bytes(9)], oci=False)
    if name == "headers of 33 MiB":
        write_long_header(path, 33 << 20)


def write_long_header(path: Path, size: int) -> None:
    """Write an archive, which takes no room, with a header of some size."""
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, size
    with path.open("wb") as file:
        file.write(info.tobuf(tarfile.USTAR_FORMAT))
        file.truncate(size + (8 << 10))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a link to a description of 9 MiB", "`manifest.json` has 9437184 bytes"),
        ("links in a circle", "no file `manifest.json`"),
        ("a description that is nested deep", ""),
        ("no list of images", "it should be a valid array"),
        ("a layer that is not there", "no file `gone`"),
        ("no description", "no file `index.json`"),
        ("headers of 33 MiB", "headers are too long"),
        ("nothing", ""),
        ("two bytes of gzip", ""),
        ("words", ""),
        ("a compressed layer that was cut", ""),
        ("a compressed layer that was changed", ""),
        ("a layer of zstd", "the layer `0/layer.tar` is compressed by zstd"),
    ],
)
def test_an_archive_that_is_none_or_made_to_harm_is_refused(
    name: str, why: str, box_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.tar"
    hostile(name, path)
    with pytest.raises(ConfigError, match="no image that can be loaded") as error:
        load(box_folder, path)
    assert why in (error.value.why or "")


@pytest.mark.parametrize(
    ("facts", "why"),
    [({"mtime": "inf"}, "timestamp out of range"), ({"size": "-5"}, "more than|backwards"), ({}, "MemoryError")],
)
async def test_a_layer_whose_headers_were_made_to_harm_is_refused(
    facts: dict[str, str], why: str, box_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "layer.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a")
        info.pax_headers = facts
        archive.addfile(info)
    if not facts:
        write_long_header(path, 600 << 20)
    async with stored(box_folder) as store:
        with path.open("rb") as file, pytest.raises(BoxError, match=why) as error:
            await store.unpack(file.fileno(), "bad")
        assert "was ended" not in str(error.value)
    assert not list((box_folder / "layers").glob("bad*"))


def test_what_is_not_there_is_said_without_numbers(box_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(box_folder, tmp_path / "missing")
    assert error.value.why == "No such file or directory"


def steps_of(folder: Path, text: str) -> list[tuple[str, str, int]]:
    path = folder / "Dockerfile"
    path.write_text(text)
    return [(step.word, step.text, step.line) for step in read_dockerfile(path)]


def test_lines_are_joined_and_comments_left_out(tmp_path: Path) -> None:
    text = '# syntax\nARG V=1\nFROM base:$V\n\nrun one && \\\n # a comment\n    two \\\n    three\nCMD ["x"]\n'
    assert steps_of(tmp_path, text) == [
        ("ARG", "V=1", 2),
        ("FROM", "base:$V", 3),
        # As Docker does, with the blanks at the beginning of a line.
        ("RUN", "one &&     two     three", 5),
        ("CMD", '["x"]', 9),
    ]


def test_blanks_of_any_kind_part_words(tmp_path: Path) -> None:
    text = "\ufefffrom\tbase\r\nRUN install\\\n  one\\\n\ttwo\u2028\x0c2\n"
    assert steps_of(tmp_path, text) == [("FROM", "base", 1), ("RUN", "install  one\ttwo\u2028\x0c2", 2)]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("FROM other", "several stages"),
        ("RUN --mount=type=cache,target=/x true", "RUN --mount"),
        ("COPY --from=other /a /b", "COPY --from"),
        ("ADD https://example.org/a.tar /", "no network"),
        ("RUN <<EOF", "a text within the Dockerfile"),
        ("ONBUILD RUN true", "ONBUILD"),
        ("INSTALL x", "INSTALL"),
        ("RUN", "`RUN` without arguments"),
        ("USER  ", "`USER` without arguments"),
        ("ENV A='one two", "`'one two`, which has no end,"),
        ("ENV A=${B%%.*}", "the variable"),
        ("COPY --chmod=u+x a /a", r"COPY --chmod=u\+x"),
    ],
)
def test_what_is_not_built_here_is_refused_by_its_line(line: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        steps_of(tmp_path, f"FROM base\n{line}\n")
    assert "Dockerfile:2:" in error.value.message
    assert "rlinf tasks load" in (error.value.help or "")


def test_a_file_without_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not begin with FROM"):
        steps_of(tmp_path, "RUN true\n")
    with pytest.raises(ConfigError, match="`FROM` without arguments"):
        steps_of(tmp_path, "FROM\n")


def test_variables_are_expanded_as_docker_does() -> None:
    known = {"A": "1", "EMPTY": ""}
    text = "$A ${A} ${B:-two} ${EMPTY:-three} ${A:+four} ${B:+five} \\$A $B"
    assert expand(text, known) == "1 1 two three four  $A "
    assert expand("${EMPTY-a}${B-b}${EMPTY+c}${B+d}$", known) == "bc$"
    assert expand("""'$A'"$A \\$A \\n"x\\ y""", known) == "$A1 $A \\nx y"


def test_values_with_blanks_are_one_word(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(
        "FROM base\nENV A=1 B=\"two words\"\nENV C three 'f our'\nENV I\tone\ttwo=2\n"
        "ARG D E=\nENV F=$X G=a\\ b H='$X'\n"
        'COPY $X [$X] /$X/\nCOPY ["$X", "a b"]\n'
    )
    known = {"X": "x y"}
    *variables, copy, listed = read_dockerfile(path)[1:]
    assert [assignments(step, known) for step in variables] == [
        {"A": "1", "B": "two words"},
        {"C": "three f our"},
        {"I": "one\ttwo=2"},
        {"D": None, "E": ""},
        {"F": "x y", "G": "a b", "H": "$X"},
    ]
    assert copy.words(known) == ["x y", "[x y]", "/x y/"]
    assert listed.words(known) == ["x y", "a b"]
