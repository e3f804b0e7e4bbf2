"""The state that all requests of the service share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple

from recipes.language.loopback_server import RequestError
from recipes.serve.config import ServerConfig
from recipes.serve.service.ledger import Ledger
from recipes.serve.service.request_fields import invalid
from recipes.serve.service.requests_and_results import sample_bytes
from recipes.serve.service.state_file import SESSIONS, StateFile
from recipes.serve.service.tenants import ClientSession, Tenants
from recipes.serve.service.turns import ActorTurns, SamplerTurns
from recipes.serve.service.weight_store import ModelPoints, WeightStore
from recipes.serve.values import ServedFacts
from rlinf_core.runners.storage.durable import remove_tree

# The maximum sessions of a tenant; sessions of killed programs last until `server.session_timeout`.
_MOST_SESSIONS: Final = 256
# The maximum bytes of a model's requests kept for repetition; beyond it, the model is saved instead.
_MOST_BODIES: Final = 8 << 20


class StepFigures(NamedTuple):
    """Metrics of an optimizer step."""

    grad_norm: float
    learning_rate: float


class ServiceFigures:
    """Metrics of the passes since the last optimizer step of any client."""

    def __init__(self) -> None:
        self._tokens = self._loss = 0.0

    def passed(self, tokens: float, loss: float) -> None:
        """Count a pass."""
        self._tokens += tokens
        self._loss += loss

    def take(self, step: StepFigures, models: int) -> dict[str, float]:
        """Return the metrics of a step by full name, and start over."""
        tokens, loss = self._tokens, self._loss
        self._tokens = self._loss = 0.0
        return {
            "train/actor/grad_norm": step.grad_norm,
            "train/actor/lr": step.learning_rate,
            "train/actor/tokens": tokens,
            "train/actor/loss_per_token": loss / max(1.0, tokens),
            "train/serve/models": float(models),
        }


class ServiceState:
    """The state that all requests of the service share.

    Args:
        limits: the section `server` of the configuration.
        facts: the facts of the model.
        actor: the workers that train.
        samplers: a view of each worker that samples.
        folder: the folder of state.
        boot: the id of this start of the server, a part of every id.
        on_step: called with the metrics of each optimizer step.
        tokenizer: the folder of the tokenizer, for clients.

    Raises:
        RunError: the folder cannot be read or written.
    """

    def __init__(
        self,
        limits: ServerConfig,
        facts: ServedFacts,
        actor: Any,
        samplers: list[Any],
        folder: Path,
        boot: str,
        on_step: Callable[[dict[str, float]], None],
        tokenizer: str,
    ) -> None:
        self.limits = limits
        self.facts = facts
        self.actor = actor
        self.tenants = Tenants(boot, limits.session_timeout)
        self.file = StateFile(folder)
        self.ledger = Ledger(self.file, boot)
        self.store = WeightStore(folder / "weights", folder / SESSIONS, limits.model_name)
        self.actor_turns, self.sampler_turns = ActorTurns(self.tenants), SamplerTurns(samplers, sample_bytes)
        self.points = ModelPoints(self.file, actor, self.actor_turns, limits.save_interval)
        self.tokenizer = tokenizer
        self.figures = ServiceFigures()
        self.quotas = Quotas(limits)
        self._on_step = on_step

    def check_base_model(self, name: Any) -> None:
        """Check the name of a model.

        Raises:
            RequestError: the name is not that of the served model.
        """
        if name != self.limits.model_name:
            raise invalid(f"the model `{str(name)[:100]}` is not served: base_model is `{self.limits.model_name}`")

    def check_pending(self, tenant: str) -> None:
        """Check that a tenant does not have too many unfinished requests.

        Raises:
            RequestError: the limit is exceeded; the client waits and retries.
        """
        count, size = self.ledger.pending(tenant)
        if count >= self.limits.max_pending:
            raise wait(f"{self.limits.max_pending} requests are unfinished")
        if size >= self.limits.max_pending_mib << 20:
            raise wait(f"unfinished requests have {self.limits.max_pending_mib} MiB (`server.max_pending_mib`)")

    def step_finished(self, step: StepFigures) -> None:
        """Record an optimizer step."""
        count = sum(len(self.tenants.models(tenant)) for tenant in self.limits.tenants)
        self._on_step(self.figures.take(step, count))

    def begin_session(self, tenant: str) -> ClientSession:
        """Return a new session.

        Raises:
            RunError: the session cannot be stored.
            RequestError: the tenant has too many sessions.
        """
        if self.tenants.sessions(tenant) >= _MOST_SESSIONS:
            raise wait(f"{_MOST_SESSIONS} sessions have not ended: close clients that are not used")
        session = self.tenants.begin(tenant)
        self.file.begin_session(session.session_id, tenant)
        return session

    def tidy(self, session: ClientSession) -> None:
        """Save models of a session for later starts, if many bytes of requests are kept for repetition."""
        for model in session.models.values():
            if self.file.body_bytes(model.model_id) > _MOST_BODIES:
                self.points.save_idle(model)

    def drop_snapshots(self, session: ClientSession) -> None:
        """Remove unnamed snapshots beyond the limit, least recently used first."""
        unnamed = [sampler for sampler in session.samplers.values() if sampler.folder and sampler.path is None]
        idle = [sampler for sampler in unnamed if not self.sampler_turns.draws_from(str(sampler.folder))]
        for sampler in sorted(idle, key=lambda one: one.used)[: max(0, len(unnamed) - self.limits.max_snapshots)]:
            del session.samplers[sampler.sampler_id]
            self.file.drop_sampler(sampler.sampler_id)
            if sampler.folder is not None:
                remove_tree(sampler.folder)

    def end_session(self, session: ClientSession, why: str) -> None:
        """End a session: remove its models and samplers, and fail its open requests."""
        self.tenants.end(session)
        self.sampler_turns.cancel(self.ledger.open_requests(session.session_id), why)
        self.ledger.end_session(session.session_id, why)
        self.file.end_session(session.session_id)
        for model_id in session.models:
            self.actor_turns.add_chore(lambda name=model_id: self.actor.remove(name))


def wait(why: str) -> RequestError:
    """Return the error that makes a client wait and retry."""
    return RequestError(HTTPStatus.TOO_MANY_REQUESTS, f"{why}: try again", {"Retry-After": "1"})


_MINUTE: Final = 60.0
_MIB: Final = 1 << 20


class Quotas:
    """The quotas of all tenants, each with separate allowances that refill within a minute.

    Args:
        limits: the section `server` of the configuration.
        clock: the monotonic clock, in seconds.
    """

    def __init__(self, limits: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = {
            "server.max_requests_per_minute": limits.max_requests_per_minute,
            "server.max_tokens_per_minute": limits.max_tokens_per_minute,
        }
        self._stored = limits.max_stored_mib
        self._clock = clock
        # The remaining allowance by tenant and key, and the time of that value.
        self._left: dict[tuple[str, str], tuple[float, float]] = {}

    def take(self, tenant: str, tokens: int) -> None:
        """Deduct a request and its tokens from the allowances of a tenant.

        A request beyond a whole allowance passes once the allowance is full.

        Raises:
            RequestError: too little is left; the client waits and retries.
        """
        amounts = dict(zip(self._limits, (1, tokens), strict=True))
        now = self._clock()
        left: dict[tuple[str, str], tuple[float, float]] = {}
        for key, limit in self._limits.items():
            if limit is None:
                continue
            before, since = self._left.get((tenant, key), (float(limit), now))
            filled = min(float(limit), before + (now - since) * limit / _MINUTE)
            missing = min(amounts[key], limit) - filled
            if missing > 0:
                seconds = math.ceil(missing * _MINUTE / limit)
                message = f"the quota of {limit} is used up (`{key}`): try again in {seconds} s"
                raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, message, {"Retry-After": str(seconds)})
            left[tenant, key] = (filled - amounts[key], now)
        self._left |= left

    def check_stored(self, folder: Path) -> None:
        """Check that a tenant may save weights besides those in its folder.

        Raises:
            RequestError: the stored bytes reach the limit.
        """
        if self._stored is None:
            return
        files = (path for path in folder.rglob("*") if path.is_file())
        stored = sum(path.stat().st_size for path in files) / _MIB
        if stored >= self._stored:
            raise RequestError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{stored:.0f} MiB of weights are saved, and `server.max_stored_mib` is {self._stored}: save with"
                " ttl_seconds so that they expire, or raise the limit",
            )
