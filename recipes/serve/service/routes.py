"""The routes of the Tinker SDK that the service supports, and the resumption of what came by them in earlier starts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from recipes.language.loopback_server import (
    LARGEST_BODY,
    RequestError,
    check_length,
    in_thread,
    json_body,
    prove,
    read_body,
    unless_gone,
)
from recipes.serve.service.ledger import Promise, RequestFailure, StoredRequest
from recipes.serve.service.requests_and_results import read_pass
from recipes.serve.service.sampling import SamplingRequests
from recipes.serve.service.service_state import ServiceState
from recipes.serve.service.tenants import ClientSession, Keys, Sampler
from recipes.serve.service.training import TrainingRequests
from recipes.serve.service.weight_store import ModelPoint
from recipes.serve.values import AdapterSettings, read_adapter
from rlinf_core.errors import RunError

LOGGER: Final = logging.getLogger("rlinf")

_PROTOBUF: Final = "application/x-protobuf"
_CLIENT_GONE: Final = 499
# The maximum bytes of a body without a prompt or data.
_LARGEST_FIELDS: Final = 1 << 20
# Seconds to hold a request for a result before the client must ask again.
HOLD_SECONDS: Final = 20.0
# The tested versions of the SDK.
TRIED: Final = "0.38."
_FLAGS: Final = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "parallel_fwdbwd_chunks": True,
    # Each concurrent request has a connection.
    "sample_max_concurrent_requests": 128,
}

Fields = dict[str, Any]
Endpoint = Callable[[Request], Awaitable[Response]]


class SdkRoutes:
    """The handlers of requests.

    Args:
        state: the state of the service.
        keys: the keys of the tenants.
    """

    def __init__(self, state: ServiceState, keys: Keys) -> None:
        self._state = state
        self._keys = keys
        self._training = training = TrainingRequests(state)
        self._sampling = sampling = SamplingRequests(state)
        # Requests whose answer is a promise, by route; a later start may repeat them.
        self._promised: dict[str, Callable[[str, Fields], Promise]] = {
            "create_model": training.create_model,
            "optim_step": training.step,
            "save_weights": training.save_weights,
            "save_weights_for_sampler": training.save_for_sampler,
            "load_weights": training.load_weights,
            "asample": sampling.sample,
        }

    def application(self) -> Starlette:
        """Return the ASGI application."""
        answered: dict[str, Callable[[str, Fields], Fields]] = {
            "client/config": lambda tenant, fields: _FLAGS,
            "client/dynamic_config": lambda tenant, fields: {"refresh_interval_sec": 300},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "get_info": self._info,
            "create_sampling_session": self._sampling.create,
            "weights_info": self._weights_info,
            "cancel_future": self._cancel,
        }
        gets: dict[str, Callable[[str, str], Fields]] = {
            "get_server_capabilities": lambda tenant, name: self._capabilities(),
            "samplers/{name}": self._sampling.describe,
            "training_runs/{name}": self._run,
        }
        posts = {
            path: self._posting(
                lambda tenant, fields, act=act: act(tenant, fields).answer,
                # Only prompts may be large, as the fields of other requests are kept until their turn.
                LARGEST_BODY if path == "asample" else _LARGEST_FIELDS,
            )
            for path, act in self._promised.items()
        }
        posts |= {path: self._posting(act) for path, act in answered.items()}
        posts |= {
            "sessions/{name}/finish": self._finish,
            "telemetry": self._telemetry,
            "forward_backward": self._learn,
            "retrieve_future": self._retrieve,
        }
        return Starlette(
            routes=[
                *(Route(f"/api/v1/{path}", act, methods=["POST"]) for path, act in posts.items()),
                *(Route(f"/api/v1/{path}", self._getting(act), methods=["GET"]) for path, act in gets.items()),
            ],
            exception_handlers={
                RequestError: _refused,
                RunError: _not_written,
                HTTPException: _not_routed,
                ClientDisconnect: _gone,
            },
        )

    def resume(self) -> int:
        """Resume the sessions of earlier starts, and return their number.

        A model is restored at its last point, and later requests are repeated. They compute the same results, so that
        no step is lost or taken twice; outcomes already sent to clients stay unchanged.

        Raises:
            RunError: the sessions cannot be read.
        """
        count = 0
        for session_id, tenant in self._state.file.sessions():
            if tenant not in self._state.limits.tenants:
                continue
            session = self._state.tenants.begin(tenant, session_id)
            try:
                self._resume(session)
            except (KeyError, TypeError, ValueError, OSError) as error:
                LOGGER.warning("session %s cannot continue, its record is damaged: %s", session_id, error)
                self._state.end_session(session, "the session was damaged when the server started again")
                continue
            count += 1
        return count

    def _resume(self, session: ClientSession) -> None:
        """Resume the samplers of a session, then its requests in order of arrival.

        Raises:
            KeyError, TypeError, ValueError: the stored data are damaged.
            OSError: the files of a point are damaged.
        """
        ledger, file = self._state.ledger, self._state.file
        root = file.folder(session.session_id)
        for sampler_id, path, snapshot in file.samplers(session.session_id):
            folder = None if snapshot is None else root / Path(snapshot).name
            if path is not None:
                folder = self._state.store.locate(session.tenant, path)
            elif folder is not None and not folder.is_dir():
                continue  # replaced by newer snapshots
            session.samplers[sampler_id] = Sampler(sampler_id, session, path, folder)
        points: dict[str, ModelPoint] = {}
        for model_id, (number, name) in file.points(session.session_id).items():
            folder = root / Path(name).name
            points[model_id] = ModelPoint(number, folder, read_adapter(folder))
        for request in ledger.requests(session.session_id):
            ledger.resumed = request.promise
            try:
                self._take(session, request, points.get(request.key.owner))
            except RequestError as error:
                LOGGER.warning("a request of an earlier start is not taken again: %s", error)
                request.promise.settle(RequestFailure(str(error)))
            finally:
                ledger.resumed = None

    def _take(self, session: ClientSession, request: StoredRequest, point: ModelPoint | None) -> None:
        """Repeat a request, unless its outcome and effect exist.

        Raises:
            RequestError: the request can no longer be done.
        """
        (kind, model_id, number), outcome = request.key, request.promise.outcome
        if kind == "sample":
            if outcome is None:
                self._sampling.resume(session, request)
        elif kind == "model" and isinstance(outcome, RequestFailure):
            pass
        elif kind == "model" and point is not None:
            self._training.resume(session, model_id, request.fields, point)
        elif point is not None and number <= point.seq_id:
            pass
        elif kind == "model" or model_id in session.models:
            if request.route == "forward_backward":
                self._training.learn(session.tenant, read_pass(request.body))
            else:
                self._promised[request.route](session.tenant, request.fields)
            if outcome is not None and kind == "request":
                session.models[model_id].reported = number
        else:
            request.promise.settle(RequestFailure("the model could not be created"))

    # Handlers

    def _tenant(self, request: Request) -> str:
        """Return the tenant of a request.

        Raises:
            RequestError: the key is unknown, or the body is too large or compressed.
        """
        tenant = self._keys.tenant(request.headers.get("x-api-key", ""))
        prove(request, tenant)
        check_length(request)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are not read: send them as they are"
            )
        return tenant

    def _posting(self, act: Callable[[str, Fields], Fields], most: int = _LARGEST_FIELDS) -> Endpoint:
        async def answer(request: Request) -> Response:
            tenant = self._tenant(request)
            return JSONResponse(act(tenant, await json_body(request, most)))

        return answer

    def _getting(self, act: Callable[[str, str], Fields]) -> Endpoint:
        async def answer(request: Request) -> Response:
            return JSONResponse(act(self._tenant(request), request.path_params.get("name", "")))

        return answer

    async def _learn(self, request: Request) -> Response:
        tenant = self._tenant(request)
        if _PROTOBUF not in request.headers.get("content-type", ""):
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body of forward_backward must be {_PROTOBUF}")
        asked = await in_thread(read_pass, await read_body(request))
        return JSONResponse(self._training.learn(tenant, asked).answer)

    async def _retrieve(self, request: Request) -> Response:
        tenant = self._tenant(request)
        request_id = (await json_body(request, _LARGEST_FIELDS)).get("request_id")
        promise = self._state.ledger.find(tenant, str(request_id))
        outcome = await unless_gone(request, promise.wait(HOLD_SECONDS))
        if outcome is None:
            body = {"type": "try_again", "request_id": promise.request_id, "queue_state": "active"}
            return JSONResponse(body, HTTPStatus.REQUEST_TIMEOUT)
        if isinstance(outcome, RequestFailure):
            return JSONResponse({"error": outcome.message, "category": outcome.category})
        if isinstance(outcome.content, bytes):
            return Response(outcome.content, media_type=_PROTOBUF)
        return JSONResponse(outcome.content)

    async def _telemetry(self, request: Request) -> Response:
        """Accept telemetry of the SDK and discard it, as it may contain the API key."""
        self._tenant(request)
        await read_body(request)
        return JSONResponse({"status": "accepted"})

    # Sessions

    def _create_session(self, tenant: str, fields: Fields) -> Fields:
        version, warning = str(fields.get("sdk_version", ""))[:40], None
        if not version.startswith(TRIED):
            warning = f"this server was tried with tinker {TRIED}x, and not with {version or 'an unknown version'}"
        session = self._state.begin_session(tenant)
        info = None
        if tenant == self._state.limits.full_weights:
            info = "all weights of a model are trained for this key; the rank of a LoRA has no effect"
        messages = {"info_message": info, "warning_message": warning}
        return {"session_id": session.session_id, **messages, "type": "create_session"}

    def _heartbeat(self, tenant: str, fields: Fields) -> Fields:
        self._state.tenants.session(tenant, fields.get("session_id"))
        return {"type": "session_heartbeat"}

    async def _finish(self, request: Request) -> Response:
        session = self._state.tenants.session(self._tenant(request), request.path_params["name"])
        self._state.end_session(session, "the session was finished by its client")
        return JSONResponse({})

    def _cancel(self, tenant: str, fields: Fields) -> Fields:
        promise = self._state.ledger.find(tenant, str(fields.get("request_id")))
        self._state.sampler_turns.cancel({promise.request_id})
        return {}

    # Queries

    def _capabilities(self) -> Fields:
        limits = self._state.limits
        model = {"model_name": limits.model_name, "max_context_length": limits.context_length}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    def _info(self, tenant: str, fields: Fields) -> Fields:
        model = self._state.tenants.model(tenant, fields.get("model_id"))
        name = self._state.limits.model_name
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": name,
            **_kind(model.settings),
            "model_data": {"model_name": name, "tokenizer_id": self._state.tokenizer},
        }

    def _weights_info(self, tenant: str, fields: Fields) -> Fields:
        path = fields.get("tinker_path") or fields.get("path")
        saved = self._state.store.find(tenant, path)
        settings = saved.settings
        trained = {name: value for name, value in settings._asdict().items() if name.startswith("train_")}
        return {"base_model": saved.base_model, **_kind(settings), **trained}

    def _run(self, tenant: str, name: str) -> Fields:
        model = self._state.tenants.model(tenant, name)
        return {
            "training_run_id": model.model_id,
            "base_model": self._state.limits.model_name,
            "model_owner": tenant,
            **_kind(model.settings),
            "last_request_time": model.session.last_seen(),
            "user_metadata": model.metadata or None,
        }


def _kind(settings: AdapterSettings | None) -> Fields:
    """Return the fields of a model's kind for clients."""
    return {
        "is_lora": settings is None or settings.rank > 0,
        "lora_rank": (settings.rank or None) if settings else None,
    }


def _refused(request: Request, error: Exception) -> Response:
    refusal = cast("RequestError", error)
    return JSONResponse({"detail": str(refusal)}, refusal.status, refusal.headers)


def _not_written(request: Request, error: Exception) -> Response:
    LOGGER.warning("a request was rejected: %s", error)
    return JSONResponse({"detail": "the server cannot write its files: try again"}, HTTPStatus.SERVICE_UNAVAILABLE)


def _not_routed(request: Request, error: Exception) -> Response:
    status = cast("HTTPException", error).status_code
    message = f"{request.url.path} is not served: this is a training service with the routes of training and sampling"
    return JSONResponse({"detail": message}, status)


def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)  # the client has disconnected
