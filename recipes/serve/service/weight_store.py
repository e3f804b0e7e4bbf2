"""Weights on disk: those that clients save, by tenant and `tinker://` path, and points from which a later start of the
server continues a model.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from recipes.language.loopback_server import RequestError
from recipes.serve.service.state_file import StateFile
from recipes.serve.service.tenants import ServedModel
from recipes.serve.service.turns import ActorTurns
from recipes.serve.values import RECORD, AdapterSettings, SavedRecord, read_adapter, read_record
from rlinf_core.runners.storage.durable import remove_tree, rename, sync_tree

Kind: TypeAlias = Literal["weights", "sampler_weights"]

_PATH: Final = re.compile(
    r"tinker://([0-9a-f-]+:train:\d+)/(weights|sampler_weights)/([A-Za-z0-9][A-Za-z0-9._-]{0,127})"
)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OPTIMIZER: Final = "optimizer.safetensors"


class Saved(NamedTuple):
    """Saved weights.

    Attributes:
        folder: the folder of the files.
        settings: the settings of the adapter.
        base_model: the name of the adapter's base model.
        has_optimizer: whether the optimizer state was saved, too.
        metadata: the client's metadata of the run.
    """

    folder: Path
    settings: AdapterSettings
    base_model: str
    has_optimizer: bool
    metadata: dict[str, Any]


class WeightStore:
    """Folders of saved weights.

    Args:
        root: the root folder of named weights.
        sessions: the folder of sessions, for unnamed weights, which are removed with their session.
        base_model: the name of the base model.
    """

    def __init__(self, root: Path, sessions: Path, base_model: str) -> None:
        self._root = root
        self._sessions = sessions
        self._base_model = base_model

    def folder(self, tenant: str) -> Path:
        """Return the folder of a tenant's weights."""
        return self._root / tenant

    def check_name(self, name: Any) -> str:
        """Return a valid name of weights unchanged.

        Raises:
            RequestError: the name is no valid file name, or begins with a dot.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "a name of weights has 1 to 128 letters, digits, `.`, `_` and `-`, and begins with a letter or digit",
            )
        return name

    def locate(self, tenant: str, path: Any) -> Path:
        """Return the folder of a `tinker://` path, which may not exist.

        Raises:
            RequestError: the path is malformed.
        """
        match = _PATH.fullmatch(path) if isinstance(path, str) else None
        if match is None:
            raise RequestError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "a path of weights is `tinker://RUN/weights/NAME` or `tinker://RUN/sampler_weights/NAME`",
            )
        return self._root / tenant / Path(*match.groups())

    def find(self, tenant: str, path: Any) -> Saved:
        """Return the weights at a `tinker://` path.

        Raises:
            RequestError: the path is malformed, the tenant has no such weights, or they are damaged.
        """
        folder = self.locate(tenant, path)
        try:
            record, settings = read_record(folder), read_adapter(folder)
        except FileNotFoundError:
            raise RequestError(HTTPStatus.NOT_FOUND, f"there are no weights at `{path}`") from None
        except OSError as error:
            message = f"the weights at `{path}` are damaged: `{Path(error.filename).name}` {error.strerror}"
            raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, message) from None
        optimizer = (folder / _OPTIMIZER).is_file()
        return Saved(folder, settings, record.base_model, optimizer, record.user_metadata)

    async def save(
        self,
        tenant: str,
        run: str,
        kind: Kind,
        name: str,
        write: Callable[[str], Awaitable[Any]],
        *,
        overwrite: bool = False,
        ttl: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        seq_id: int | None = None,
    ) -> str:
        """Save weights under a name atomically, and return their path.

        Args:
            tenant, run: the tenant and run of the weights.
            kind: the purpose of the weights.
            name: see `check_name`.
            write: writes the weights into a folder.
            overwrite: whether to replace weights of the same name.
            ttl: seconds after which the weights are removed; None: never.
            metadata: the client's metadata of the run.
            seq_id: the number of the request; weights that it saved in an earlier start are kept.

        Raises:
            RequestError: there are weights of this name, and `overwrite` is false.
        """
        folder = self._root / tenant / run / kind / name
        with suppress(OSError):
            if seq_id is not None and read_record(folder).seq_id == seq_id:
                return f"tinker://{run}/{kind}/{name}"
        if folder.exists() and not overwrite:
            message = (
                f"there are weights at `tinker://{run}/{kind}/{name}`: choose another name, or pass overwrite=True"
            )
            raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, message)
        part = folder.with_name(f".{name}.{secrets.token_hex(4)}")
        part.mkdir(parents=True)
        try:
            await write(str(part))
            expires = None if ttl is None else time.time() + ttl
            record = SavedRecord(
                base_model=self._base_model, expires=expires, seq_id=seq_id, user_metadata=dict(metadata or {})
            )
            (part / RECORD).write_text(record.model_dump_json())
            sync_tree(part)
            if folder.exists():
                old = folder.with_name(f".{name}.old-{secrets.token_hex(4)}")
                rename(folder, old)
                rename(part, folder)
                remove_tree(old)
            else:
                rename(part, folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return f"tinker://{run}/{kind}/{name}"

    async def snapshot(self, session_id: str, write: Callable[[str], Awaitable[Any]]) -> Path:
        """Write unnamed weights for a sampler of a session, and return their folder."""
        folder = self._sessions / session_id / f"snapshot-{secrets.token_hex(8)}"
        folder.mkdir(parents=True)
        try:
            await write(str(folder))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def remove_expired(self) -> None:
        """Remove expired weights."""
        for file in self._root.glob(f"*/*/*/*/{RECORD}"):
            # Skip weights that are being written or removed, or are damaged.
            with suppress(OSError):
                expires = read_record(file.parent).expires
                if expires is not None and expires < time.time():
                    remove_tree(file.parent)


class ModelPoint(NamedTuple):
    """The state of a model after one of its requests.

    Attributes:
        seq_id: the number of the request; 0: the one that created the model.
        folder: the folder of weights and optimizer.
        settings: the settings of the adapter.
    """

    seq_id: int
    folder: Path
    settings: AdapterSettings


class ModelPoints:
    """A writer of models' points for later starts.

    Args:
        file: the file that records points.
        actor: the workers that train.
        turns: the turns of the actor.
        interval: the number of a model's optimizer steps between two points.
    """

    def __init__(self, file: StateFile, actor: Any, turns: ActorTurns, interval: int) -> None:
        self._file = file
        self._actor = actor
        self._turns = turns
        self._interval = interval

    def stepped(self, model: ServedModel, seq_id: int) -> None:
        """Count an optimizer step, after which a model has no gradients, and save the model if due."""
        model.steps += 1
        if model.steps >= self._interval:
            self.save_soon(model, seq_id)

    def save_soon(self, model: ServedModel, seq_id: int) -> None:
        """Save a model before its next request."""
        model.steps = 0
        self._turns.add_chore(lambda: self._save(model, seq_id))

    def save_idle(self, model: ServedModel) -> None:
        """Save a model if it has no gradients, so that its earlier requests need not be kept."""

        async def act() -> None:
            if not model.unstepped and not model.failed and model.saved < model.done:
                await self._save(model, model.done)

        self._turns.add_chore(act)

    async def _save(self, model: ServedModel, seq_id: int) -> None:
        session_id = model.session.session_id
        number = model.model_id.rpartition(":")[2]
        parent = self._file.folder(session_id)
        if not parent.is_dir():
            return  # the session has ended
        folder = parent / f"model-{number}-{seq_id}-{secrets.token_hex(4)}"
        part = parent / f".{folder.name}"
        part.mkdir()
        try:
            await self._actor.save(model.model_id, str(part), True)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        await asyncio.to_thread(sync_tree, part)
        rename(part, folder)
        self._file.keep_point(model.model_id, session_id, seq_id, folder.name)
        model.saved = seq_id
        for old in parent.glob(f"model-{number}-*"):
            if old != folder:
                remove_tree(old)
