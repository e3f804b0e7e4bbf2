"""Types of values that several sections share, among them names of models and data sets in the HuggingFace Hub.

A name `ORG/NAME`, pinned to a commit, means a folder in the cache of huggingface_hub on the machine that reads it. The
driver chooses the commit (`commit_of`), and every node finds or fetches that commit itself (`ensure_here`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema

from rlinf_core.address import check_name
from rlinf_core.config.tree import MappingNode, format_path, scalars
from rlinf_core.config.tree import Path as KeyPath
from rlinf_core.errors import ConfigError, InvalidNameError
from rlinf_core.scalars import Float, Int, Text, problem

# huggingface_hub is only partly typed.
# pyright: reportUnknownVariableType=false


Kind: TypeAlias = Literal["model", "dataset"]

_WORD: Final = r"[A-Za-z0-9][\w.-]*"
# `ORG/NAME`, or a path as huggingface_hub writes it, with a folder or file: `hf://datasets/ORG/NAME/FOLDER`.
_NAME: Final = re.compile(rf"(hf://(?:datasets/)?)?({_WORD}/{_WORD})(?:@({_WORD}))?(?:/([^/].*))?")
# Suffixes of local files, which are never names of the hub, whether the file exists or not.
_FILES: Final = (".jsonl", ".json", ".gz", ".parquet", ".csv", ".txt", ".hdf5", ".h5", ".pt", ".safetensors", ".yaml")
_SNAPSHOT: Final = re.compile(r"(?P<cache>.*)/(?P<kind>model|dataset)s--(?P<name>[^/]+)/snapshots/(?P<commit>[^/]+)")
# Weights that rlinf does not read: pickled ones, and formats of other programs.
_UNREAD: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*")


class HubPath(str):
    """The folder of a repository's commit in the cache of this machine, or a folder or file in it.

    Unpickling gives the path in the cache of the unpickling machine. It may not exist yet.

    Attributes:
        written: the name as written in the file.
        kind: `model` or `dataset`.
        name: `ORG/NAME`.
        commit: the commit, or None if this machine's cache does not know it.
        inner: the folder or file within the repository; empty for all of it.
        revision: the requested commit, branch or tag.
    """

    __slots__ = ("commit", "inner", "kind", "name", "revision", "written")

    written: str
    kind: Kind
    name: str
    commit: str | None
    inner: str
    revision: str

    def __new__(cls, written: str, kind: Kind, name: str, revision: str, inner: str) -> HubPath:
        commit = _commit_in_cache(kind, name, revision)
        parts = ("snapshots", commit or revision, *([inner] if inner else ()))
        path = super().__new__(cls, os.path.join(_repository(kind, name), *parts))
        path.written, path.kind, path.name, path.revision, path.inner = written, kind, name, revision, inner
        path.commit = commit
        return path

    def __reduce__(self) -> Any:
        return HubPath, (self.written, self.kind, self.name, self.commit or self.revision, self.inner)

    @property
    def is_here(self) -> bool:
        """Whether the cache has the commit with all files listed when it was fetched."""
        return os.path.exists(self) and _is_whole(self.name, self.kind, self.commit or self.revision, _cache())

    def pinned(self, commit: str) -> str:
        """Return the name with a commit, as written in a file."""
        match = _NAME.fullmatch(self.written)
        before, inner = (match[1] or "", match[4]) if match is not None else ("", None)
        return f"{before}{self.name}@{commit}" + (f"/{inner}" if inner else "")


class Unfetched(NamedTuple):
    """The finding about a name that this machine's cache lacks.

    Attributes:
        message, help: the words of the finding.
        is_fault: whether a run cannot fetch it, either.
    """

    message: str
    help: str
    is_fault: bool


def located(text: str, kind: Kind) -> str:
    """Return the absolute path that a text means, or the `HubPath` of a name if there is no such path."""
    match = _NAME.fullmatch(text)
    if match is None or (not match[1] and (match[4] or text.lower().endswith(_FILES) or os.path.lexists(text))):
        return text if "://" in text else os.path.abspath(text)
    return HubPath(text, kind, match[2], match[3] or "main", match[4] or "")


def hub_paths(value: object, at: KeyPath = ()) -> Iterator[tuple[KeyPath, HubPath]]:
    """Yield the hub names in a validated configuration, with the paths of their keys."""
    if isinstance(value, HubPath):
        yield at, value
    elif isinstance(value, BaseModel):
        for name in [name for name in type(value).model_fields if name in value.model_fields_set]:
            yield from hub_paths(getattr(value, name, None), (*at, name))
    elif isinstance(value, Mapping):
        for name, item in cast("Mapping[str, object]", value).items():
            yield from hub_paths(item, (*at, name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("list[object]", value)):
            yield from hub_paths(item, (*at, index))


def unfetched(path: HubPath) -> Unfetched | None:
    """Return the finding about a name that is not in this machine's cache; None if it is there."""
    if path.is_here:
        return None
    absent = f"`{path.written}` is no path here, and not in the cache of huggingface_hub, `{_cache()}`"
    get = f"`hf download {path.name}{' --repo-type dataset' * (path.kind == 'dataset')}`"
    own = f"name an existing folder, or run {get} where there is a network"
    if _hub() is None:
        return Unfetched(absent, f"run `pip install huggingface_hub`, which fetches it; or {own}", is_fault=True)
    if _offline():
        return Unfetched(absent, f"{own}, or unset `HF_HUB_OFFLINE`, which forbids to fetch it", is_fault=True)
    return Unfetched(absent, f"a run fetches it from {_hub().ENDPOINT} when it starts; else {own}", is_fault=False)


