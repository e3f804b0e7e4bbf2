"""Building of images: the steps of a Dockerfile in one box, whose files become a layer over those of its base."""

from __future__ import annotations

import fnmatch
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from recipes.agent.boxes.box import BoxEnded, LiveBox
from recipes.agent.boxes.boxes import MIB, BoxLimits
from recipes.agent.images.archives import load_archive
from recipes.agent.images.dockerfile import Instruction, assignments, expand, read_dockerfile, refuse
from recipes.agent.images.store import Image, ImageStore, folder_digest
from rlinf_core import ConfigError

DOCKERFILE: Final = "Dockerfile"
_IGNORED: Final = ".dockerignore"
_NOT_KEPT: Final = ("/dev", "/proc")
_MEMORY_MIB: Final = 4096
_LAST_LINES: Final = 5


def archive_of(environment: Path) -> Path:
    """Return where the archive of a task's image is, if there is one: beside the tasks, by the digest of its files."""
    return environment.parent.parent / "images" / f"{folder_digest(environment)}.tar"


async def image_of(store: ImageStore, environment: Path, named: str | None, *, seconds: float) -> Image:
    """Return the image of a task, loaded or built if it is not on this node; it is kept while this process lives.

    Args:
        environment: the folder with the Dockerfile. An archive beside the tasks comes before it (`archive_of`).
        named: the image that the task names; a Dockerfile comes before it.
        seconds: the limit of one step.

    Raises:
        ConfigError: it cannot be built here, or is not on this node.
    """
    path = environment / DOCKERFILE
    if not path.is_file():
        if named is None:
            raise ConfigError(f"`{environment}` has no Dockerfile, and task.toml names no `docker_image`")
        return await store.base(named)
    archive = archive_of(environment)
    if archive.is_file():
        name = f"rlinf/task:{archive.stem}"
        async with store.alone(archive.stem):
            if store.named(name) is None:
                await load_archive(store, archive, name)
        return await store.base(name)
    steps = read_dockerfile(path)
    arguments: dict[str, str] = {}
    for step in steps[: next(n for n, step in enumerate(steps) if step.word == "FROM")]:
        arguments |= assignments(step)
    first = next(step for step in steps if step.word == "FROM")
    base = await store.base(expand(first.text.split()[0], arguments))
    digest = folder_digest(environment, base.digest)
    async with store.alone(digest):
        image = store.find(digest)
        if image is None:
            builder = _Builder(store, environment, digest, base, seconds)
            image = store.add(await builder.build([step for step in steps if step.line > first.line]))
        return store.use(image)


