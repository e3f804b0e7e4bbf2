"""Points from which a later start of the server continues with a model: its weights and optimizer after a request."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple

from recipes.serve.saved_files import read_adapter
from recipes.serve.service.journal import Journal, JournalEntry
from recipes.serve.service.ledger import Ledger
from recipes.serve.service.tenants import Sampler, ServedModel
from recipes.serve.service.turns import ActorTurns
from recipes.serve.values import AdapterSettings
from rlinf_core.runners.storage.durable import remove_tree, rename, sync_tree

# Requests that belong to a model's beginning have this number.
_BEGINNING: Final = 0


class ModelPoint(NamedTuple):
    """The state of a model after one of its requests.

    Attributes:
        seq_id: number of the request; 0: the one that began the model.
        folder: the folder of weights and optimizer.
        settings: the settings of the adapter.
    """

    seq_id: int
    folder: Path
    settings: AdapterSettings


class ModelPoints:
    """Saves models for later starts, and drops from the journal what they do not need.

    Args:
        journal: the journal of the sessions.
        ledger: the ledger whose outcomes are still asked for.
        actor: the workers that train.
        turns: the turns of the actor.
        interval: optimizer steps of a model between two points.
    """

    def __init__(self, journal: Journal, ledger: Ledger, actor: Any, turns: ActorTurns, interval: int) -> None:
        self._journal = journal
        self._ledger = ledger
        self._actor = actor
        self._turns = turns
        self._interval = interval

    def stepped(self, model: ServedModel, seq_id: int) -> None:
        """Count an optimizer step, after which a model has no gradients."""
        model.steps += 1
        if model.steps >= self._interval:
            self.save_soon(model, seq_id)

    def save_soon(self, model: ServedModel, seq_id: int) -> None:
        """Save a model before its next request."""
        model.steps = 0
        self._turns.add_chore(lambda: self._save(model, seq_id))

    def save_idle(self, model: ServedModel) -> None:
        """Save a model that has no gradients, so that the journal need not keep the requests before."""

        async def act() -> None:
            if not model.unstepped and not model.failed and model.saved < model.done:
                await self._save(model, model.done)

        self._turns.add_chore(act)

    async def _save(self, model: ServedModel, seq_id: int) -> None:
        session_id = model.session.session_id
        number = model.model_id.rpartition(":")[2]
        parent = self._journal.folder(session_id)
        if not parent.is_dir():
            return  # the session has ended
        folder = parent / f"model-{number}-{seq_id}-{secrets.token_hex(4)}"
        part = parent / f".{folder.name}"
        part.mkdir(parents=True)
        try:
            await self._actor.save(model.model_id, str(part), True)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        await asyncio.to_thread(sync_tree, part)
        rename(part, folder)
        fields = {"model_id": model.model_id, "seq_id": seq_id, "folder": folder.name}
        self._journal.append(session_id, JournalEntry("saved", fields))
        model.saved = seq_id
        for old in parent.glob(f"model-{number}-*"):
            if old != folder:
                remove_tree(old)
        if self._journal.has_grown(session_id):
            self.compact(session_id)

    def compact(self, session_id: str) -> None:
        """Drop from the journal of a session what later starts do not need.

        Raises:
            RunError: it cannot be read or written.
        """
        self._journal.compact(session_id, _Kept(self._ledger, self._journal.folder(session_id)))

    def keep_sampler(self, sampler: Sampler) -> None:
        """Write a sampler down.

        Raises:
            RunError: it cannot be written.
        """
        snapshot = None if sampler.path is not None or sampler.folder is None else sampler.folder.name
        fields = {"sampler_id": sampler.sampler_id, "path": sampler.path, "snapshot": snapshot}
        self._journal.append(sampler.session.session_id, JournalEntry("sampler", fields))


def read_points(folder: Path, entries: list[JournalEntry]) -> dict[str, ModelPoint]:
    """Return the newest point of each model of a session that has one.

    Args:
        folder: the folder of the session.
        entries: its events.

    Raises:
        OSError: the files of a point are damaged.
    """
    points: dict[str, ModelPoint] = {}
    for entry in entries:
        if entry.kind == "saved":
            point = folder / Path(entry.fields["folder"]).name
            if point.is_dir():
                points[entry.fields["model_id"]] = ModelPoint(entry.fields["seq_id"], point, read_adapter(point))
    return points


def place_of(entry: JournalEntry) -> tuple[str, int]:
    """Return the model of a request and its number among those of the model; of others, no model."""
    kind, name, *number = entry.fields["key"]
    if kind == "model":
        return name, _BEGINNING
    return (name, number[0]) if kind == "request" else ("", _BEGINNING)


class _Kept:
    """Chooses what a compacted journal keeps of each event: what is asked for, and what is done again."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self._ledger = ledger
        self._names = {path.name for path in folder.glob("model-*")}
        self._folder = folder
        self._again: set[str] = set()

    def __call__(self, entry: JournalEntry) -> JournalEntry | None:
        if entry.kind == "saved":
            return entry if entry.fields["folder"] in self._names else None
        if entry.kind == "sampler":
            snapshot = entry.fields["snapshot"]
            return entry if snapshot is None or (self._folder / snapshot).is_dir() else None
        if entry.kind == "request":
            return self._request(entry)
        if entry.kind == "outcome":
            request_id = entry.fields["request_id"]
            if request_id in self._ledger:
                return entry
            # Nobody asks for it, but what was done must not be reported again.
            if request_id not in self._again:
                return None
            return JournalEntry("outcome", {"request_id": request_id, "content": {}})
        return entry

    def _request(self, entry: JournalEntry) -> JournalEntry | None:
        model, seq_id = place_of(entry)
        is_asked_for = entry.fields["request_id"] in self._ledger
        if not model:
            return entry if is_asked_for else None
        number = model.rpartition(":")[2]
        saved = max((int(name.split("-")[2]) for name in self._names if name.split("-")[1] == number), default=-1)
        if seq_id == _BEGINNING or seq_id > saved:
            self._again.add(entry.fields["request_id"])
            return entry
        return entry._replace(body=b"") if is_asked_for else None