def pins_of(paths: Iterable[HubPath], tree: MappingNode, commit_of: Callable[[HubPath], str | None]) -> tuple[str, ...]:
    """Return the overrides that pin the unpinned names of a configuration to commits.

    Args:
        paths: the names in the validated configuration.
        tree: the tree in which they were written.
        commit_of: a function that returns the commit of a name, or None to leave it unpinned.
    """
    pins: dict[str, str] = {}
    for path in {(path.written, path.kind): path for path in paths}.values():
        commit = None if f"@{path.commit}" in path.written else commit_of(path)
        for key, scalar in scalars(tree) if commit is not None else ():
            if scalar.raw == path.written and _names(key, path.kind):
                pins[format_path(key)] = path.pinned(commit or "")
    return tuple(f"{key}={text}" for key, text in pins.items())


def commits_in(tree: MappingNode) -> dict[str, str]:
    """Return the commits of the pinned names in a run's configuration, by `ORG/NAME`."""
    matches = [_NAME.fullmatch(scalar.raw) for _, scalar in scalars(tree)]
    return {match[2]: match[3] for match in matches if match is not None and match[3]}


def on_any_machine(path: str | None) -> str | None:
    """Return a path for a checkpoint: for a `HubPath`, which differs between machines, its pinned name."""
    return path.pinned(path.commit or path.revision) if isinstance(path, HubPath) else path


def ensure_here(path: str | os.PathLike[str]) -> None:
    """Fetch the missing commit of a path in a cache of huggingface_hub; ignore other paths.

    Raises:
        ConfigError: the commit cannot be fetched.
    """
    match = _SNAPSHOT.match(os.fspath(path))
    if match is None:
        return
    name = match["name"].replace("--", "/", 1)
    if os.path.exists(path) and _is_whole(name, match["kind"], match["commit"], match["cache"]):
        return
    with _fetching(name, match["kind"], match["cache"]):
        from huggingface_hub import HfApi

        # Fails at once without a network, where the download's listing of files would be retried.
        HfApi().repo_info(name, repo_type=match["kind"], revision=match["commit"])
        _snapshot(name, match["kind"], match["commit"], match["cache"])


def _names(key: KeyPath, kind: Kind) -> bool:
    """Return whether a key may hold a name of this kind: another key may have the same text as its value."""
    words = [part for part in key if isinstance(part, str)]
    return words[-1].endswith(("path", "_model")) if kind == "model" else "data" in words[0] and "path" in str(words)


@contextmanager
def _fetching(name: str, kind: str, cache: str) -> Generator[None, None, None]:
    """Let huggingface_hub use the network in this context, unless the user forbids it.

    Raises:
        ConfigError: the context raised any exception.
    """
    constants = _hub()
    before = None if constants is None else constants.HF_HUB_OFFLINE
    try:
        if constants is not None:
            constants.HF_HUB_OFFLINE = _offline()
        yield
    except Exception as error:  # noqa: BLE001 - of its client, the network or the disk
        repository = f"{name}{' --repo-type dataset' * (kind == 'dataset')}"
        raise ConfigError(
            f"`{name}` is not in the cache of huggingface_hub, `{cache}`, and cannot be fetched"
            + (f" from {constants.ENDPOINT}" if constants is not None else ""),
            why=(str(error).strip().splitlines() or [type(error).__name__])[0][:300],
            help=f"run `hf download {repository}` where there is a network and copy the cache here, or name a folder",
        ) from None
    finally:
        if constants is not None:
            constants.HF_HUB_OFFLINE = before


def commit_of(path: HubPath, *, fetches: bool) -> str:
    """Return the commit that a name means in this machine's cache, or else now in the hub.

    Args:
        path: the name.
        fetches: whether to fetch the files too if the cache lacks the commit.

    Raises:
        ConfigError: the commit is not in the cache, and the hub cannot be asked.
    """
    if path.commit is not None:
        return path.commit
    with _fetching(path.name, path.kind, _cache()):
        if fetches:
            # Fetched by revision, so that the cache also records the revision's commit, for later use offline.
            return Path(_snapshot(path.name, path.kind, path.revision, _cache())).name
        from huggingface_hub import HfApi

        return str(HfApi().repo_info(path.name, repo_type=path.kind, revision=path.revision).sha)


