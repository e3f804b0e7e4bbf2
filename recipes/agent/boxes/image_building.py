"""Building of images: a Dockerfile's steps run in one box, whose files become a layer over the base image.

What a box without a network cannot build is rejected with its line.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, NoReturn, cast

from recipes.agent.boxes.box import PATH, BoxEnded, BoxError, LiveBox
from recipes.agent.boxes.boxes import MIB, BoxLimits
from recipes.agent.boxes.image_archives import load_archive
from recipes.agent.boxes.image_store import Image, ImageStore, folder_digest
from rlinf_core import ConfigError
from rlinf_core.foreign.files import read_fault, read_text

_DOCKERFILE: Final = "Dockerfile"
_IGNORED: Final = ".dockerignore"
_NOT_KEPT: Final = ("/dev", "/proc")
_MEMORY_MIB: Final = 4096
_MOST_FILES: Final = 1 << 20
_LAST_LINES: Final = 5


def archive_of(environment: Path) -> Path:
    """Return the path of an archive of a task's image: beside the tasks, named by the digest of its files."""
    return environment.parent.parent / "images" / f"{folder_digest(environment)}.tar"


async def image_of(store: ImageStore, environment: Path, named: str | None, *, seconds: float) -> Image:
    """Return a task's image, loaded or built if this node lacks it; it is kept while this process lives.

    Args:
        environment: the folder with the Dockerfile. An archive beside the tasks takes precedence (`archive_of`).
        named: the image that the task names; a Dockerfile takes precedence.
        seconds: the time limit of one step.

    Raises:
        ConfigError: the image cannot be built here, or is not on this node.
    """
    path = environment / _DOCKERFILE
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
    start = next(number for number, step in enumerate(steps) if step.word == "FROM")
    defaults: dict[str, str] = {}
    for step in steps[:start]:
        _declare(step, defaults, {})
    base = await store.base(steps[start].words(defaults)[0])
    digest = folder_digest(environment, base.digest)
    async with store.alone(digest):
        image = store.find(digest)
        if image is None:
            builder = _Builder(store, environment, digest, base, seconds, defaults)
            image = store.add(await builder.build(steps[start + 1 :]))
        return store.use(image)


def _declare(step: _Instruction, arguments: dict[str, str], defaults: Mapping[str, str]) -> None:
    """Set the arguments of an `ARG`: without a value, one gets that of the `ARG` before `FROM`, or keeps its own."""
    for name, value in assignments(step, arguments).items():
        known = defaults.get(name) if value is None else value
        if known is not None:
            arguments[name] = known


