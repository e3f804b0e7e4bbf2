"""`rollout` of language models' recipes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from recipes.language.config.engine_facts import no_sglang
from recipes.sections.actor import RolloutConfig
from rlinf_core import ConfigModel, Count, Fraction, IgnoredKeys
from rlinf_core.config.sections.values import (
    NonNegativeFloat,
    NonNegativeInt,
    OptionalPath,
    PositiveFloat,
    StepsOrNever,
)
from rlinf_core.scalars import Data, Text, problem


class LanguageSamplingParams(ConfigModel):
    """The settings by which tokens are drawn."""

    temperature: NonNegativeFloat = Field(
        default=1.0, description="Sampling temperature: divides the logits; 0: greedy."
    )
    top_k: StepsOrNever = Field(default=-1, description="Sample from this many most likely tokens; -1: from all.")
    top_p: Fraction = Field(default=1.0, description="Sample from the most likely tokens up to this total probability.")
    max_new_tokens: Count = Field(default=1024, description="Maximum answer length, in tokens.")
    min_new_tokens: NonNegativeInt = Field(default=0, description="Minimum answer length, in tokens.")
    stop: tuple[Text, ...] = Field(default=(), description="Texts that end an answer; they are part of it.")
    stop_token_ids: tuple[NonNegativeInt, ...] = Field(
        default=(), description="Token ids that end an answer, in addition to those of the tokenizer and the model."
    )


def _url(text: str) -> str:
    """Return an address without a slash at its end.

    Raises:
        PydanticCustomError: it is none, or holds a secret.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise problem("bad-value", "a server needs an address here", help="write `http://127.0.0.1:8000`")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise problem(
            "bad-value",
            "an address may not contain a secret or a query",
            help="name an environment variable with the token in `token_env`",
        )
    return text.rstrip("/").removesuffix("/v1")


class ServerSettings(ConfigModel):
    """An OpenAI-compatible server that answers prompts, for `backend: server`."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("weights_dir",),
            lambda server, sizes: server.weight_updates != "weights_path",
            lambda server: f"`weight_updates: {server.weight_updates}` writes no files",
            "remove it, or write `weight_updates: weights_path`",
            because=("weight_updates",),
        ),
    )

    url: Annotated[Text, AfterValidator(_url)] | None = Field(
        default=None, description="Address of the server, such as `http://127.0.0.1:8000`."
    )
    model: Text | None = Field(default=None, description="Model name at the server. Default: the one it serves.")
    token_env: Text | None = Field(
        default=None, description="Environment variable of the rollout workers that holds the server's token."
    )
    timeout: PositiveFloat = Field(default=600.0, description="Time limit of one request, in seconds.")
    retries: NonNegativeInt = Field(default=3, description="Retries of a request that could not be sent.")
    max_concurrent: Count = Field(default=64, description="Concurrent requests per rollout worker.")
    logprobs: Literal["raw", "processed"] = Field(
        default="raw",
        description="Log-probabilities of the server: raw (before temperature, top_k and top_p) or processed (after"
        " them, as with vLLM's `--logprobs-mode processed_logprobs`).",
    )
    weight_updates: Literal["none", "weights_path"] = Field(
        default="none",
        description="How new weights reach the server. none; weights_path: files in `weights_dir` and a call of vLLM's"
        " `/collective_rpc`, which needs VLLM_SERVER_DEV_MODE=1 at the server.",
    )
    weights_dir: OptionalPath = Field(
        default=None, description="Folder that the rollout worker writes and the server reads, for `weights_path`."
    )


class EngineSettings(ConfigModel):
    """The settings of an engine."""

    max_running_tokens: NonNegativeInt = Field(
        default=0, description="Maximum tokens, prompts and answers, in an engine at once; 0: no limit but GPU memory."
    )
    threads: Count = Field(default=1, description="CPU threads per process.")
    tensor_parallel_size: Count = Field(default=1, description="GPUs per engine (tensor parallelism); vllm.")
    gpu_memory_utilization: Annotated[Fraction, Field(gt=0)] = Field(
        default=0.9, description="Fraction of a GPU's memory that the engine reserves; vllm."
    )
    engine_options: dict[str, Data] = Field(
        default_factory=dict[str, Any], description="Additional arguments of `vllm.LLM`, by their own names."
    )


class LanguageRolloutConfig(RolloutConfig, EngineSettings):
    """The workers that answer prompts."""

    backend: Annotated[Literal["torch", "huggingface", "vllm", "server"], BeforeValidator(no_sglang)] = Field(
        default="torch", description="Inference engine: torch (built in; also `huggingface`), vllm or server."
    )
    server: ServerSettings = Field(
        default_factory=ServerSettings, description="The server of `backend: server`: url, token_env, weight_updates."
    )
    check_logprobs: Literal["off", "warn", "strict"] = Field(
        default="warn",
        description="Reaction when the engine's and the trainer's log-probabilities of tokens differ by more than"
        " rounding: off, warn, or strict, which ends the run.",
    )
    sampling_params: LanguageSamplingParams = Field(
        default_factory=LanguageSamplingParams,
        description="Sampling: temperature, top_k, top_p, max_new_tokens, stop.",
    )
