"""The routes of the Tinker SDK that the service supports."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from recipes.language.listening.limits import (
    LARGEST_BODY,
    check_length,
    in_thread,
    json_body,
    prove,
    read_body,
    unless_gone,
)
from recipes.language.listening.request_error import RequestError
from recipes.serve.service.ledger import Promise, RequestFailure
from recipes.serve.service.resuming import resume_sessions
from recipes.serve.service.sampling import SamplingRequests
from recipes.serve.service.service_state import ServiceState
from recipes.serve.service.tenants import Keys
from recipes.serve.service.training import TrainingRequests
from recipes.serve.values import AdapterSettings
from recipes.serve.wire.requests_and_results import read_pass
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
        self._training = TrainingRequests(state)
        self._sampling = SamplingRequests(state)

    def resume(self) -> int:
        """Resume the sessions of earlier starts, and return their number.

        Raises:
            RunError: the sessions cannot be read.
        """
        return resume_sessions(self._state, self._training, self._sampling)

    def application(self) -> Starlette:
        """Return the ASGI application."""
        training, sampling = self._training, self._sampling
        promised: dict[str, Callable[[str, dict[str, Any]], Promise]] = {
            "create_model": training.create_model,
            "optim_step": training.step,
            "save_weights": training.save_weights,
            "save_weights_for_sampler": training.save_for_sampler,
            "load_weights": training.load_weights,
            "asample": sampling.sample,
        }
        answered: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
            "client/config": lambda tenant, fields: _FLAGS,
            "client/dynamic_config": lambda tenant, fields: {"refresh_interval_sec": 300},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "get_info": self._info,
            "create_sampling_session": sampling.create,
            "weights_info": self._weights_info,
            "cancel_future": self._cancel,
        }
        gets: dict[str, Callable[[str, str], dict[str, Any]]] = {
            "get_server_capabilities": lambda tenant, name: self._capabilities(),
            "samplers/{name}": sampling.describe,
            "training_runs/{name}": self._run,
        }
        posts = {
            path: self._posting(
                lambda tenant, fields, act=act: act(tenant, fields).answer,
                # Only prompts may be large, as the fields of other requests are kept until their turn.
                LARGEST_BODY if path == "asample" else _LARGEST_FIELDS,
            )
            for path, act in promised.items()
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

    def _create_session(self, tenant: str, fields: dict[str, Any]) -> dict[str, Any]:
        version, warning = str(fields.get("sdk_version", ""))[:40], None
        if not version.startswith(TRIED):
            warning = f"this server was tried with tinker {TRIED}x, and not with {version or 'an unknown version'}"
        session = self._state.begin_session(tenant)
        info = None
        if tenant == self._state.limits.full_weights:
            info = "all weights of a model are trained for this key; the rank of a LoRA has no effect"
        messages = {"info_message": info, "warning_message": warning}
        return {"session_id": session.session_id, **messages, "type": "create_session"}

    def _heartbeat(self, tenant: str, fields: dict[str, Any]) -> dict[str, Any]:
        self._state.tenants.session(tenant, fields.get("session_id"))
        return {"type": "session_heartbeat"}

    async def _finish(self, request: Request) -> Response:
        session = self._state.tenants.session(self._tenant(request), request.path_params["name"])
        self._state.end_session(session, "the session was finished by its client")
        return JSONResponse({})

    def _cancel(self, tenant: str, fields: dict[str, Any]) -> dict[str, Any]:
        promise = self._state.ledger.find(tenant, str(fields.get("request_id")))
        self._state.sampler_turns.cancel({promise.request_id})
        return {}

    # Queries

    def _capabilities(self) -> dict[str, Any]:
        limits = self._state.limits
        model = {"model_name": limits.model_name, "max_context_length": limits.context_length}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    def _info(self, tenant: str, fields: dict[str, Any]) -> dict[str, Any]:
        model = self._state.tenants.model(tenant, fields.get("model_id"))
        name = self._state.limits.model_name
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": name,
            **_kind(model.settings),
            "model_data": {"model_name": name, "tokenizer_id": self._state.tokenizer},
        }

    def _weights_info(self, tenant: str, fields: dict[str, Any]) -> dict[str, Any]:
        path = fields.get("tinker_path") or fields.get("path")
        saved = self._state.store.find(tenant, path)
        settings = saved.settings
        trained = {name: value for name, value in settings._asdict().items() if name.startswith("train_")}
        return {"base_model": saved.base_model, **_kind(settings), **trained}

    def _run(self, tenant: str, name: str) -> dict[str, Any]:
        model = self._state.tenants.model(tenant, name)
        return {
            "training_run_id": model.model_id,
            "base_model": self._state.limits.model_name,
            "model_owner": tenant,
            **_kind(model.settings),
            "last_request_time": model.session.last_seen(),
            "user_metadata": model.metadata or None,
        }


def _kind(settings: AdapterSettings | None) -> dict[str, Any]:
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
