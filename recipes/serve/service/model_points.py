"""Points from which a later start of the server continues a model: weights and optimizer after a request."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from recipes.serve.service.state_file import StateFile
from recipes.serve.service.tenants import ServedModel
from recipes.serve.service.turns import ActorTurns
from recipes.serve.values import AdapterSettings
from rlinf_core.runners.storage.durable import remove_tree, rename, sync_tree


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