class _Builder:
    """Runs the steps of one Dockerfile."""

    def __init__(
        self,
        store: ImageStore,
        environment: Path,
        digest: str,
        base: Image,
        seconds: float,
        defaults: Mapping[str, str],
    ) -> None:
        self._store, self._environment, self._digest, self._base = store, environment, digest, base
        self._seconds = seconds
        self._env, self._workdir, self._user = dict(base.env), base.workdir, base.user
        self._arguments, self._defaults = dict[str, str](), defaults
        self._root, self._ignored = environment.resolve(), _ignored(environment / _IGNORED)
        self._shell = ["/bin/sh", "-c"]

    async def build(self, steps: list[_Instruction]) -> Image:
        """Build and return the image, without writing its record."""
        boxes, layers = self._store.boxes, self._store.layers(self._base)
        mib = min(_MEMORY_MIB, boxes.admission.memory)
        limits = BoxLimits(memory=mib * MIB, processes=4096, files=_MOST_FILES)
        async with boxes.admission.admit(mib), boxes.box(layers, limits) as box:
            for step in steps:
                try:
                    await self._do(box, step)
                except (BoxEnded, BoxError) as error:
                    raise self._failed(step, str(error)) from None
            await box.finish(["/"], _NOT_KEPT)
            await self._store.take(boxes.kept(box), self._digest)
        layers_now = tuple(layer for layer in (self._digest, *self._base.layers) if layer != "empty")
        return Image(digest=self._digest, layers=layers_now, env=self._env, workdir=self._workdir, user=self._user)

    async def _do(self, box: LiveBox, step: _Instruction) -> None:
        variables = {"PATH": PATH, **self._arguments, **self._env}
        match step.word:
            case "RUN":
                await self._run(box, step)
            case "COPY" | "ADD":
                await self._copy(box, step, step.words(variables))
            case "WORKDIR":
                self._workdir = os.path.normpath(os.path.join(self._workdir, expand(step.text, variables)))
                await box.put_files([], self._workdir)
            case "ENV":
                self._env |= {name: value or "" for name, value in assignments(step, variables).items()}
            case "ARG":
                _declare(step, self._arguments, self._defaults)
            case "USER":
                self._user = expand(step.text, variables)
            case "SHELL":
                if step.listed is None:
                    raise self._failed(step, "its words are to be written as JSON")
                self._shell = step.listed
            case _:
                return

    async def _run(self, box: LiveBox, step: _Instruction) -> None:
        argv = step.listed or [*self._shell, step.text]
        env = {**self._arguments, **self._env}
        done = await box.run(argv, env=env, cwd=self._workdir, user=self._user, timeout=self._seconds)
        if done.timed_out:
            raise self._failed(step, f"it took longer than {self._seconds:g} s, `build_timeout_sec` of task.toml")
        if done.status != 0:
            said = (done.output + done.errors).decode(errors="replace").strip().splitlines()
            raise self._failed(step, "; ".join(said[-_LAST_LINES:]) or f"status {done.status}")

    def _failed(self, step: _Instruction, why: str) -> ConfigError:
        return ConfigError(
            f"{self._environment / _DOCKERFILE}:{step.line}: `{step.word} {step.text[:60]}` failed",
            why=why,
            help="a box has no network: what needs one is to be in the image that FROM names",
        )

    async def _copy(self, box: LiveBox, step: _Instruction, words: list[str]) -> None:
        *sources, target = words or [""]
        if not sources:
            raise self._failed(step, "it needs a source and a target")
        folder = target.endswith("/") or len(sources) > 1 or target in (".", "..")
        target = os.path.normpath(os.path.join(self._workdir, target))
        members: list[tuple[str, Path]] = []
        into = False  # whether the target is a folder
        for source in sources:
            paths = list(self._matching(source, step))
            for path in paths:
                if path.is_dir():
                    into = True
                    members += [(str(inner.relative_to(path)), inner) for inner in self._below(path)]
                elif step.word == "ADD" and tarfile.is_tarfile(path):
                    for flag in step.flags:
                        _refuse(self._environment / _DOCKERFILE, step.line, f"`ADD --{flag}` of an archive")
                    with path.open("rb") as archive:
                        await box.put(archive, target)
                elif folder or len(paths) > 1 or await self._is_folder(box, target):
                    into = True
                    members.append((path.name, path.resolve()))
                else:
                    member = os.path.basename(target), path.resolve()
                    await self._put(box, step, [member], os.path.dirname(target), [target])
        if into:
            tops = sorted({os.path.join(target, name.partition("/")[0]) for name, _ in members})
            # What was in the folder before keeps its owner.
            was_there = "chown" in step.flags and await self._is_folder(box, target)
            await self._put(box, step, members, target, tops if was_there else [target])

    async def _is_folder(self, box: LiveBox, path: str) -> bool:
        return path in ("/", self._workdir) or (await box.run(["test", "-d", path], cwd="/", timeout=60)).status == 0

    async def _put(
        self, box: LiveBox, step: _Instruction, members: list[tuple[str, Path]], folder: str, owned: list[str]
    ) -> None:
        mode = step.flags.get("chmod")
        await box.put_files(members, folder, None if mode is None else int(mode, 8))
        if owned and (owner := step.flags.get("chown")):
            owner = expand(owner, {**self._arguments, **self._env})
            # Without a group, a name has that of its login, and a number the same one, as in Docker.
            owner = owner if ":" in owner else f"{owner}:{owner if owner.isdigit() else ''}"
            done = await box.run(["chown", "-hR", owner, *owned], cwd="/", timeout=60)
            if done.status != 0:
                raise self._failed(step, done.errors.decode(errors="replace").strip())

    def _matching(self, source: str, step: _Instruction) -> Iterator[Path]:
        """Yield the files that a source names, all within the folder."""
        pattern = os.path.normpath(source.lstrip("/"))
        paths = sorted(self._root.glob(pattern)) if any(sign in pattern for sign in "*?[") else [self._root / pattern]
        paths = [path for path in paths if path.exists() and not self._is_ignored(path)]
        if not paths or any(self._root not in (path.resolve(), *path.resolve().parents) for path in paths):
            _refuse(
                self._environment / _DOCKERFILE,
                step.line,
                f"`{source}`, which is no file below the Dockerfile's folder",
            )
        yield from paths

    def _below(self, folder: Path) -> Iterator[Path]:
        return (path for path in sorted(folder.rglob("*")) if not self._is_ignored(path))

    def _is_ignored(self, path: Path) -> bool:
        inner = path.relative_to(self._root).parts
        return any(_is_below(inner, pattern) for pattern in self._ignored)