def _snapshot(name: str, kind: str, revision: str, cache: str, *, local: bool = False) -> str:
    """Return the folder of a revision in a cache, after fetching missing files; `local` raises instead."""
    from huggingface_hub import snapshot_download

    return snapshot_download(
        name,
        repo_type=kind,
        revision=revision,
        cache_dir=cache,
        local_files_only=local,
        ignore_patterns=list(_UNREAD),
    )


def _is_whole(name: str, kind: str, commit: str, cache: str) -> bool:
    """Return whether a cache has all files listed when the commit was fetched."""
    try:
        _snapshot(name, kind, commit, cache, local=True)
    except Exception:  # noqa: BLE001 - incomplete, or not to be asked
        return False
    return True


def stay_offline() -> None:
    """Keep libraries from asking the hub about local folders; `ensure_here` still uses the network."""
    constants = _hub()
    if constants is not None:
        constants.HF_HUB_OFFLINE = True


def _offline() -> bool:
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def _hub() -> Any:
    """Return the settings of huggingface_hub; None if it is not installed."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    return constants


def _cache() -> str:
    constants = _hub()
    return os.path.expanduser("~/.cache/huggingface/hub") if constants is None else str(constants.HF_HUB_CACHE)


def _repository(kind: Kind, name: str) -> str:
    return os.path.join(_cache(), f"{kind}s--{name.replace('/', '--')}")


def _commit_in_cache(kind: Kind, name: str, revision: str) -> str | None:
    """Return the commit of a revision: itself if it is one, else the commit that the cache recorded; None if none."""
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    try:
        return (Path(_repository(kind, name)) / "refs" / revision).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


Count = Annotated[Int, Field(ge=1)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
Port = Annotated[Int, Field(ge=1, lt=2**16)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
PositiveFloat = Annotated[Float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
Seed = Annotated[Int, Field(ge=0, lt=2**32)]
Precision = Literal["fp32", "bf16", "fp16"]
# The aggregation of token losses, and the level of probability ratios and entropies.
LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Level = Literal["token_level", "action_level", "chunk_level"]


def _or_never(value: int) -> int:
    if value < 1 and value != -1:
        raise problem("bad-value", f"must be at least 1, or -1, found `{value}`")
    return value


# A number of steps, or -1 for never, as in related projects.
StepsOrNever = Annotated[
    Int, AfterValidator(_or_never), WithJsonSchema({"type": "integer", "minimum": -1, "not": {"const": 0}})
]


def _path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise problem("bad-value", "a path is missing here", help="remove the key or write the path")
    return os.path.expanduser(text)  # no shell does it for a file, nor after the `=` of an argument


def _absolute(text: str) -> str:
    return text if "://" in text else os.path.abspath(text)


# A path as written, but with `~` expanded, for files that only this process reads.
WrittenPath = Annotated[Text, AfterValidator(_path)]
# A relative path is relative to the command's working folder, in files and overrides alike. Workers may run in another
# folder or on other machines, so they get the absolute path.
FilePath = Annotated[WrittenPath, AfterValidator(_absolute)]


def _none_if_empty(value: Any) -> Any:
    return None if value == "" else value


# An empty text means none, as `null` does.
OptionalPath = Annotated[FilePath | None, BeforeValidator(_none_if_empty)]
# The folder of a model or a tokenizer: a path, or its name in the HuggingFace Hub, `ORG/NAME`; likewise a data set's.
ModelPath = Annotated[WrittenPath, AfterValidator(partial(located, kind="model"))]
OptionalModelPath = Annotated[ModelPath | None, BeforeValidator(_none_if_empty)]
DataPath = Annotated[WrittenPath, AfterValidator(partial(located, kind="dataset"))]
OptionalWrittenPath = Annotated[WrittenPath | None, BeforeValidator(_none_if_empty)]


_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?([smhd])", re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_seconds(text: str) -> float | None:
    """Return the seconds of `90s`, `10m`, `12h` or `7d`; None for other text."""
    match = _DURATION.fullmatch(text.strip())
    return float(match[1]) * _SECONDS[match[2]] if match else None


def _duration(text: str) -> str:
    if not duration_seconds(text):
        raise problem("bad-value", f"must be a time such as `90s`, `10m` or `2h`, found `{text}`")
    return text


def _group_name(name: str) -> str:
    try:
        check_name(name)
    except InvalidNameError as error:
        raise problem("bad-value", error.message, help=error.help) from None
    return name


GroupName = Annotated[Text, AfterValidator(_group_name)]
# A positive duration, as written.
Duration = Annotated[Text, AfterValidator(_duration), WithJsonSchema({"type": "string", "pattern": _DURATION.pattern})]
