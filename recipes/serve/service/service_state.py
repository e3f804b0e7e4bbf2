"""The state that all requests of the service share."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from recipes.language.listening.request_error import RequestError
from recipes.serve.config import ServerConfig
from recipes.serve.service.journal import Journal
from recipes.serve.service.ledger import Ledger
from recipes.serve.service.model_points import ModelPoints
from recipes.serve.service.quotas import Quotas
from recipes.serve.service.request_fields import invalid
from recipes.serve.service.tenants import ClientSession, Tenants
from recipes.serve.service.turns import ActorTurns, SamplerTurns
from recipes.serve.service.weight_store import WeightStore
from recipes.serve.values import ServedFacts


class StepFigures(NamedTuple):
    """Figures of an optimizer step."""

    grad_norm: float
    learning_rate: float


class ServiceFigures:
    """Figures of the passes and answers since the last optimizer step of any client."""

    def __init__(self) -> None:
        self._passes: list[tuple[float, float]] = []

    def passed(self, tokens: float, loss: float) -> None:
        """Count a pass."""
        self._passes.append((tokens, loss))

    def take(self, step: StepFigures, models: int) -> dict[str, float]:
        """Return the metrics of a step by full name, and start over."""
        passes, self._passes = self._passes, []
        tokens = sum(tokens for tokens, _ in passes)
        return {
            "train/actor/grad_norm": step.grad_norm,
            "train/actor/lr": step.learning_rate,
            "train/actor/tokens": tokens,
            "train/actor/loss_per_token": sum(loss for _, loss in passes) / max(1.0, tokens),
            "train/serve/models": float(models),
        }


class ServiceState:
    """The state that all requests of the service share.

    Args:
        limits: section `server` of the file.
        facts: the facts of the model.
        actor: the workers that train.
        tenants, ledger, store: what there is.
        journal: the journal of the sessions.
        turns: the turns of the workers.
        on_step: called with the metrics of each optimizer step.
        tokenizer: folder of the tokenizer, for clients.
    """

    def __init__(
        self,
        limits: ServerConfig,
        facts: ServedFacts,
        actor: Any,
        tenants: Tenants,
        ledger: Ledger,
        store: WeightStore,
        journal: Journal,
        turns: tuple[ActorTurns, SamplerTurns],
        on_step: Callable[[dict[str, float]], None],
        tokenizer: str,
    ) -> None:
        self.limits = limits
        self.facts = facts
        self.actor = actor
        self.tenants = tenants
        self.ledger = ledger
        self.store = store
        self.journal = journal
        self.actor_turns, self.sampler_turns = turns
        self.points = ModelPoints(journal, ledger, actor, self.actor_turns, limits.save_interval)
        self.tokenizer = tokenizer
        self.figures = ServiceFigures()
        self.quotas = Quotas(limits)
        self._on_step = on_step

    def check_base_model(self, name: Any) -> None:
        """Check the name of a model.

        Raises:
            RequestError: it is not the one that is served.
        """
        if name != self.limits.model_name:
            raise invalid(f"the model `{str(name)[:100]}` is not served: base_model is `{self.limits.model_name}`")

    def check_pending(self, tenant: str) -> None:
        """Check that a tenant has not too many unfinished requests.

        Raises:
            RequestError: it has; the client waits and asks again.
        """
        if self.ledger.pending(tenant) >= self.limits.max_pending:
            message = f"{self.limits.max_pending} requests are unfinished: try again"
            raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, message, {"Retry-After": "1"})

    def step_finished(self, step: StepFigures) -> None:
        """Record an optimizer step."""
        count = sum(len(self.tenants.models(tenant)) for tenant in self.limits.tenants)
        self._on_step(self.figures.take(step, count))

    def begin_session(self, tenant: str) -> ClientSession:
        """Return a new session.

        Raises:
            RunError: it cannot be written down.
        """
        session = self.tenants.begin(tenant)
        self.journal.begin(session.session_id, tenant)
        return session

    def end_session(self, session: ClientSession, why: str) -> None:
        """End a session: its models and samplers are removed, and its open requests fail."""
        self.tenants.end(session)
        self.journal.end(session.session_id)
        self.ledger.end_session(session.session_id, why)
        for model_id in session.models:
            self.actor_turns.add_chore(lambda name=model_id: _awaited(self.actor.remove(name)))


async def _awaited(handle: Any) -> None:
    await handle
