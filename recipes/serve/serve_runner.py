"""The runner of recipe `serve`: a server in a thread of this process, and a record of its optimizer steps."""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import shlex
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

from recipes.language.loopback_server import listening
from recipes.serve.config import ServeConfig, unusable_port
from recipes.serve.service.routes import SdkRoutes
from recipes.serve.service.service_state import ServiceState
from recipes.serve.service.state_file import state_folder
from recipes.serve.service.tenants import Keys
from recipes.serve.values import AdapterTraining, ServedFacts, SnapshotSampling
from recipes.training.comparing_worker import comparisons_of
from rlinf_core import WorkerGroup
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.first_contact import note_comparisons
from rlinf_core.worker.handle import wait_together

LOGGER: Final = logging.getLogger("rlinf")
# Seconds between checks for sessions without a client and for expired weights.
_SWEEP_SECONDS: Final = 5.0
_END_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.5
_NEVER: Final = -1


class ServeRunner:
    """A runner that serves clients until it is stopped, or has taken `runner.max_steps` optimizer steps.

    Args:
        cfg: the configuration of the job.
        actor: the workers that train.
        rollout: the workers that sample.
        record: the record of the run, in which every client's optimizer step is a step.
    """

    def __init__(
        self,
        cfg: ServeConfig,
        actor: WorkerGroup[AdapterTraining],
        rollout: WorkerGroup[SnapshotSampling],
        record: RunRecord,
    ) -> None:
        self._cfg = cfg
        # A worker group forwards method calls to all ranks, which its type does not show.
        self._actor, self._rollout = cast("Any", actor), cast("Any", rollout)
        self._groups: Mapping[str, WorkerGroup[Any]] = {"actor": actor, "rollout": rollout}
        self._record = record
        # Sessions, and so steps, continue after the death of a worker.
        record.keeps_steps = True
        self._state = Path(cfg.server.state_dir or record.folder.path / "service").absolute()
        self._boot = secrets.token_hex(4)
        # Metrics of steps, and errors that end the service.
        self._events: queue.Queue[dict[str, float] | BaseException] = queue.Queue()
        self._ready = threading.Event()

    def init_workers(self) -> None:
        """Load the model in all workers."""
        self._tokenizer = self._record.folder.path / "tokenizer"
        answers = wait_together(self._actor.init_worker(str(self._tokenizer)), self._rollout.init_worker())
        trained, sampled = cast("list[list[ServedFacts]]", answers)
        self._facts = trained[0]._replace(adapts_output=all(facts.adapts_output for facts in sampled))
        note_comparisons(self._record.folder.path, comparisons_of([self._actor, self._rollout]))

    def run(self) -> None:
        """Serve clients. WorkerGroupError: a worker died."""
        with state_folder(self._state, self._model()):
            self._run()

    def _run(self) -> None:
        limit = None if self._cfg.runner.max_steps == _NEVER else self._cfg.runner.max_steps
        keys = Keys(self._state / "keys", self._cfg.server.tenants)
        stop = threading.Event()
        thread = threading.Thread(target=self._serve, args=(keys, stop), name="serve", daemon=True)
        thread.start()
        try:
            self._wait_for(self._ready)
            self._record.started(limit, {name: group.world_size for name, group in self._groups.items()})
            print(self.environment(), flush=True)
            while limit is None or self._record.step < limit:
                metrics = self._next()
                if metrics is not None:
                    self._record.step_finished(self._record.step + 1, metrics)
        finally:
            stop.set()
            thread.join(_END_SECONDS)

    def _model(self) -> dict[str, Any]:
        """Return the settings that must equal those of earlier starts to continue with their models, by key."""
        actor, model = self._cfg.actor, self._cfg.actor.model
        built = {"actor.seed": actor.seed, "actor.model.hidden_dim": model.hidden_dim}
        built |= {"actor.model.num_layers": model.num_layers}
        return {
            "server.model_name": self._cfg.server.model_name,
            "actor.model.model_path": model.model_path,
            "actor.lora_alpha": actor.lora_alpha,
            "server.full_weights": self._cfg.server.full_weights,
            **(built if model.model_path is None else {}),
        }

    def environment(self) -> str:
        """Return shell lines with the environment variables of clients, for each tenant."""
        lines = [f"export TINKER_BASE_URL=http://127.0.0.1:{self._cfg.server.port}"]
        for tenant in self._cfg.server.tenants:
            file = shlex.quote(str(self._state / "keys" / tenant))
            several = len(self._cfg.server.tenants) > 1
            lines.append(f'export TINKER_API_KEY="$(cat {file})"' + (f"  # {tenant}" if several else ""))
        return "\n".join(lines)

    def _next(self) -> dict[str, float] | None:
        """Return the metrics of the next optimizer step; None if there was none for a while.

        Raises:
            WorkerGroupError: a worker died.
            ConfigError: the server cannot listen.
        """
        try:
            event = self._events.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            return None
        if isinstance(event, BaseException):
            raise event
        return event

    def _wait_for(self, ready: threading.Event) -> None:
        """Wait until the server listens; raises as `_next` does."""
        while not ready.wait(_LOOK_SECONDS):
            self._next()

    # The server's thread

    def _serve(self, keys: Keys, stop: threading.Event) -> None:
        try:
            asyncio.run(self._main(keys, stop))
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._events.put(error)

    async def _main(self, keys: Keys, stop: threading.Event) -> None:
        views = [self._rollout.execute_on(rank) for rank in range(self._rollout.world_size)]
        state = ServiceState(
            self._cfg.server,
            self._facts,
            self._actor,
            views,
            self._state,
            self._boot,
            self._events.put,
            str(self._tokenizer),
        )
        routes = SdkRoutes(state, keys)
        resumed = routes.resume()
        if resumed:
            LOGGER.warning("%d sessions of an earlier start continue", resumed)
        work = [
            asyncio.create_task(part) for part in (state.actor_turns.run(), state.sampler_turns.run(), _sweep(state))
        ]
        try:
            async with _listening(routes, self._cfg.server.port):
                self._ready.set()
                end = asyncio.create_task(asyncio.to_thread(stop.wait))
                done, _ = await asyncio.wait([*work, end], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            stop.set()  # ends the thread that waits for it
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            state.file.close()


@asynccontextmanager
async def _listening(routes: SdkRoutes, port: int) -> AsyncGenerator[None]:
    """Answer requests within the context.

    Raises:
        ConfigError: the port is in use.
    """
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(listening(routes.application(), port))
        except OSError as error:
            raise unusable_port(port, error) from None
        yield


async def _sweep(state: ServiceState) -> None:
    """Periodically end sessions without a client, and drop what is no longer needed."""
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        for session in state.tenants.silent():
            state.end_session(session, "the session ended: its client was not heard of for too long")
        for session in state.tenants.all_sessions():
            state.tidy(session)
        state.file.shrink()
        await asyncio.to_thread(state.store.remove_expired)
