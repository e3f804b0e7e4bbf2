"""The workers that generate the turns of conversations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from recipes.agent.conversation.call_forms import HERMES
from recipes.agent.conversation.turn_messages import DrawnTurn, DrawRequest, TurnEncoder, agent_key, engine_key
from recipes.language.answers.prompt_messages import GenerationReport, Inbox
from recipes.language.answers.sequences import Request, SamplingParams, Sequence
from recipes.language.config.language_config import LanguageConfig
from recipes.language.engines.engine import Engine
from recipes.language.engines.registry import StandInEngine
from recipes.language.loop.worker_groups import LanguageLayout
from recipes.language.rules.model_rules import require_conversations
from recipes.language.text.chat_template import TemplateRefusalError
from recipes.language.workers.request_tracker import EngineStream
from recipes.language.workers.rollout_worker import EngineWorker
from rlinf_core.process import pacing


class AgentRolloutWorker(EngineWorker):
    """Generates turns for agents with an engine that works on token ids."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__(config)
        # The unfinished requests, with the tokens of their messages.
        self._open: dict[str, tuple[DrawRequest, tuple[int, ...]]] = {}
        self._drawn = 0

    def init_worker(self, layout: LanguageLayout) -> None:
        """Start the engine; its weights arrive with the first `sync_model_from_actor`."""
        super().init_worker(layout)
        data = self._config.data
        self._encoder = TurnEncoder(
            self._tokenizer,
            apply_chat_template=data.apply_chat_template,
            template_arguments=data.chat_template_kwargs,
        )
        self._contact.compare(
            "conversations of the roles that are used",
            "the chat template of the tokenizer",
            lambda: require_conversations(self._config, self._encoder.template),
            cheap=True,
        )
        self._channel = self.connect_channel(layout.answers)
        self._inbox = Inbox(self._channel, engine_key(self._rank))

    def make_engine(self, stops: tuple[int, ...]) -> Engine:
        """See `EngineWorker`; in a rehearsal, agents choose the lengths of turns."""
        return super().make_engine(stops) if pacing.active is None else StandInEngine(whole=True)

    def serve(self) -> GenerationReport:
        """Generate requested turns until the request None arrives."""
        self._wake()
        before, stream = self._drawn, EngineStream(self._engine, self._begin, self._finish)
        stream.run(self._inbox)
        return GenerationReport(self._drawn - before, stream.seconds)

    def serve_forever(self) -> None:
        """Generate requested turns, and load weights as the actor sends them, until the request None arrives."""
        self._wake()
        partial = self._config.runner.partial_rollout
        stream = EngineStream(self._engine, self._begin, self._finish, self._receive, self._load, partial=partial)
        stream.run(self._inbox)

    def _begin(self, requests: Iterable[DrawRequest]) -> None:
        """Submit requests; those that cannot be encoded or have no room left are answered at once."""
        for request in requests:
            nothing = DrawnTurn(request.request_id, (), (), (), (), "", "length")
            try:
                observed = self._encoder.encode(request.context, request.messages, request.tools)
            except Exception as error:  # noqa: BLE001 - caused by these messages: other runs continue
                why = error.reason if isinstance(error, TemplateRefusalError) else f"{type(error).__name__}: {error}"
                self._send(request.agent, [nothing._replace(refusal=why)])
                continue
            longest = min(request.max_tokens, self._engine.longest or request.max_tokens)
            room = longest - len(request.context) - len(observed)
            too_long = not request.context and len(observed) > self._config.data.max_prompt_length
            if room < 1 or too_long or not request.max_new_tokens:
                counted = () if request.max_new_tokens else observed
                self._send(request.agent, [nothing._replace(observed=counted)])
                continue
            if not request.context and not observed:
                self._send(request.agent, [nothing._replace(refusal="they have no tokens")])
                continue
            name = f"{request.agent}:{request.request_id}"
            self._open[name] = request, observed
            params, prompt = self._params(request, min(request.max_new_tokens, room)), request.context + observed
            self._engine.submit(Request(request_id=name, prompt=prompt, params=params, sample_offset=request.sample))

    def _params(self, request: DrawRequest, most: int) -> SamplingParams:
        sampling = self._config.rollout.sampling_params
        return SamplingParams(
            temperature=request.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_new_tokens=most,
            min_new_tokens=min(sampling.min_new_tokens, most),
            stop_token_ids=tuple(sampling.stop_token_ids),
            stop=(*sampling.stop, *request.stop, *self._call_end(request)),
            seed=request.seed,
        )

    def _call_end(self, request: DrawRequest) -> tuple[str, ...]:
        """Return the stop text after a call if the turn ends with its first call."""
        form = self._encoder.form or HERMES
        return (form.end,) if request.tools is not None and request.tools.single and form.end else ()

    def _finish(self, answers: Iterable[Sequence]) -> None:
        """Send finished turns to the requesting agents, one message per agent."""
        turns: defaultdict[int, list[DrawnTurn]] = defaultdict(list)
        for answer in answers:
            request, observed = self._open.pop(answer.request_id)
            self._drawn += len(answer.tokens)
            if answer.finish_reason == "aborted":
                why = answer.failure or "the engine gave a turn up"
                nothing = DrawnTurn(request.request_id, (), (), (), (), "", "aborted", failure=why)
                turns[request.agent].append(nothing)
                continue
            said = answer.tokens[:-1] if answer.tokens[-1] in self._stops else answer.tokens
            text = self._encoder.text(said)
            turn = DrawnTurn(
                request.request_id,
                observed,
                answer.tokens,
                answer.logprobs,
                answer.versions,
                text,
                answer.finish_reason,
                self._encoder.raw_text(said),
                self._encoder.form if request.tools is not None else None,
                self._encoder.opens_thought(request.context + observed),
            )
            turns[request.agent].append(turn)
        for agent, finished in turns.items():
            self._send(agent, finished)

    def _send(self, agent: int, turns: list[DrawnTurn]) -> None:
        self._channel.put(tuple(turns), key=agent_key(agent))
