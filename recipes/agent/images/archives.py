"""Archives of images, as `docker save`, `podman save` and tools of OCI write them; read, checked and loaded."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Any, Final, cast

from recipes.agent.boxes.box import BoxError
from recipes.agent.images.store import MOST_BYTES, Image, ImageStore
from rlinf_core import ConfigError

_MOST_MEMBERS: Final = 10_000
_MOST_JSON: Final = 8 << 20
_CHUNK: Final = 1 << 20
_BLOB: Final = re.compile(r"blobs/sha256/[0-9a-f]{64}")


async def load_archive(store: ImageStore, archive: Path, name: str) -> Image:
    """Load an image from an archive under a name; a layer that is here already is not unpacked again.

    Raises:
        ConfigError: it is no archive of one image, does not fit its own digests, leads out, or is too large.
    """
    try:
        with tarfile.open(archive, mode="r:") as packed:
            return await _loaded(store, packed, archive, name)
    except (OSError, tarfile.TarError, ValueError, LookupError, TypeError, AttributeError, BoxError) as error:
        raise ConfigError(f"`{archive}` is no image that can be loaded", why=str(error)) from None


async def save_archive(store: ImageStore, image: Image, archive: Path) -> int:
    """Write an image as an archive of OCI, which nodes load that have neither its Dockerfile's base nor a network.

    Returns:
        The bytes of the archive.

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
        digest = _digest(copy)
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
    """Return this machine's architecture as images name it."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "")


async def _loaded(store: ImageStore, packed: tarfile.TarFile, archive: Path, name: str) -> Image:
    members = _members(packed)
    config_name, layer_names = _described(packed, members)
    config: Any = json.loads(_text(packed, members, config_name))
    system, machine = config.get("os", "linux"), config.get("architecture", "")
    if system != "linux" or machine != _machine():
        raise ConfigError(f"`{archive}` is an image for {system}/{machine}, and this machine is linux/{_machine()}")
    digests: list[str] = config["rootfs"]["diff_ids"]
    if len(digests) != len(layer_names):
        raise ConfigError(f"`{archive}` has {len(layer_names)} layers, and its configuration {len(digests)}")
    for layer_name, digest in zip(layer_names, digests, strict=True):
        await _load_layer(store, packed, members[layer_name], digest)
    settings: dict[str, Any] = config.get("config") or {}
    lines: list[str] = settings.get("Env") or []
    env = {name: value for name, _, value in (str(line).partition("=") for line in lines)}
    layers = tuple(_layer(digest) for digest in reversed(digests))
    identity = hashlib.sha256(json.dumps([layers, env, settings.get("WorkingDir"), settings.get("User")]).encode())
    workdir, user = str(settings.get("WorkingDir") or "/"), str(settings.get("User") or "")
    return store.add(Image(identity.hexdigest()[:24], layers, env, workdir, user), name)


def _members(packed: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    members: dict[str, tarfile.TarInfo] = {}
    total = 0
    for count, member in enumerate(packed, 1):
        total += member.size
        if total > MOST_BYTES or count > _MOST_MEMBERS:
            raise ValueError(f"it is larger than {MOST_BYTES >> 30} GiB, or has more than {_MOST_MEMBERS} files")
        members[os.path.normpath(member.name)] = member
    return members


def _described(packed: tarfile.TarFile, members: dict[str, tarfile.TarInfo]) -> tuple[str, list[str]]:
    """Return the names of the configuration and of the layers, lowest first."""
    if "manifest.json" in members:
        images: list[Any] = json.loads(_text(packed, members, "manifest.json"))
        if len(images) != 1:
            raise ValueError(f"it has {len(images)} images, and one is expected")
        return os.path.normpath(images[0]["Config"]), [os.path.normpath(layer) for layer in images[0]["Layers"]]
    manifests: list[Any] = json.loads(_text(packed, members, "index.json"))["manifests"]
    if len(manifests) != 1:
        raise ValueError(f"it has {len(manifests)} images, and one is expected")
    manifest: Any = json.loads(_text(packed, members, _blob(manifests[0]["digest"])))
    return _blob(manifest["config"]["digest"]), [_blob(layer["digest"]) for layer in manifest["layers"]]


def _blob(digest: str) -> str:
    name = f"blobs/{digest.replace(':', '/')}"
    if not _BLOB.fullmatch(name):
        raise ValueError(f"`{digest}` is no digest that is known")
    return name


def _text(packed: tarfile.TarFile, members: dict[str, tarfile.TarInfo], name: str) -> bytes:
    member = members[name]
    if member.size > _MOST_JSON:
        raise ValueError(f"`{name}` has {member.size} bytes")
    data = _stream(packed, member).read()
    if _BLOB.fullmatch(name) and hashlib.sha256(data).hexdigest() != name[-64:]:
        raise ValueError(f"`{name}` is not what its name says")
    return data


def _stream(packed: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    stream = packed.extractfile(member) if member.isreg() or member.issym() else None
    if stream is None:
        raise ValueError(f"`{member.name}` is no file")
    return stream


def _layer(digest: str) -> str:
    """Return the name of a layer's folder: its digest, which nothing but the layer decides."""
    _blob(digest)
    return digest.partition(":")[2]


async def _load_layer(store: ImageStore, packed: tarfile.TarFile, member: tarfile.TarInfo, digest: str) -> None:
    """Unpack a layer once its bytes are what its digest says."""
    name = _layer(digest)
    async with store.alone(name):
        if (store.boxes.folder / "layers" / name).exists():
            return
        with tempfile.TemporaryFile(dir=store.boxes.folder) as copy:
            _copy(_stream(packed, member), copy)
            if _digest(copy) != name:
                raise ValueError(f"the layer `{member.name}` is not what its digest says")
            copy.seek(0)
            await store.unpack(copy.fileno(), name)


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    """Copy a layer, and unpack it where it is compressed by gzip."""
    first = source.read(2)
    source.seek(0)
    stream = cast("IO[bytes]", gzip.GzipFile(fileobj=source)) if first == b"\x1f\x8b" else source
    total = 0
    while chunk := stream.read(_CHUNK):
        total += len(chunk)
        if total > MOST_BYTES:
            raise ValueError(f"a layer is larger than {MOST_BYTES >> 30} GiB")
        target.write(chunk)
    target.flush()


def _digest(file: IO[bytes]) -> str:
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
