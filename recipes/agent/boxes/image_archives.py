"""Image archives of `docker save`, `podman save` and OCI tools: reading, checking, loading and saving."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, Final, NamedTuple, TypeVar, cast

from pydantic import AfterValidator, Field, RootModel, TypeAdapter, ValidationError

from recipes.agent.boxes.boxes import MOST_LAYERS
from recipes.agent.boxes.image_store import MOST_BYTES, Image, ImageStore
from rlinf_core import ConfigError
from rlinf_core.foreign.files import FileModel, check_regular, first_fault

_MOST_MEMBERS: Final = 10_000
_MOST_JSON: Final = 8 << 20
# The maximum bytes of all headers of an archive.
_MOST_HEADERS: Final = 32 << 20
_MOST_LINKS: Final = 8
_CHUNK: Final = 1 << 20
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_BLOB: Final = re.compile(r"blobs/sha256/[0-9a-f]{64}")


def _known(digest: str) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise ValueError("it is no digest that is known")
    return digest


_Digest = Annotated[str, AfterValidator(_known)]


class _Settings(FileModel):
    env: list[str] | None = Field(None, alias="Env")
    workdir: str | None = Field(None, alias="WorkingDir")
    user: str | None = Field(None, alias="User")


class _Layers(FileModel):
    diff_ids: list[_Digest]


class _Config(FileModel):
    os: str = "linux"
    architecture: str = ""
    config: _Settings | None = None
    rootfs: _Layers


class _Saved(FileModel):
    config: str = Field(alias="Config")
    layers: list[str] = Field(alias="Layers")


class _Blob(FileModel):
    digest: _Digest

    @property
    def name(self) -> str:
        return f"blobs/{self.digest.replace(':', '/')}"


class _Manifest(FileModel):
    config: _Blob
    layers: list[_Blob]


class _Platform(FileModel):
    os: str = "linux"
    architecture: str


class _Entry(_Blob):
    platform: _Platform | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it may be an image for this machine; attestations have an unknown platform."""
        platform = self.platform
        return platform is None or (platform.os, platform.architecture) == ("linux", _machine())


class _Index(FileModel):
    manifests: list[_Entry]


_Described = RootModel[_Manifest | _Index]
_M = TypeVar("_M")


class _Bounded(io.FileIO):
    """An archive file that limits the bytes read, whatever its headers say."""

    room = _MOST_HEADERS

    def read(self, size: int | None = -1, /) -> bytes:
        """See `io.FileIO`.

        Raises:
            ValueError: the read exceeds the limit.
        """
        if size is None or not 0 <= size <= self.room:
            raise ValueError("its headers are too long")
        self.room -= size
        return super().read(size) or b""


