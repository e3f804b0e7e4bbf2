"""`rollout` of language models' recipes, and what each engine cannot do."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from recipes.language.engines.backends import BACKENDS
from recipes.sections.checks import Report, blame, is_given
from recipes.sections.rollout import RolloutConfig, SamplingParams
from rlinf_core.config.model import ConfigModel
from rlinf_core.config.sections.values import Count, Fraction, NonNegativeInt, OptionalPath, PositiveFloat
from rlinf_core.scalars import Data, Text, problem

if TYPE_CHECKING:
    from recipes.language.config import LanguageConfig


class LanguageSamplingParams(SamplingParams):
    """The settings by which tokens are drawn."""

    min_new_tokens: NonNegativeInt = Field(default=0, description="No end of an answer before so many tokens.")
    stop: tuple[Text, ...] = Field(default=(), description="Texts that end an answer; they are part of it.")
    stop_token_ids: tuple[NonNegativeInt, ...] = Field(
        default=(), description="Tokens that end an answer, besides those of the tokenizer and the model."
    )


def _url(text: str) -> str:
    """Return an address without a slash at its end.

    Raises:
        PydanticCustomError: it is none, or holds a secret.
    """
    found = urlsplit(text)
    if found.scheme not in ("http", "https") or not found.hostname:
        raise problem("bad-value", "a server's address is missing here", help="write `http://127.0.0.1:8000`")
    if found.username or found.password or found.query or found.fragment:
        raise problem(
            "bad-value",
            "an address with a secret or a query in it is not taken",
            help="name an environment variable with the token in `token_env`",
        )
    return text.rstrip("/").removesuffix("/v1")


class ServerSettings(ConfigModel):
    """An OpenAI-compatible server that answers prompts, for `backend: server`."""

    not_available: ClassVar[Mapping[str, str]] = {
        "api_key": "`token_env` names the environment variable that holds the token",
        "token": "`token_env` names the environment variable that holds the token",
    }

    url: Annotated[Text, AfterValidator(_url)] | None = Field(
        default=None, description="Address of the server, as in `http://127.0.0.1:8000`."
    )
    model: Text | None = Field(
        default=None, description="Name of the model at the server. Default: the one that it serves."
    )
    token_env: Text | None = Field(
        default=None, description="Environment variable, of the rollout workers, that holds the server's token."
    )
    timeout: PositiveFloat = Field(default=600.0, description="Seconds that one request may take.")
    retries: NonNegativeInt = Field(default=3, description="How often a request is tried again that could not be sent.")
    max_concurrent: Count = Field(default=64, description="Requests that a rollout worker has at the server at once.")
    logprobs: Literal["raw", "processed"] = Field(
        default="raw",
        description="Log-probabilities of the server: raw, before temperature, top_k and top_p; or processed, after"
        " them, as by vLLM's `--logprobs-mode processed_logprobs`.",
    )
    weight_updates: Literal["none", "weights_path"] = Field(
        default="none",
        description="How new weights reach the server: none; or weights_path, files in `weights_dir` and a call of"
        " vLLM's `/collective_rpc`, which needs its VLLM_SERVER_DEV_MODE=1.",
    )
    weights_dir: OptionalPath = Field(
        default=None, description="Folder that the rollout worker writes and the server reads, for `weights_path`."
    )


class LanguageRolloutConfig(RolloutConfig):
    """The workers that answer prompts."""

    other_names: ClassVar[Mapping[str, str]] = {
        **RolloutConfig.other_names,
        "tensor_model_parallel_size": "tensor_parallel_size",
        "engine_kwargs": "engine_options",
    }

    backend: Literal["torch", "huggingface", "vllm", "sglang", "server"] = Field(
        default="torch", description="Engine that generates: torch (ours; also `huggingface`), vllm, sglang or server."
    )
    max_running_tokens: NonNegativeInt = Field(
        default=0, description="Most tokens, prompts and answers, that an engine holds at once; 0: no limit."
    )
    threads: Count = Field(default=1, description="CPU threads that each process computes on.")
    tensor_parallel_size: Count = Field(default=1, description="GPUs that share one engine's model; vllm and sglang.")
    gpu_memory_utilization: Annotated[Fraction, Field(gt=0)] = Field(
        default=0.9, description="Share of a GPU's memory that the engine takes; vllm and sglang."
    )
    engine_options: dict[str, Data] = Field(
        default_factory=dict[str, Any],
        description="Further arguments of `vllm.LLM` or `sglang.Engine`, by its own names.",
    )
    server: ServerSettings = Field(
        default_factory=ServerSettings, description="The server of `backend: server`: url, token_env, weight_updates."
    )
    check_logprobs: Literal["off", "warn", "strict"] = Field(
        default="off",
        description="Compare the log-probabilities of engine and trainer in every step: off, warn, or strict, which"
        " ends the run.",
    )
    sampling_params: LanguageSamplingParams = Field(
        default_factory=LanguageSamplingParams,
        description="How tokens are drawn: temperature, top_k, top_p, max_new_tokens, stop.",
    )


def check_engine(config: LanguageConfig, report: Report) -> None:
    """Report what the engine that `rollout.backend` names cannot do, and keys that it does not read."""
    rollout = config.rollout
    backend = BACKENDS[rollout.backend]
    for key in ("tensor_parallel_size", "gpu_memory_utilization", "engine_options", "server"):
        if is_given(config, ("rollout", key)) and key not in backend.keys:
            report(
                ("rollout", key),
                "conflicting-settings",
                f"`{key}` is none of engine `{backend.name}`",
                f"remove it, or write `backend: {_reader(key)}`",
                about=[("rollout", "backend")],
            )
    _check_logprobs(config, report)
    if backend.name == "server":
        _check_server(config, report)


def _reader(key: str) -> str:
    """Return the name of an engine that reads a key."""
    return next(backend.name for backend in BACKENDS.values() if key in backend.keys)


def _check_logprobs(config: LanguageConfig, report: Report) -> None:
    """Report draws whose log-probabilities, as the engine gives them, are not those that training needs."""
    rollout = config.rollout
    params, backend = rollout.sampling_params, BACKENDS[rollout.backend]
    cut = [
        name
        for name, is_set in (
            ("top_k", params.top_k != -1),
            ("top_p", params.top_p < 1),
            ("min_new_tokens", params.min_new_tokens > 0),
        )
        if is_set
    ]
    at = ("rollout", "sampling_params")
    if backend.name == "vllm" and params.temperature not in (0, 1) and cut:
        report(
            blame(config, (*at, cut[0]), (*at, "temperature")),
            "conflicting-settings",
            f"vLLM gives log-probabilities before or after both `temperature` and `{cut[0]}`, and training needs those"
            " between the two",
            f"write `temperature: 1`, or remove `{cut[0]}`",
        )
    elif backend.name == "server" and rollout.server.logprobs == "processed" and cut:
        report(
            blame(config, (*at, cut[0]), ("rollout", "server", "logprobs")),
            "conflicting-settings",
            f"`server.logprobs: processed` are those after `{cut[0]}`, and training needs those before it",
            f"remove `{cut[0]}`",
        )
    elif backend.name == "server" and rollout.server.logprobs == "raw" and params.temperature not in (0, 1):
        report(
            blame(config, (*at, "temperature"), ("rollout", "server", "logprobs")),
            "conflicting-settings",
            "`server.logprobs: raw` are those before `temperature`, and training needs those after it",
            "write `temperature: 1`, or start the server with processed log-probabilities and say so",
        )


def _check_server(config: LanguageConfig, report: Report) -> None:
    server, at = config.rollout.server, ("rollout", "server")
    if server.url is None:
        report(
            blame(config, (*at, "url"), ("rollout", "backend")),
            "conflicting-settings",
            "`backend: server` needs the server's address",
            "write `rollout.server.url: http://127.0.0.1:8000`",
        )
    elif server.token_env and not _is_private(server.url):
        report(
            (*at, "url"),
            "conflicting-settings",
            "a token is not sent over http to another machine, where everybody on the way can read it",
            "write `https://`, or remove `token_env`",
            about=[(*at, "token_env")],
        )
    if server.weight_updates == "none" and not config.runner.only_eval:
        report(
            blame(config, (*at, "weight_updates"), ("rollout", "backend")),
            "conflicting-settings",
            "training gives the engine new weights in every step, and a plain server takes none",
            "write `rollout.server.weight_updates: weights_path` for a vLLM server, or `runner.only_eval: true`",
        )
    if server.weight_updates == "weights_path" and server.weights_dir is None:
        report(
            blame(config, (*at, "weights_dir"), (*at, "weight_updates")),
            "conflicting-settings",
            "`weight_updates: weights_path` needs a folder that the server reads as well",
            "write `rollout.server.weights_dir: FOLDER`",
        )
    if config.actor.model.model_path is None:
        report(
            blame(config, ("actor", "model", "model_path"), ("rollout", "backend")),
            "conflicting-settings",
            "a server has its own model, and this one is built on the spot",
            "write `actor.model.model_path: FOLDER`, that of the model which the server serves",
        )


def _is_private(url: str) -> bool:
    """Return whether nobody but this machine and the server can read what is sent."""
    found = urlsplit(url)
    if found.scheme == "https" or found.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(found.hostname or "").is_loopback
    except ValueError:
        return False
