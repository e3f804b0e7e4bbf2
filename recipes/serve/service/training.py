"""Training requests: models, passes, steps, and saved weights, each model's in the order of their numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

from recipes.language.loopback_server import RequestError, in_thread
from recipes.serve.service.ledger import Promise, RequestFailure, RequestKey, digest_of
from recipes.serve.service.request_fields import (
    adam,
    check_data,
    flag,
    invalid,
    loss_settings,
    mapping,
    model_settings,
    whole,
)
from recipes.serve.service.requests_and_results import PassRequest, pass_bytes, read_data
from recipes.serve.service.service_state import ServiceState, StepFigures
from recipes.serve.service.tenants import Call, ClientSession, Sampler, ServedModel
from recipes.serve.service.weight_store import ModelPoint
from recipes.serve.values import AdapterSettings, Datum, FloatArray, PassOutcome
from rlinf_core import WorkerGroupError
from rlinf_core.runners.recovery import death

Act = Callable[[], Awaitable[Any]]

_LARGEST: Final = 2**31 - 1
# Routes of requests that change a model.
_CHANGING: Final = ("forward_backward", "optim_step", "load_weights")
# The maximum bytes of stored passes that a later start repeats.
_MOST_UNSTEPPED: Final = 16 << 30
_TEN_YEARS: Final = 10 * 366 * 86400


class TrainingRequests:
    """The handlers of training requests.

    Args:
        state: the state of the service.
    """

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    # Models

    def create_model(self, tenant: str, fields: dict[str, Any]) -> Promise:
        """Create a model with a new adapter, or with all weights."""
        session = self._state.tenants.session(tenant, fields.get("session_id"))
        self._state.check_base_model(fields.get("base_model"))
        _check_optimizer(fields)
        settings = model_settings(fields, self._state.limits, self._state.facts, tenant)

        async def act(model: ServedModel) -> dict[str, Any]:
            await self._state.actor.create(model.model_id, settings)
            return {"model_id": model.model_id, "type": "create_model"}

        return self._begin(session, fields, settings, act, "create_model")

    def load_weights(self, tenant: str, fields: dict[str, Any]) -> Promise:
        """Create a model from saved weights, or load them into a model."""
        optimizer = flag(fields, "optimizer", default=False)

        async def load(model: ServedModel) -> dict[str, Any]:
            saved = self._state.store.find(tenant, fields.get("path"))
            if optimizer and not saved.has_optimizer:
                raise invalid(f"`{fields['path']}` has no state of an optimizer: load it with optimizer=False")
            await self._state.actor.restore(model.model_id, str(saved.folder), optimizer)
            # Only now, as the gradients stay if the weights cannot be read.
            model.settings, model.failed, model.unstepped = saved.settings, "", 0
            # Save now, as a later start may find other weights at this path, or none.
            self._state.points.save_soon(model, fields.get("seq_id", 0))
            return {"path": fields["path"], "model_id": model.model_id, "type": "load_weights"}

        if fields.get("session_id") is not None:
            session = self._state.tenants.session(tenant, fields.get("session_id"))
            _check_optimizer(fields)
            if fields.get("base_model") is not None:
                self._state.check_base_model(fields.get("base_model"))
            saved = self._state.store.find(tenant, fields.get("path"))
            return self._begin(session, fields, saved.settings, load, "load_weights")
        return self._sequenced(tenant, fields, lambda model: lambda: load(model), "load_weights")

    def resume(self, session: ClientSession, model_id: str, fields: dict[str, Any], point: ModelPoint) -> None:
        """Restore a model of an earlier start at its point."""
        model = ServedModel(model_id, session, point.settings, metadata=fields.get("user_metadata") or {})
        model.order.next = point.seq_id + 1
        model.done = model.saved = point.seq_id

        async def act(model: ServedModel) -> dict[str, Any]:
            await self._state.actor.restore(model_id, str(point.folder), True)
            return {"model_id": model_id, "type": "create_model"}

        self._add(model, fields, act, "create_model")

    def _begin(
        self,
        session: ClientSession,
        fields: dict[str, Any],
        settings: AdapterSettings,
        act: Callable[[ServedModel], Awaitable[dict[str, Any]]],
        route: str,
    ) -> Promise:
        """Return the promise of a new model, whose first call is `act`."""
        number = whole(fields, "model_seq_id", 0, _LARGEST)
        model_id = f"{session.session_id}:train:{number}"
        earlier = self._state.ledger.earlier(RequestKey("model", model_id), digest_of(fields))
        if earlier is not None:
            return earlier
        models = self._state.tenants.models(session.tenant)
        if len(models) >= self._state.limits.max_models:
            raise invalid(
                f"{self._state.limits.max_models} models are trained already (`server.max_models`): finish a session"
                " by closing its client, or raise the limit"
            )
        full = sum(model.settings is not None and not model.settings.rank for model in models)
        if not settings.rank and full >= self._state.limits.max_full_models:
            raise invalid(
                f"{full} models with all weights are trained already (`server.max_full_models`): finish a session by"
                " closing its client, or raise the limit"
            )
        metadata = fields.get("user_metadata")
        written = {} if metadata is None else mapping(metadata, "user_metadata")
        return self._add(ServedModel(model_id, session, settings, metadata=written), fields, act, route)

    def _add(
        self,
        model: ServedModel,
        fields: dict[str, Any],
        act: Callable[[ServedModel], Awaitable[dict[str, Any]]],
        route: str,
    ) -> Promise:
        state, session = self._state, model.session

        async def first() -> dict[str, Any]:
            try:
                return await act(model)
            except (RequestError, WorkerGroupError, OSError) as error:
                # After a death of a worker or the manager, the next start creates the model again.
                if isinstance(error, WorkerGroupError) and death(error) is not None:
                    raise
                session.models.pop(model.model_id, None)
                for call in (*model.order.ready, *model.order.waiting.values()):
                    call.promise.settle(RequestFailure("the model could not be created"))
                raise

        again = state.ledger.resumed is not None
        promise = state.ledger.promise(
            session.tenant,
            session.session_id,
            RequestKey("model", model.model_id),
            digest_of(fields),
            route,
            fields,
            answer={"model_id": model.model_id},
        )
        session.models[model.model_id] = model
        model.order.ready.append(Call(promise, first, again))
        state.actor_turns.wake()
        return promise

    # Passes and steps

    def learn(self, tenant: str, request: PassRequest) -> Promise:
        """Compute a loss, and its gradients unless `forward_only`."""
        fields = {"seq_id": request.seq_id, "model_id": request.model_id, "forward_only": request.forward_only}

        def prepare(model: ServedModel) -> Act:
            try:
                settings = loss_settings(request.loss, request.settings)
                if model.unstepped > _MOST_UNSTEPPED and not request.forward_only:
                    raise invalid(f"the passes since the last step have {model.unstepped >> 30} GiB: take a step first")
            except RequestError as error:
                return _failing(model, error, counts=not request.forward_only)
            backward = not request.forward_only

            def data() -> list[Datum]:
                decoded = read_data(request)
                check_data(decoded, request.loss, self._state.facts.vocabulary, self._state.limits.context_length)
                return decoded

            async def outcome() -> PassOutcome:
                # Decode at the request's turn, so that waiting requests hold only their bodies.
                decoded = await in_thread(data)
                model.unstepped += len(request.digest_bytes) if backward else 0
                ranks = await self._state.actor.learn(model.model_id, decoded, request.loss, settings, backward)
                logprobs: dict[int, FloatArray] = {}
                for rank in ranks:
                    logprobs.update(rank.logprobs)
                total = math.fsum(rank.loss for rank in ranks)
                if not math.isfinite(total):
                    raise invalid(f"the loss is {total}: look at the log-probabilities and advantages of the batch")
                metrics = {"loss:sum": total, "tokens:sum": float(sum(len(datum.tokens) for datum in decoded))}
                if backward:
                    self._state.figures.passed(metrics["tokens:sum"], total)
                return PassOutcome([logprobs[place] for place in range(len(decoded))], metrics)

            async def act() -> bytes:
                try:
                    return await in_thread(pass_bytes, await outcome())
                except BaseException as error:
                    if backward:
                        refused = f"an earlier pass was refused ({error})"
                        failed = refused if isinstance(error, RequestError) else f"pass {request.seq_id} failed"
                        model.failed = model.failed or failed
                    raise

            return act

        return self._sequenced(tenant, fields, prepare, "forward_backward", request.digest_bytes, request.tokens)

    def step(self, tenant: str, fields: dict[str, Any]) -> Promise:
        """Take an optimizer step with the gradients since the last one."""

        def prepare(model: ServedModel) -> Act:
            settings = adam(fields)

            async def act() -> dict[str, Any]:
                model.unstepped = 0
                if model.failed:
                    why, model.failed = model.failed, ""
                    await self._state.actor.drop_gradients(model.model_id)
                    raise invalid(
                        f"{why}, so that no step was taken, and all gradients since the last step were dropped: send"
                        " the passes and the step again"
                    )
                metrics = (await self._state.actor.step(model.model_id, settings, fields["seq_id"]))[0]
                if fields["seq_id"] > model.reported:
                    self._state.step_finished(StepFigures(metrics["grad_norm"], settings.learning_rate))
                self._state.points.stepped(model, fields["seq_id"])
                return {"metrics": metrics, "type": "optim_step"}

            return act

        return self._sequenced(tenant, fields, prepare, "optim_step")

    # Saved weights

    def save_weights(self, tenant: str, fields: dict[str, Any]) -> Promise:
        """Save a model's weights and the state of its optimizer under a name."""

        def prepare(model: ServedModel) -> Act:
            name, ttl = self._name(fields), _ttl(fields)
            overwrite = flag(fields, "overwrite", default=False)

            async def act() -> dict[str, Any]:
                self._check_stored(model)
                path = await self._state.store.save(
                    tenant,
                    model.model_id,
                    "weights",
                    name,
                    lambda folder: self._state.actor.save(model.model_id, folder, True),
                    overwrite=overwrite,
                    ttl=ttl,
                    metadata=model.metadata,
                    seq_id=fields["seq_id"],
                )
                return {"path": path, "type": "save_weights"}

            return act

        return self._sequenced(tenant, fields, prepare, "save_weights")

    def save_for_sampler(self, tenant: str, fields: dict[str, Any]) -> Promise:
        """Save a model's weights for sampling, under a name, or for one sampler."""

        def prepare(model: ServedModel) -> Act:
            ttl = _ttl(fields)
            if fields.get("kind", "snapshot") != "snapshot":
                raise invalid("only samplers of kind `snapshot` are served: leave `kind` out")

            async def write(folder: str) -> None:
                await self._state.actor.save(model.model_id, folder, False)

            if fields.get("path") is not None:
                name = self._name(fields)

                async def named() -> dict[str, Any]:
                    self._check_stored(model)
                    kind, run = "sampler_weights", model.model_id
                    seq_id = fields["seq_id"]
                    path = await self._state.store.save(tenant, run, kind, name, write, ttl=ttl, seq_id=seq_id)
                    return {"path": path, "type": "save_weights_for_sampler"}

                return named
            number = whole(fields, "sampling_session_seq_id", 0, _LARGEST)

            async def unnamed() -> dict[str, Any]:
                session = model.session
                folder = await self._state.store.snapshot(session.session_id, write)
                sampler = Sampler(f"{session.session_id}:sample:{number}", session, None, folder)
                self._state.file.keep_sampler(sampler.sampler_id, session.session_id, None, folder.name)
                session.samplers[sampler.sampler_id] = sampler
                self._state.drop_snapshots(session)
                return {"sampling_session_id": sampler.sampler_id, "path": None, "type": "save_weights_for_sampler"}

            return unnamed

        return self._sequenced(tenant, fields, prepare, "save_weights_for_sampler")

    def _check_stored(self, model: ServedModel) -> None:
        self._state.quotas.check_stored(self._state.store.folder(model.session.tenant))

    def _name(self, fields: dict[str, Any]) -> str:
        """Return the name to save under: the client's, or one with the request's number."""
        name = fields.get("path")
        return self._state.store.check_name(f"request-{fields.get('seq_id')}" if name is None else name)

    def _sequenced(
        self,
        tenant: str,
        fields: dict[str, Any],
        prepare: Callable[[ServedModel], Act],
        route: str,
        body: bytes = b"",
        tokens: int = 0,
    ) -> Promise:
        """Return the promise of a request in the order of a model's requests.

        If `prepare` finds invalid content, the request still takes its number, because the client sends no other
        request with that number, and its promise fails.

        Args:
            tenant: the tenant of the request.
            fields: the fields with `model_id` and `seq_id`.
            prepare: returns the function to call at the request's turn.
            route: the route of the request.
            body: the body of the request, if not JSON.
            tokens: the tokens that count for the tenant's quota.

        Raises:
            RequestError: there is no such model, the number is invalid, or a limit is exceeded.
        """
        state = self._state
        model = state.tenants.model(tenant, fields.get("model_id"))
        digest = hashlib.sha256(body).digest() if body else digest_of(fields)
        seq_id = whole(fields, "seq_id", 1, _LARGEST)
        key = RequestKey("request", model.model_id, seq_id)
        earlier = state.ledger.earlier(key, digest)
        if earlier is not None:
            return earlier
        model.order.check(seq_id)
        again = state.ledger.resumed is not None
        # Always accept the next number, as all others wait for it.
        if seq_id != model.order.next and not again:
            state.check_pending(tenant)
        if not again:
            state.quotas.take(tenant, tokens)
        try:
            act = prepare(model)
        except RequestError as error:
            act = _failing(model, error, counts=False)

        async def numbered() -> Any:
            try:
                return await act()
            finally:
                model.done = seq_id

        written = {"model_id": model.model_id} if body else fields
        promise = state.ledger.promise(tenant, model.session.session_id, key, digest, route, written, body)
        changes = route in _CHANGING and not fields.get("forward_only")
        model.order.put(seq_id, Call(promise, numbered, again=again and changes))
        state.actor_turns.wake()
        return promise


def _failing(model: ServedModel, error: RequestError, *, counts: bool) -> Act:
    """Return a call that raises an error; with `counts`, the next step fails, too."""

    async def act() -> None:
        if counts:
            model.failed = model.failed or f"an earlier pass was refused ({error})"
        raise error

    return act


def _ttl(fields: dict[str, Any]) -> int | None:
    return None if fields.get("ttl_seconds") is None else whole(fields, "ttl_seconds", 1, _TEN_YEARS)


def _check_optimizer(fields: dict[str, Any]) -> None:
    chosen = fields.get("optimizer_config")
    if chosen is not None and mapping(chosen, "optimizer_config").get("type", "adamw") != "adamw":
        raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, "only the optimizer adamw is served")
