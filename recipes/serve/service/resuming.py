"""Sessions of earlier starts: their models, samplers and requests continue as if the server had not ended.

A model is restored as it was at its last point, and the requests after it are done again. They compute what they
computed before, so that no step is lost and none is taken twice; outcomes that were sent to clients stay as they are.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from recipes.language.listening.request_error import RequestError
from recipes.serve.service.journal import JournalEntry
from recipes.serve.service.ledger import Earlier, Outcome, RequestFailure, RequestRecord, read_outcome
from recipes.serve.service.model_points import ModelPoint, place_of, read_points
from recipes.serve.service.sampling import SamplingRequests
from recipes.serve.service.service_state import ServiceState
from recipes.serve.service.tenants import ClientSession, Sampler
from recipes.serve.service.training import TrainingRequests
from recipes.serve.wire.requests_and_results import read_pass

LOGGER: Final = logging.getLogger("rlinf")


def resume_sessions(state: ServiceState, training: TrainingRequests, sampling: SamplingRequests) -> int:
    """Take up all sessions in the journal of a service, and return how many there are.

    Raises:
        RunError: the journal cannot be read.
    """
    count = 0
    for session_id, entries in state.journal.sessions():
        if not entries:
            state.journal.end(session_id)  # nothing was written before the end
            continue
        if entries[0].fields.get("tenant") not in state.limits.tenants:
            continue
        session = state.tenants.begin(entries[0].fields["tenant"], session_id)
        try:
            _Resumed(state, training, sampling, session, entries).take()
        except (KeyError, TypeError, ValueError, OSError) as error:
            LOGGER.warning("session %s cannot continue, its record is damaged: %s", session_id, error)
            state.end_session(session, "the session was damaged when the server started again")
            continue
        count += 1
    return count


class _Resumed:
    """A session that is taken up."""

    def __init__(
        self,
        state: ServiceState,
        training: TrainingRequests,
        sampling: SamplingRequests,
        session: ClientSession,
        entries: list[JournalEntry],
    ) -> None:
        self._state = state
        self._training = training
        self._sampling = sampling
        self._session = session
        self._entries = entries
        self._folder = state.journal.folder(session.session_id)
        self._points: dict[str, ModelPoint] = read_points(self._folder, entries)
        outcomes = (entry for entry in entries if entry.kind == "outcome")
        self._outcomes: dict[str, Outcome] = {entry.fields["request_id"]: read_outcome(entry) for entry in outcomes}

    def take(self) -> None:
        """Take up samplers, then requests in the order in which they came.

        Raises:
            KeyError, TypeError, ValueError: an event is not of the form that the server writes.
        """
        for entry in self._entries:
            if entry.kind == "sampler":
                self._sampler(entry)
        for entry in self._entries:
            if entry.kind == "request":
                self._request(entry)

    def _sampler(self, entry: JournalEntry) -> None:
        name, path, snapshot = (entry.fields[key] for key in ("sampler_id", "path", "snapshot"))
        folder = None
        if path is not None:
            folder = self._state.store.locate(self._session.tenant, path)
        elif snapshot is not None:
            folder = self._folder / str(snapshot).replace("/", "")
            if not folder.is_dir():
                return  # newer ones took its place
        self._session.samplers[name] = Sampler(name, self._session, path, folder)

    def _request(self, entry: JournalEntry) -> None:
        fields, session, ledger = entry.fields, self._session, self._state.ledger
        outcome = self._outcomes.get(fields["request_id"])
        ledger.earlier_request = Earlier(fields["request_id"], fields["answer"], outcome)
        model_id, seq_id = place_of(entry)
        point = self._points.get(model_id)
        try:
            if not seq_id and model_id and isinstance(outcome, RequestFailure):
                self._claim(entry)
            elif fields["route"] == "asample":
                self._sampling.resume(session, entry, outcome)
            elif point is not None and not seq_id:
                self._training.resume(session, model_id, fields["fields"], point)
            elif point is not None and seq_id <= point.seq_id:
                self._claim(entry)
            elif not seq_id or model_id in session.models:
                self._again(fields["route"], dict(fields["fields"]), entry.body)
                if outcome is not None and seq_id:
                    session.models[model_id].reported = seq_id
            else:
                self._claim(entry)  # of a model that could not be created
        except RequestError as error:
            LOGGER.warning("a request of an earlier start is not taken again: %s", error)
        finally:
            ledger.earlier_request = None

    def _claim(self, entry: JournalEntry) -> None:
        """Record a request as answered: the model's checkpoint already has its effect."""
        fields, session = entry.fields, self._session
        key, digest = tuple(fields["key"]), bytes.fromhex(fields["digest"])
        self._state.ledger.promise(session.tenant, session.session_id, key, digest, RequestRecord(fields["route"]))

    def _again(self, route: str, fields: dict[str, Any], body: bytes) -> None:
        training, tenant = self._training, self._session.tenant
        if route == "forward_backward":
            training.learn(tenant, read_pass(body))
            return
        {
            "create_model": training.create_model,
            "load_weights": training.load_weights,
            "optim_step": training.step,
            "save_weights": training.save_weights,
            "save_weights_for_sampler": training.save_for_sampler,
        }[route](tenant, fields)