class _Archive(NamedTuple):
    """An open archive, and its members by name."""

    packed: tarfile.TarFile
    members: dict[str, tarfile.TarInfo]

    def open(self, name: str, most: int) -> IO[bytes]:
        """Return a file of at most `most` bytes; links are followed within the archive."""
        aim = name
        for _ in range(_MOST_LINKS):
            member = self.members.get(aim)
            if member is not None and member.isreg() and not member.issparse():
                if member.size > most:
                    raise ValueError(f"`{name}` has {member.size} bytes")
                return cast("IO[bytes]", self.packed.extractfile(member))
            if member is None or not member.issym():
                break
            aim = os.path.normpath(os.path.join(os.path.dirname(aim), member.linkname))
        raise ValueError(f"it has no file `{name}`")

    def read(self, name: str, kind: type[_M]) -> _M:
        """Return the parsed content of a JSON file."""
        data = self.open(name, _MOST_JSON).read(_MOST_JSON)
        if _BLOB.fullmatch(name) and hashlib.sha256(data).hexdigest() != name[-64:]:
            raise ValueError(f"`{name}` is not what its name says")
        return TypeAdapter(kind).validate_json(data)

    def described(self) -> tuple[str, list[str]]:
        """Return the file names of the configuration and of the layers, lowest layer first."""
        if "manifest.json" in self.members:
            image = _only(self.read("manifest.json", list[_Saved]))
            return os.path.normpath(image.config), [os.path.normpath(layer) for layer in image.layers]
        manifest: _Manifest | _Index = self.read("index.json", _Index)
        for _ in range(_MOST_LINKS):
            if isinstance(manifest, _Manifest):
                return manifest.config.name, [layer.name for layer in manifest.layers]
            # BuildKit lists an image, beside what attests where it comes from, in an index of its own.
            usable = [entry for entry in manifest.manifests if entry.is_usable]
            manifest = self.read(_only(usable or manifest.manifests).name, _Described).root
        raise ValueError("its indexes are nested too deep")

    def copy(self, name: str, target: IO[bytes]) -> str:
        """Copy a layer, decompressing gzip, and return its digest."""
        source = self.open(name, MOST_BYTES)
        first = source.read(4)
        source.seek(0)
        if first == _ZSTD:
            raise ValueError(f"the layer `{name}` is compressed by zstd: save the image by `podman save`, or with gzip")
        stream = cast("IO[bytes]", gzip.GzipFile(fileobj=source)) if first[:2] == b"\x1f\x8b" else source
        total, digest = 0, hashlib.sha256()
        while chunk := stream.read(_CHUNK):
            total += len(chunk)
            if total > MOST_BYTES:
                raise ValueError(f"a layer is larger than {MOST_BYTES >> 30} GiB")
            digest.update(chunk)
            target.write(chunk)
        target.flush()
        return digest.hexdigest()


@contextmanager
def _reading(archive: Path) -> Generator[_Archive]:
    """Open an archive; any failure to read its content becomes a ConfigError."""
    try:
        check_regular(archive)
        with _Bounded(archive) as file, tarfile.open(fileobj=file, mode="r:") as packed:
            members = _members(packed)
            file.room = 1 << 60
            yield _Archive(packed, members)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - an archive can be made to end its reading by whatever it likes
        why = first_fault(error) if isinstance(error, ValidationError) else str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            why = error.strerror
        raise ConfigError(f"`{archive}` is no image that can be loaded", why=why) from None


async def load_archive(store: ImageStore, archive: Path, name: str) -> Image:
    """Load an image from an archive under a name; existing layers are not unpacked again.

    Raises:
        ConfigError: the file is no archive of one image, does not match its digests, leads out of its folder, or is too
            large; or no image can have the name.
    """
    store.check_name(name)
    with _reading(archive) as opened:
        config_name, layer_names = opened.described()
        config = opened.read(config_name, _Config)
        if config.os != "linux" or config.architecture != _machine():
            system = f"{config.os}/{config.architecture}"
            raise ConfigError(f"`{archive}` is an image for {system}, and this machine is linux/{_machine()}")
        # A layer's folder is named by its digest, which depends on the layer alone.
        digests = [digest.partition(":")[2] for digest in config.rootfs.diff_ids]
        if len(digests) != len(layer_names):
            raise ConfigError(f"`{archive}` has {len(layer_names)} layers, and its configuration {len(digests)}")
        if len(digests) > MOST_LAYERS:
            raise ConfigError(f"`{archive}` has {len(digests)} layers, and a box can have {MOST_LAYERS}")
        image = _image(digests, config.config or _Settings.model_validate({}))
        async with AsyncExitStack() as locks:
            # The locks prevent the removal of layers before the image is recorded.
            for lock in sorted({*digests, image.digest}):
                await locks.enter_async_context(store.alone(lock))
            for layer_name, digest in zip(layer_names, digests, strict=True):
                await _load_layer(store, opened, layer_name, digest)
            return store.add(image, name)