def _is_below(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Return whether a path, by its names, is or is below one that a pattern matches; only `**` matches several."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_is_below(names[start:], pattern[1:]) for start in range(len(names) + (len(pattern) > 1)))
    return bool(names) and fnmatch.fnmatchcase(names[0], pattern[0]) and _is_below(names[1:], pattern[1:])


def _ignored(path: Path) -> list[tuple[str, ...]]:
    """Return the patterns of a `.dockerignore`, by their names."""
    try:
        lines = [line.strip().strip("/") for line in read_text(path).splitlines()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"`{path}` {read_fault(error)}") from None
    if any(line.startswith("!") for line in lines):
        raise ConfigError(f"`{path}`: exceptions (`!`) are not known here")
    patterns = (PurePosixPath(line).parts for line in lines if not line.startswith("#"))
    return [pattern for pattern in patterns if pattern]


_BUILT: Final = ("FROM", "RUN", "COPY", "ADD", "WORKDIR", "ENV", "ARG", "USER", "SHELL")
# Variables are replaced in these; in RUN, the shell does it.
_EXPANDED: Final = ("FROM", "COPY", "ADD", "WORKDIR", "ENV", "ARG", "USER")
# These set how a container starts, which boxes ignore.
_WITHOUT_EFFECT: Final = (
    *("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"),
)
_FLAG: Final = re.compile(r"--([a-z-]+)=(\S+)\s*")
_PIECE: Final = re.compile(
    r"""(?P<blank>\s+)|'(?P<literal>[^']*)'|"(?P<quoted>(?:[^"\\]|\\.)*)"|\\(?P<escaped>.)"""
    r"""|(?P<variable>\$\w+|\$\{[^}]*\})|(?P<plain>[^\s'"\\$]+|\$(?!\{))""",
    re.DOTALL,
)
_VARIABLE: Final = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?)([-+])(.*))?\})", re.DOTALL)
# Escapes and variables between quotes.
_QUOTED: Final = re.compile(r"""\\(["\\$])|(\$\w+|\$\{[^}]*\})""")
_MODE: Final = re.compile(r"[0-7]{3,4}")
_ELSEWHERE: Final = (
    "build it where there is docker or podman, save it by `docker save` or `podman save`, load it by"
    ' `rlinf tasks load ARCHIVE NAME`, and write `docker_image = "NAME"` into the section `[environment]` of task.toml'
)


class _Instruction(NamedTuple):
    """An instruction of a Dockerfile.

    Attributes:
        word: the first word, in capitals.
        text: the rest, without flags.
        flags: the values of the flags.
        line: the number of its first line.
    """

    word: str
    text: str
    flags: Mapping[str, str]
    line: int

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """Return the words of the JSON form, or those separated by blanks, with variables replaced.

        Raises:
            ValueError: a quotation has no end, or a variable is in an unknown form.
        """
        listed = self.listed
        return _split(self.text, variables) if listed is None else [expand(word, variables) for word in listed]

    @property
    def listed(self) -> list[str] | None:
        """The words of the JSON form; None: another form."""
        if not self.text.startswith("["):
            return None
        try:
            words: object = json.loads(self.text)
        except ValueError:
            return None
        if isinstance(words, list) and all(isinstance(word, str) for word in cast("list[object]", words)):
            return cast("list[str]", words)
        return None


