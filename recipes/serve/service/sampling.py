"""Requests that sample: samplers, and answers to prompts."""

from __future__ import annotations

import secrets
import time
from typing import Any, Final

from recipes.serve.config import MOST_LIKELY
from recipes.serve.service.ledger import Promise, RequestKey, StoredRequest, digest_of
from recipes.serve.service.request_fields import (
    check_tokens,
    flag,
    invalid,
    mapping,
    number,
    prompt_tokens,
    stops,
    whole,
)
from recipes.serve.service.service_state import ServiceState
from recipes.serve.service.tenants import ClientSession, Sampler
from recipes.serve.values import Drawing, request_of

_LARGEST: Final = 2**31 - 1
_MOST_SAMPLERS: Final = 4096
# The maximum numbers of one result.
_MOST_NUMBERS: Final = 1 << 22
_SEEDS: Final = 2**63 - 1
_PARAMS: Final = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
# Unsupported fields, and what to use instead.
_NOT_SERVED: Final = {
    "target_prompt_logprobs": "forward() of a TrainingClient gives log-probabilities of any targets",
    "prompt_alt_tokens_k": "sample with max_tokens=1 from each prefix",
    "record_stability_info": "stable_reinforce is not served; use importance_sampling, ppo, cispo or gspo",
}


class SamplingRequests:
    """Requests of clients to samplers.

    Args:
        state: the state of the service.
    """

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    def create(self, tenant: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Create a sampler from saved weights, or from the base model."""
        session = self._state.tenants.session(tenant, fields.get("session_id"))
        place = whole(fields, "sampling_session_seq_id", 0, _LARGEST)
        path, folder = fields.get("model_path"), None
        if path is not None:
            folder = self._state.store.find(tenant, path).folder
            # Other saved weights may be overwritten, but those of a sampler must not change.
            if folder.parent.name != "sampler_weights":
                raise invalid(f"`{path}` is to be trained on: sample from what save_weights_for_sampler has saved")
        if path is None or fields.get("base_model") is not None:
            self._state.check_base_model(fields.get("base_model"))
        sampler = Sampler(f"{session.session_id}:sample:{place}", session, path, folder)
        there = session.samplers.get(sampler.sampler_id)
        if there is None and len(session.samplers) >= _MOST_SAMPLERS:
            raise invalid(f"the session has {_MOST_SAMPLERS} samplers: begin another one by a new ServiceClient")
        if there is None:
            self._state.file.keep_sampler(sampler.sampler_id, session.session_id, path, None)
            there = session.samplers[sampler.sampler_id] = sampler
        if there.path != path or (path is None and there.folder is not None):
            raise invalid(f"`sampling_session_seq_id` {place} names another sampler: number them one by one")
        return {"sampling_session_id": sampler.sampler_id, "type": "create_sampling_session"}

    def describe(self, tenant: str, sampler_id: str) -> dict[str, Any]:
        """Return what a sampler samples from."""
        sampler = self._state.tenants.sampler(tenant, sampler_id)
        return {
            "sampler_id": sampler.sampler_id,
            "base_model": self._state.limits.model_name,
            "model_path": sampler.path,
        }

    def sample(self, tenant: str, fields: dict[str, Any]) -> Promise:
        """Submit a prompt for sampling, and return the promise of the answers."""
        if fields.get("sampling_session_id") is None:
            raise invalid("`sampling_session_id` is missing: create a SamplingClient")
        sampler = self._state.tenants.sampler(tenant, fields["sampling_session_id"])
        if fields.get("model_path") not in (None, sampler.path):
            raise invalid("`model_path` is not that of the sampler: leave it out")
        if fields.get("base_model") is not None:
            self._state.check_base_model(fields["base_model"])
        key, digest = RequestKey("sample", sampler.sampler_id, whole(fields, "seq_id", 0, _SEEDS)), digest_of(fields)
        sampler.used = time.monotonic()
        earlier = self._state.ledger.earlier(key, digest)
        if earlier is not None:
            return earlier
        for name, instead in _NOT_SERVED.items():
            if fields.get(name):
                raise invalid(f"`{name}` is not served: {instead}")
        self._state.check_pending(tenant)
        drawing = self._drawing(fields, sampler)
        self._state.quotas.take(tenant, len(drawing.prompt) + drawing.samples * drawing.max_tokens)
        names = {"sample_sequence_ids": [secrets.token_hex(8) for _ in range(drawing.samples)]}
        written = drawing._asdict()
        promise = self._state.ledger.promise(
            tenant, sampler.session.session_id, key, digest, "asample", written, answer=names
        )
        self._state.sampler_turns.submit(drawing._replace(request_id=promise.request_id), promise)
        return promise

    def resume(self, session: ClientSession, request: StoredRequest) -> None:
        """Repeat a request of an earlier start, which samples the same answers.

        Raises:
            RequestError: the sampler no longer exists.
        """
        sampler = self._state.tenants.sampler(session.tenant, request.key.owner)
        fields, promise = request.fields, request.promise
        lists: dict[str, Any] = {name: tuple(fields[name]) for name in ("prompt", "stop_tokens", "stop_texts")}
        snapshot = None if sampler.folder is None else str(sampler.folder)
        values: dict[str, Any] = {**fields, **lists, "request_id": promise.request_id, "snapshot": snapshot}
        self._state.sampler_turns.submit(Drawing(**values), promise)

    def _drawing(self, fields: dict[str, Any], sampler: Sampler) -> Drawing:
        longest = self._state.limits.context_length
        prompt = prompt_tokens(fields.get("prompt"))
        check_tokens(prompt, self._state.facts.vocabulary, "`prompt`")
        if len(prompt) >= longest:
            raise invalid(f"the prompt has {len(prompt)} tokens, and leaves no room for an answer in {longest}")
        params = mapping(fields.get("sampling_params"), "sampling_params", _PARAMS)
        room = longest - len(prompt)
        tokens = whole(params, "max_tokens", 1, _LARGEST, room)
        if tokens > room:
            raise invalid(f"a prompt of {len(prompt)} and `max_tokens` {tokens} exceed the context of {longest} tokens")
        samples = whole(fields, "num_samples", 1, self._state.limits.max_samples, 1)
        most_likely = min(MOST_LIKELY, self._state.facts.vocabulary)
        answer_top = whole(fields, "topk_sample_logprobs", 0, most_likely, 0)
        if samples * tokens * answer_top > _MOST_NUMBERS:
            raise invalid(
                f"{samples} answers of up to {tokens} tokens with {answer_top} likely ones each are more than"
                f" {_MOST_NUMBERS} numbers: ask for fewer at once"
            )
        # Equal requests without a seed get different answers.
        seed = whole(params, "seed", -(2**63), 2**64 - 1, secrets.randbits(62)) & _SEEDS
        stop_tokens, stop_texts = stops(params.get("stop"), self._state.facts.stops)
        drawing = Drawing(
            request_id="",
            snapshot=None if sampler.folder is None else str(sampler.folder),
            prompt=prompt,
            samples=samples,
            max_tokens=tokens,
            temperature=number(params, "temperature", 1.0),
            top_k=whole(params, "top_k", -1, _LARGEST, -1),
            top_p=number(params, "top_p", 1.0),
            seed=seed,
            stop_tokens=stop_tokens,
            stop_texts=stop_texts,
            prompt_logprobs=flag(fields, "prompt_logprobs", default=False),
            prompt_top=whole(fields, "topk_prompt_logprobs", 0, most_likely, 0),
            answer_top=answer_top,
            prompt_last=whole(fields, "prompt_logprobs_last_n", 1, len(prompt), len(prompt)),
        )
        try:
            request_of(drawing)
        except ValueError as error:
            raise invalid(str(error)) from None
        return drawing