def _image(digests: list[str], settings: _Settings) -> Image:
    env = {name: value for name, _, value in (line.partition("=") for line in settings.env or ())}
    layers = tuple(reversed(digests))
    identity = hashlib.sha256(json.dumps([layers, env, settings.workdir, settings.user]).encode()).hexdigest()[:24]
    workdir = os.path.normpath(os.path.join("/", settings.workdir or ""))
    return Image(digest=identity, layers=layers, env=env, workdir=workdir, user=settings.user or "")


async def _load_layer(store: ImageStore, archive: _Archive, name: str, digest: str) -> None:
    """Unpack a layer after checking its digest. The caller holds the layer's lock."""
    if (store.boxes.folder / "layers" / digest).exists():
        return
    with tempfile.TemporaryFile(dir=store.boxes.folder) as copy:
        if await asyncio.to_thread(archive.copy, name, copy) != digest:
            raise ValueError(f"the layer `{name}` is not what its digest says")
        copy.seek(0)
        await store.unpack(copy.fileno(), digest)


def _members(packed: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    members: dict[str, tarfile.TarInfo] = {}
    total = 0
    for count, member in enumerate(packed, 1):
        total += member.size
        if member.size < 0 or total > MOST_BYTES or count > _MOST_MEMBERS:
            raise ValueError(f"it is larger than {MOST_BYTES >> 30} GiB, or has more than {_MOST_MEMBERS} files")
        members[os.path.normpath(member.name)] = member
    return members


def _only(images: list[_M]) -> _M:
    if len(images) != 1:
        raise ValueError(f"it has {len(images)} images, and one is expected")
    return images[0]


async def save_archive(store: ImageStore, image: Image, archive: Path) -> int:
    """Write an image as an OCI archive, to be loaded on nodes without its base image and without a network.

    Returns:
        The size of the archive in bytes.

    Raises:
        BoxError: a layer cannot be read, or the disk is full.
    """
    part = archive.with_name(f"{archive.name}.{os.getpid()}.part")
    try:
        with tarfile.open(part, "w") as packed:
            layers = [await _save_layer(store, layer, packed) for layer in reversed(store.layers(image))]
            env = [f"{name}={value}" for name, value in image.env.items()]
            settings = {"Env": env, "WorkingDir": image.workdir, "User": image.user}
            described = {"os": "linux", "architecture": _machine(), "config": settings}
            config = _add_blob(packed, {**described, "rootfs": {"type": "layers", "diff_ids": layers}})
            manifest = {"schemaVersion": 2, "config": config, "layers": [{"digest": layer} for layer in layers]}
            _add(packed, "index.json", {"schemaVersion": 2, "manifests": [_add_blob(packed, manifest)]})
            _add(packed, "oci-layout", {"imageLayoutVersion": "1.0.0"})
        part.replace(archive)
    finally:
        part.unlink(missing_ok=True)
    return archive.stat().st_size


async def _save_layer(store: ImageStore, layer: Path, packed: tarfile.TarFile) -> str:
    with tempfile.TemporaryFile(dir=store.boxes.folder) as copy:
        await store.boxes.pack(layer, copy.fileno())
        copy.seek(0)
        digest = hashlib.file_digest(cast("Any", copy), "sha256").hexdigest()
        info = tarfile.TarInfo(f"blobs/sha256/{digest}")
        info.size = copy.tell()
        copy.seek(0)
        packed.addfile(info, copy)
    return f"sha256:{digest}"


def _add_blob(packed: tarfile.TarFile, value: object) -> dict[str, str]:
    digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    _add(packed, f"blobs/sha256/{digest}", value)
    return {"digest": f"sha256:{digest}"}


def _add(packed: tarfile.TarFile, name: str, value: object) -> None:
    data = json.dumps(value).encode()
    info = tarfile.TarInfo(name)
    info.size = len(data)
    packed.addfile(info, io.BytesIO(data))


def _machine() -> str:
    """Return this machine's architecture by its name in images."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "")