def read_dockerfile(path: Path) -> list[_Instruction]:
    """Return the instructions of a Dockerfile that can be built here.

    Raises:
        ConfigError: the file cannot be read, or has an unsupported instruction.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` cannot be read", why=str(error)) from None
    steps: list[_Instruction] = []
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        first, words = number + 1, lines[number].strip()
        number += 1
        if first == 1 and re.match(r"#\s*escape\s*=", words):
            _refuse(path, first, "another escape character")
        if not words or words.startswith("#"):
            continue
        while words.endswith("\\") and number < len(lines):
            following = lines[number].rstrip()
            number += 1
            # The blanks before a line's words part them from the line before.
            if following and not following.lstrip().startswith("#"):
                words = f"{words[:-1]}{following}"
        steps.append(_step(path, first, words))
    froms = [step for step in steps if step.word == "FROM"]
    if not froms or next(step.word for step in steps if step.word != "ARG") != "FROM":
        raise ConfigError(f"`{path}` does not begin with FROM")
    if len(froms) > 1:
        _refuse(path, froms[1].line, "several stages")
    return steps


def _step(path: Path, line: int, words: str) -> _Instruction:
    word, rest = (*words.split(None, 1), "")[:2]
    word = word.upper()
    if word not in (*_BUILT, *_WITHOUT_EFFECT):
        _refuse(path, line, f"`{word}`")
    if word in _BUILT and not rest:
        _refuse(path, line, f"`{word}` without arguments")
    flags: dict[str, str] = {}
    if word in ("RUN", "COPY", "ADD", "FROM"):
        while match := _FLAG.match(rest):
            flags[match[1]] = match[2]
            rest = rest[match.end() :]
        known = ("chown", "chmod") if word in ("COPY", "ADD") else ()
        for flag in flags:
            if flag not in known:
                _refuse(path, line, f"`{word} --{flag}`")
        if re.search(r"<<-?['\"]?\w", rest) and word != "FROM":
            _refuse(path, line, "a text within the Dockerfile (`<<`)")
        if word == "ADD" and re.match(r"(https?://|git@)", rest):
            _refuse(path, line, "`ADD` of an address: a box has no network")
    if not _MODE.fullmatch(flags.get("chmod", "644")):
        _refuse(path, line, f"`{word} --chmod={flags['chmod']}`")
    step = _Instruction(word, rest, flags, line)
    if word in _EXPANDED:
        try:
            step.words({})
        except ValueError as error:
            _refuse(path, line, str(error))
    return step


def _refuse(path: Path, line: int, what: str) -> NoReturn:
    """Raise the error for an unsupported part of a Dockerfile."""
    raise ConfigError(f"{path}:{line}: {what} is not built here", help=_ELSEWHERE)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return a text without quotes, with `$NAME`, `${NAME}`, `${NAME:-default}` and `${NAME:+value}` replaced.

    Raises:
        ValueError: a quotation has no end, or a variable is in another form.
    """
    return "".join(_value(match, variables) for match in _pieces(text))


def _split(text: str, variables: Mapping[str, str]) -> list[str]:
    """Return the words of a text; a variable's value is not split at blanks."""
    words: list[str] = []
    begun = False
    for match in _pieces(text):
        if match.lastgroup == "blank":
            begun = False
        else:
            words += [] if begun else [""]
            words[-1] += _value(match, variables)
            begun = True
    return words


def _pieces(text: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(text):
        match = _PIECE.match(text, place)
        if match is None:
            raise ValueError(f"`{text[place:]}`, which has no end,")
        place = match.end()
        yield match


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    if match.lastgroup == "quoted":
        return _QUOTED.sub(lambda inner: inner[1] or _variable(inner[2], variables), match["quoted"])
    if match.lastgroup == "variable":
        return _variable(match["variable"], variables)
    return match[match.lastgroup or 0]


def _variable(text: str, variables: Mapping[str, str]) -> str:
    match = _VARIABLE.fullmatch(text)
    if match is None:
        raise ValueError(f"the variable `{text}`")
    value, other = variables.get(match[1] or match[2]), expand(match[5] or "", variables)
    is_there = bool(value) if match[3] else value is not None
    if match[4] == "+":
        return other if is_there else ""
    return value if is_there and value is not None else other


def assignments(step: _Instruction, variables: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that an `ENV` or `ARG` sets; None: an `ARG` without a value.

    Raises:
        ValueError: see `expand`.
    """
    name, rest = (*step.text.split(None, 1), "")[:2]
    if step.word == "ENV" and "=" not in name:
        return {name: expand(rest, variables)}
    pairs = (word.partition("=") for word in step.words(variables))
    return {name: value if sign else None for name, sign, value in pairs}
