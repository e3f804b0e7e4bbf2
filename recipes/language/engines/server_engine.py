"""An OpenAI-compatible completion server behind the engine interface."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from recipes.language.answers.sequences import Sequence
from recipes.language.engines.engine import Answer, EngineAnswerError, PauseMode, QueuedEngine, RequestQueue, StopTexts
from recipes.language.engines.engine_weights import ModelFolder
from recipes.language.engines.sampling import prompt_key, stream_key
from recipes.language.engines.server_answers import (
    JsonServer,
    ServerUnavailableError,
    checked_sequence,
    checked_together,
)
from recipes.language.models.fingerprint import fingerprint
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from recipes.language.config.rollout_config import ServerSettings

_TOKEN_TEXT: Final = re.compile("token_id:([0-9]{1,10})")
# Neutral values for everything that a server would otherwise take from its options or the model's
# generation_config.json, which would change the policy.
_NEUTRAL: Final[Mapping[str, Any]] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
    "logit_bias": None,
    "bad_words": [],
    "allowed_token_ids": None,
    "ignore_eos": False,
    "use_beam_search": False,
    "truncate_prompt_tokens": None,
    "response_format": None,
    "echo": False,
    "stream": False,
}
# A step waits at most this many seconds for an answer, so that its caller can do other things.
_PATIENCE = 0.2


class ServerEngine(QueuedEngine):
    """An engine that asks a server, with one request for all answers to a prompt.

    The server must accept prompts as token ids and return token ids, by `return_token_ids` or
    `return_tokens_as_token_ids`, as vLLM's does. Answers arrive when their request ends, so aborted answers have no
    tokens, and answers cannot be frozen.

    Args:
        settings: address, limits, and the folder of new weights.
        folder: the folder of the model that the server serves.
        dtype: the type of the weights written for the server.
        stop_token_ids: tokens that end every answer.
        decode: returns the text of token ids; needed for `SamplingParams.stop`.
        max_running_tokens: the maximum prompt and answer tokens of all running answers; 0: no limit.
        max_sequence_tokens: the maximum length of prompt and answer together; 0: the model's positions.
        adapter_scale: alpha / rank of LoRA adapters to load.

    Raises:
        ConfigError: the token's environment variable is not set, or the server lacks the model.
        ServerError: the server does not answer, or refuses the token.
    """

    def __init__(
        self,
        settings: ServerSettings,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        stop_token_ids: Iterable[int] = (),
        decode: Callable[[SequenceABC[int]], str] | None = None,
        max_running_tokens: int = 0,
        max_sequence_tokens: int = 0,
        adapter_scale: float = 1.0,
    ) -> None:
        self._settings = settings
        self._folder = ModelFolder(folder, adapter_scale)
        self._dtype = dtype
        self._server = JsonServer(
            settings.url or "",
            token=_token(settings),
            token_env=settings.token_env or "",
            timeout=settings.timeout,
            retries=settings.retries,
            most=settings.max_concurrent,
        )
        self._model, longest = self._served(self._folder.longest(max_sequence_tokens))
        self._stop_token_ids = tuple(stop_token_ids)
        self._stop_texts = None if decode is None else StopTexts(decode)
        queue = RequestQueue(
            max_sequence_tokens=longest,
            max_running_tokens=max_running_tokens,
            stops_at_texts=decode is not None,
            logprobs=settings.logprobs,
        )
        super().__init__(queue, max_running_tokens)
        # Pending requests, each with its answers to one prompt.
        self._running: dict[Future[Any], tuple[Answer, ...]] = {}
        # Whether the server has ever given a valid answer, and the number of failed requests since the last valid one.
        self._answers_well, self._failed = False, 0

    def _served(self, longest: int) -> tuple[str, int]:
        """Return the model's name at the server, and the longest sequence that both model and server accept."""
        listed = _fields(self._server.get("/v1/models")).get("data")
        models = [_fields(model) for model in cast("list[Any]", listed)] if isinstance(listed, list) else []
        by_name = {str(model.get("id")): model for model in models if model}
        name = self._settings.model or next(iter(by_name), "")
        if name not in by_name or (self._settings.model is None and len(by_name) > 1):
            raise ConfigError(
                f"the server serves {', '.join(f'`{model_id}`' for model_id in by_name) or 'no model'}",
                where=self._settings.url,
                help="set one of them as `rollout.engine_options.model`",
            )
        limit = by_name[name].get("max_model_len")
        return name, min(longest, limit) if type(limit) is int and limit > 0 and longest else longest

    # Requests

    @property
    def _in_flight(self) -> int:
        return sum(map(len, self._running.values()))

    @property
    def _reserved(self) -> int:
        return sum(answer.most_tokens for answers in self._running.values() for answer in answers)

    def _begin(self) -> None:
        """Request the answers that fit; consecutive ones to the same prompt share one request."""
        group: list[Answer] = []
        for answer in self._queue.admit(self._reserved):
            if group and (group[-1].request is not answer.request or group[-1].sample + 1 != answer.sample):
                self._ask(tuple(group))
                group = []
            group.append(answer)
        if group:
            self._ask(tuple(group))

    def _ask(self, answers: tuple[Answer, ...]) -> None:
        self._running[self._server.submit("/v1/completions", self._body(answers))] = answers

    def _body(self, answers: tuple[Answer, ...]) -> dict[str, Any]:
        request = answers[0].request
        params = request.params
        body: dict[str, Any] = {
            **_NEUTRAL,
            "model": self._model,
            "prompt": list(request.prompt),
            "n": len(answers),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_tokens": params.max_new_tokens,
            "min_tokens": params.min_new_tokens,
            "stop": list(params.stop),
            "include_stop_str_in_output": True,
            "seed": stream_key(prompt_key(params.seed, request.prompt), answers[0].sample) >> 1,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stop_token_ids": [*self._stop_token_ids, *params.stop_token_ids],
        }
        if params.temperature == 0 and len(answers) > 1:
            # Servers refuse to give several greedy answers.
            body["n"] = 1
        return body

    # Steps

    def step(self) -> list[Sequence]:
        """See `Engine`: request the answers that fit, and return those that arrived.

        A failed request gives failed answers without tokens, provided the server has answered others before.

        Raises:
            ServerError: the server fails the first requests or many in a row, or refuses.
            EngineAnswerError: an answer is invalid because of a setting, or the first answers are invalid.
        """
        if self._paused:
            return []
        self._begin()
        return self._take(_PATIENCE)

    def _take(self, patience: float | None) -> list[Sequence]:
        if not self._running:
            return []
        done, _ = wait(self._running, patience, FIRST_COMPLETED)
        sequences: list[Sequence] = []
        for future in done:
            sequences += self._outcome(self._running.pop(future), future)
        self._generated += sum(len(sequence.tokens) for sequence in sequences)
        # How many prompt tokens the server computes once for several answers is unknown.
        self._prompted += sum(len(sequence.prompt) for sequence in sequences)
        self._prefilled = self._prompted
        return sequences

    def _outcome(self, answers: tuple[Answer, ...], future: Future[Any]) -> list[Sequence]:
        """Return the answers of a request; those of a failed request have no tokens.

        Raises:
            ServerError, EngineAnswerError: the server has never given a valid answer, keeps failing, or a setting is
                wrong.
        """
        try:
            sequences = self._sequences(answers, future.result())
        except (ServerUnavailableError, EngineAnswerError) as error:
            self._failed += 1
            # An error with a `help` means a wrong setting: the next request would fail, too.
            of_settings = isinstance(error, EngineAnswerError) and error.help
            if not self._answers_well or of_settings or self._failed > 2 * self._settings.max_concurrent:
                raise
            why = f"{error.message}: {error.why}" if error.why else error.message
            return [answer.sequence(failure=why) for answer in answers]
        self._answers_well, self._failed = True, 0
        return sequences

    def _sequences(self, answers: tuple[Answer, ...], reply: Any) -> list[Sequence]:
        where = f"the server {self._settings.url}"
        listed = _fields(reply).get("choices")
        choices = [_fields(choice) for choice in cast("list[Any]", listed)] if isinstance(listed, list) else []
        if len(choices) == 1 and answers[0].request.params.temperature == 0:
            choices = choices * len(answers)
        if len(choices) != len(answers):
            count = len(choices) if isinstance(listed, list) else "no"
            raise EngineAnswerError(f"{where} returned {count} answers; {len(answers)} were requested")
        if not all(type(choice.get("index", 0)) is int for choice in choices):
            raise EngineAnswerError(f"{where} returned an answer whose `index` is not an integer")
        ordered = sorted(choices, key=lambda choice: choice.get("index", 0))
        pairs = zip(answers, ordered, strict=True)
        return checked_together((answer, partial(self._sequence, answer, choice, where)) for answer, choice in pairs)

    def _sequence(self, answer: Answer, choice: Mapping[str, Any], where: str) -> Sequence:
        logprobs = _fields(choice.get("logprobs"))
        tokens = choice.get("token_ids")
        if tokens is None:
            tokens = _token_ids(logprobs.get("tokens"))
            if not tokens:
                raise EngineAnswerError(
                    f"{where} returns texts without token ids",
                    help="use a server with `return_token_ids` or `return_tokens_as_token_ids`, such as vLLM's",
                )
        prompt = choice.get("prompt_token_ids")
        if prompt is not None and prompt != list(answer.request.prompt):
            count = len(cast("list[Any]", prompt)) if isinstance(prompt, list) else "no"
            raise EngineAnswerError(
                f"{where} answered a different prompt than that of request `{answer.request.request_id}`",
                why=f"{len(answer.request.prompt)} tokens were sent; it reports {count} tokens",
            )
        return checked_sequence(
            answer,
            tokens,
            logprobs.get("token_logprobs"),
            choice.get("finish_reason"),
            self._version,
            self._stop_texts,
            where,
            self._folder.vocabulary,
        )

    # Control

    def pause(self, mode: PauseMode) -> list[Sequence]:
        """See `Engine`. Answers of a server cannot be frozen.

        Raises:
            ValueError: `mode` is `freeze`, and answers are running.
        """
        done: list[Sequence] = []
        if mode == "drain":
            while self._running:
                done += self._take(None)
        elif mode == "abort":
            for future, answers in self._running.items():
                # Received answers are kept; the others are dropped.
                if future.cancel():
                    done += [answer.sequence() for answer in answers]
                else:
                    done += self._outcome(answers, future)
            self._running.clear()
            done += self._queue.abort()
        elif self._running:
            raise ValueError("answers of a server cannot be frozen: use drain or abort")
        self._paused = True
        return done

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, adapter_only: bool = False) -> str:
        """See `Engine`: write the weights to a folder, which the server then reads. Nothing may be running.

        Raises:
            ValueError: there is no `weights_dir`, answers are running, or a name or shape is not the model's.
        """
        settings = self._settings
        if settings.weights_dir is None:
            raise ValueError("this server takes no weights: there is no `rollout.engine_options.weights_dir`")
        if self._running:
            raise ValueError(f"{self._in_flight} answers are in progress: pause the engine first")
        from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] - a part has no type

        weights = dict(tensors)
        digest = fingerprint(weights.items())
        named = self._folder.merged(weights, self._dtype) if adapter_only else self._folder.checked(weights)
        whole = Path(settings.weights_dir).absolute()
        aside = whole / f".weights.{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        plain = {name: value.detach().to("cpu", self._dtype).contiguous() for name, value in named}
        save_file(plain, aside / "model.safetensors", metadata={"format": "pt"})
        folder = whole / f"version-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        self._server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self._server.post("/reset_prefix_cache", {})
        shutil.rmtree(folder, ignore_errors=True)
        self._version = version
        return digest

    def sleep(self, level: int = 1) -> None:
        """Do nothing: the server's memory is its own."""

    def wake(self) -> None:
        """Do nothing: the server's memory is its own."""

    def stop(self) -> None:
        self._queue.abort()
        self._running.clear()
        self._server.close()


def _fields(value: object) -> Mapping[str, Any]:
    """Return a JSON object; for any other value, an empty one."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _token_ids(texts: object) -> list[int]:
    """Return token ids from texts such as `token_id:7`; an empty list if any text differs."""
    listed = cast("list[Any]", texts) if isinstance(texts, list) else []
    matches = [_TOKEN_TEXT.fullmatch(text) if isinstance(text, str) else None for text in listed]
    return [int(match[1]) for match in matches if match] if all(matches) else []


def _token(settings: ServerSettings) -> str:
    """Return the token of the server; empty if none is configured.

    Raises:
        ConfigError: the environment variable is not set.
    """
    if settings.token_env is None:
        return ""
    token = os.environ.get(settings.token_env, "")
    if not token.strip():
        raise ConfigError(
            f"`rollout.engine_options.token_env` names `{settings.token_env}`, which is not set in the rollout worker",
            help=f"set it where rlinf starts, and add it to `cluster.forward_env: [{settings.token_env}]`",
        )
    return token.strip()