class _Builder:
    """Does the steps of one Dockerfile."""

    def __init__(self, store: ImageStore, environment: Path, digest: str, base: Image, seconds: float) -> None:
        self._store, self._environment, self._digest, self._base = store, environment, digest, base
        self._seconds = seconds
        self._env, self._workdir, self._user = dict(base.env), base.workdir, base.user
        self._arguments: dict[str, str] = {}
        self._shell = ["/bin/sh", "-c"]

    async def build(self, steps: list[Instruction]) -> Image:
        """Return the image; its record is not written yet."""
        boxes, layers = self._store.boxes, self._store.layers(self._base)
        limits = BoxLimits(memory=_MEMORY_MIB * MIB, processes=4096)
        async with boxes.admission.admit(min(_MEMORY_MIB, boxes.admission.memory)), boxes.box(layers, limits) as box:
            for step in steps:
                try:
                    await self._do(box, step)
                except BoxEnded as error:
                    raise self._failed(step, str(error)) from None
            await box.finish(["/"], _NOT_KEPT)
            await self._store.take(boxes.kept(box), self._digest)
        layers_now = tuple(layer for layer in (self._digest, *self._base.layers) if layer != "empty")
        return Image(self._digest, layers_now, self._env, self._workdir, self._user)

    async def _do(self, box: LiveBox, step: Instruction) -> None:
        variables = {**self._arguments, **self._env}
        text = step._replace(text=expand(step.text, variables))
        match step.word:
            case "RUN":
                await self._run(box, step)
            case "COPY" | "ADD":
                await self._copy(box, text)
            case "WORKDIR":
                self._workdir = os.path.normpath(os.path.join(self._workdir, text.text))
                await box.put(_packed([]), self._workdir)
            case "ENV":
                self._env |= assignments(text)
            case "ARG":
                self._arguments |= assignments(text)
            case "USER":
                self._user = text.text
            case "SHELL":
                self._shell = step.words
            case _:
                return

    async def _run(self, box: LiveBox, step: Instruction) -> None:
        argv = step.listed or [*self._shell, step.text]
        env = {**self._arguments, **self._env}
        done = await box.run(argv, env=env, cwd=self._workdir, user=self._user, timeout=self._seconds)
        if done.timed_out:
            raise self._failed(step, f"it took longer than {self._seconds:g} s, `build_timeout_sec` of task.toml")
        if done.status != 0:
            said = (done.output + done.errors).decode(errors="replace").strip().splitlines()
            raise self._failed(step, "; ".join(said[-_LAST_LINES:]) or f"status {done.status}")

    def _failed(self, step: Instruction, why: str) -> ConfigError:
        return ConfigError(
            f"{self._environment / DOCKERFILE}:{step.line}: `{step.word} {step.text[:60]}` failed",
            why=why,
            help="a box has no network: what needs one is to be in the image that FROM names",
        )

    async def _copy(self, box: LiveBox, step: Instruction) -> None:
        *sources, target = step.words
        if not sources:
            raise ConfigError(f"{self._environment / DOCKERFILE}:{step.line}: {step.word} needs a source and a target")
        folder = target.endswith("/") or len(sources) > 1 or target in (".", "..")
        target = os.path.normpath(os.path.join(self._workdir, target))
        members: list[tuple[str, Path]] = []
        for source in sources:
            paths = list(self._matching(source, step))
            for path in paths:
                if path.is_dir():
                    members += [(str(inner.relative_to(path)), inner) for inner in self._below(path)]
                elif step.word == "ADD" and tarfile.is_tarfile(path):
                    await box.put(path.read_bytes(), target)
                elif folder or len(paths) > 1 or await self._is_folder(box, target):
                    members.append((path.name, path))
                else:
                    await box.put(_packed([(os.path.basename(target), path)], step), os.path.dirname(target))
                    await self._own(box, step, target)
        if members:
            await box.put(_packed(members, step), target)
            await self._own(box, step, target)

    async def _is_folder(self, box: LiveBox, path: str) -> bool:
        return path in ("/", self._workdir) or (await box.run(["test", "-d", path], cwd="/", timeout=60)).status == 0

    async def _own(self, box: LiveBox, step: Instruction, target: str) -> None:
        if owner := step.flags.get("chown"):
            done = await box.run(["chown", "-R", owner, target], cwd="/", timeout=60)
            if done.status != 0:
                raise self._failed(step, done.errors.decode(errors="replace").strip())

    def _matching(self, source: str, step: Instruction) -> Iterator[Path]:
        """Yield the files that a source names; none outside of the folder."""
        root = self._environment.resolve()
        pattern = os.path.normpath(source.lstrip("/"))
        paths = sorted(root.glob(pattern)) if any(sign in pattern for sign in "*?[") else [root / pattern]
        paths = [path for path in paths if path.exists() and not self._is_ignored(path, root)]
        if not paths or any(root not in (path.resolve(), *path.resolve().parents) for path in paths):
            refuse(
                self._environment / DOCKERFILE, step.line, f"`{source}`, which is no file below the Dockerfile's folder"
            )
        yield from paths

    def _below(self, folder: Path) -> Iterator[Path]:
        root = self._environment.resolve()
        return (path for path in sorted(folder.rglob("*")) if not self._is_ignored(path, root))

    def _is_ignored(self, path: Path, root: Path) -> bool:
        ignored = self._environment / _IGNORED
        if not ignored.is_file():
            return False
        lines = [line.strip().strip("/") for line in ignored.read_text(encoding="utf-8").splitlines()]
        if any(line.startswith("!") for line in lines):
            raise ConfigError(f"`{ignored}`: exceptions (`!`) are not known here")
        names = [str(part) for part in (path.relative_to(root), *path.relative_to(root).parents)]
        patterns = [line for line in lines if line and not line.startswith("#")]
        return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _packed(members: list[tuple[str, Path]], step: Instruction | None = None) -> bytes:
    """Return a tar archive of files, folders and links."""
    buffer = io.BytesIO()
    mode = step.flags.get("chmod") if step is not None else None
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, path in members:
            info = archive.gettarinfo(path, name)
            info.uid = info.gid = 0
            info.mode = int(mode, 8) if mode and info.isreg() else info.mode
            if info.isreg():
                with path.open("rb") as file:
                    archive.addfile(info, file)
            else:
                archive.addfile(info)
    return buffer.getvalue()
