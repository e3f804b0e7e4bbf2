"""Resumption of sessions: models, samplers and requests of earlier starts continue as if the server had not ended.

A model is restored at its last point, and later requests are repeated. They compute the same results, so that no step
is lost or taken twice; outcomes already sent to clients stay unchanged.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from recipes.language.listening.request_error import RequestError
from recipes.serve.saved_files import read_adapter
from recipes.serve.service.ledger import RequestFailure, StoredRequest
from recipes.serve.service.model_points import ModelPoint
from recipes.serve.service.sampling import SamplingRequests
from recipes.serve.service.service_state import ServiceState
from recipes.serve.service.tenants import ClientSession, Sampler
from recipes.serve.service.training import TrainingRequests
from recipes.serve.wire.requests_and_results import read_pass

LOGGER: Final = logging.getLogger("rlinf")


def resume_sessions(state: ServiceState, training: TrainingRequests, sampling: SamplingRequests) -> int:
    """Resume all sessions of a service, and return their number.

    Raises:
        RunError: the sessions cannot be read.
    """
    count = 0
    for session_id, tenant in state.file.sessions():
        if tenant not in state.limits.tenants:
            continue
        session = state.tenants.begin(tenant, session_id)
        try:
            _resume(state, training, sampling, session)
        except (KeyError, TypeError, ValueError, OSError) as error:
            LOGGER.warning("session %s cannot continue, its record is damaged: %s", session_id, error)
            state.end_session(session, "the session was damaged when the server started again")
            continue
        count += 1
    return count


def _resume(
    state: ServiceState, training: TrainingRequests, sampling: SamplingRequests, session: ClientSession
) -> None:
    """Resume the samplers of a session, then its requests in order of arrival.

    Raises:
        KeyError, TypeError, ValueError: the stored data are damaged.
        OSError: the files of a point are damaged.
    """
    ledger, file, root = state.ledger, state.file, state.file.folder(session.session_id)
    for sampler_id, path, snapshot in file.samplers(session.session_id):
        folder = None if snapshot is None else root / Path(snapshot).name
        if path is not None:
            folder = state.store.locate(session.tenant, path)
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
            _take(training, sampling, session, request, points.get(request.key.owner))
        except RequestError as error:
            LOGGER.warning("a request of an earlier start is not taken again: %s", error)
            request.promise.settle(RequestFailure(str(error)))
        finally:
            ledger.resumed = None


def _take(
    training: TrainingRequests,
    sampling: SamplingRequests,
    session: ClientSession,
    request: StoredRequest,
    point: ModelPoint | None,
) -> None:
    """Repeat a request, unless its outcome and effect exist.

    Raises:
        RequestError: the request can no longer be done.
    """
    (kind, model_id, number), outcome = request.key, request.promise.outcome
    if kind == "sample":
        if outcome is None:
            sampling.resume(session, request)
    elif kind == "model" and isinstance(outcome, RequestFailure):
        pass
    elif kind == "model" and point is not None:
        training.resume(session, model_id, request.fields, point)
    elif point is not None and number <= point.seq_id:
        pass
    elif kind == "model" or model_id in session.models:
        _again(training, session.tenant, request)
        if outcome is not None and kind == "request":
            session.models[model_id].reported = number
    else:
        request.promise.settle(RequestFailure("the model could not be created"))


def _again(training: TrainingRequests, tenant: str, request: StoredRequest) -> None:
    if request.route == "forward_backward":
        training.learn(tenant, read_pass(request.body))
        return
    {
        "create_model": training.create_model,
        "load_weights": training.load_weights,
        "optim_step": training.step,
        "save_weights": training.save_weights,
        "save_weights_for_sampler": training.save_for_sampler,
    }[request.route](tenant, request.fields)
