"""Sections `rollout` and `judge`: inference engines, and the model that judges for `reward_type: judge`.

Names, packages and limits of engines, which need no import, are here, too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from recipes.sections.actor import RolloutConfig
from recipes.sections.values import check_names, read_options, unread_options
from rlinf_core import ConfigError, ConfigModel, Count, Fraction, IgnoredKeys
from rlinf_core.config.model import NoOptions, Options
from rlinf_core.config.sections.values import (
    NonNegativeFloat,
    NonNegativeInt,
    OptionalModelPath,
    OptionalPath,
    PositiveFloat,
    StepsOrNever,
)
from rlinf_core.process.requirements import install_command
from rlinf_core.scalars import Text, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """An engine by its name in `rollout.backend`.

    Attributes:
        name: the name, as written in files.
        modules: packages that rollout workers need besides torch and transformers.
        keeps_partial: whether unfinished answers can continue under new weights, and aborted answers keep their tokens.
    """

    name: str
    modules: tuple[str, ...] = ()
    keeps_partial: bool = True


# Arguments of external engines that this project sets: other values give wrong tokens or log-probabilities.
RESERVED_OPTIONS: Final = {
    "vllm": frozenset(("model", "dtype", "skip_tokenizer_init", "async_scheduling", "logprobs_mode")),
}
# The largest adapter rank that vLLM supports.
LARGEST_RANK: Final = 512
# The token copies that storing a prompt once must save to be worth joining it with the rest at every step.
MIN_SAVED: Final = 4096
BACKENDS: Final = {
    "torch": Backend(name="torch"),
    "huggingface": Backend(name="torch"),
    "vllm": Backend(name="vllm", modules=("vllm",)),
    "server": Backend(name="server", modules=("httpx",), keeps_partial=False),
}


def no_sglang(value: Any) -> Any:
    """Return the name of an engine unchanged.

    Raises:
        PydanticCustomError: the name is `sglang`, which is no longer supported.
    """
    if value == "sglang":
        help = "write `vllm`, which reads the same keys, or `server` for a server that is running already"
        raise problem("bad-value", "SGLang is not an engine of this recipe any more", help=help)
    return value


def missing_package(module: str, why: str) -> ConfigError:
    """Return the error for an interpreter without an engine's package."""
    return ConfigError(
        f"`rollout.backend: {module}` needs the package {module} in the interpreter of every rollout worker",
        why=f"{sys.executable}: {why}",
        help=f"{install_command(module)}, or name an interpreter that has it for the node group of `rollout`:"
        " `env_configs: [{node_ranks: ..., python_interpreter_path: ...}]`",
    )


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's text, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


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
    """Return a URL without a trailing slash or `/v1`.

    Raises:
        PydanticCustomError: the text is no HTTP URL, or has credentials, a query or a fragment.
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
    """Options of `backend: server`, an OpenAI-compatible server that answers prompts."""

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
    weights_dir: OptionalPath = Field(
        default=None,
        description="Folder that the rollout worker writes new weights to and the server reads: they are announced by"
        " vLLM's `/collective_rpc`, which needs VLLM_SERVER_DEV_MODE=1 at the server. Default: the server keeps its"
        " weights, for `runner.only_eval`.",
    )


class VllmOptions(ConfigModel):
    """Options of `backend: vllm`, beside the arguments of `vllm.LLM`."""

    tensor_parallel_size: Count = Field(default=1, description="GPUs per engine (tensor parallelism).")
    gpu_memory_utilization: Annotated[Fraction, Field(gt=0)] = Field(
        default=0.9, description="Fraction of a GPU's memory that the engine reserves."
    )


class EngineOptions(VllmOptions, ServerSettings, extra="allow"):
    """The options of all engines, and arguments of `vllm.LLM`."""


ENGINE_OPTIONS: Final[Mapping[str, type[ConfigModel]]] = {"vllm": VllmOptions, "server": ServerSettings}


class EngineSettings(ConfigModel):
    """An engine and its options."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        *unread_options("engine_options", "backend", {"torch": NoOptions, **ENGINE_OPTIONS}, {"huggingface": "torch"}),
        IgnoredKeys(
            ("engine_options",),
            lambda engine, sizes: BACKENDS[engine.backend].name == "torch",
            "engine `torch` has no options",
            "remove it, or write `backend: vllm`",
            because=("backend",),
        ),
    )

    backend: Literal["torch", "huggingface", "vllm", "server"] = "torch"
    engine_options: Options[EngineOptions] = Field(
        default_factory=dict[str, Any],
        description="Options of the engine (docs/reference/options.md). vllm: tensor_parallel_size,"
        " gpu_memory_utilization, and any arguments of `vllm.LLM`; server: url, token_env, weights_dir and others.",
    )

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.backend == "server":
            check_names("engine_options", self.engine_options, EngineOptions.model_fields, "`backend: server`")
        return self

    @property
    def vllm(self) -> VllmOptions:
        """The options of the engine `vllm` that are not arguments of `vllm.LLM` alone."""
        return read_options(VllmOptions, self.engine_options)

    @property
    def server(self) -> ServerSettings:
        """The options of the engine `server`."""
        return read_options(ServerSettings, self.engine_options)

    @property
    def arguments(self) -> dict[str, Any]:
        """Further arguments of `vllm.LLM`."""
        return {name: value for name, value in self.engine_options.items() if name not in EngineOptions.model_fields}


class LanguageRolloutConfig(RolloutConfig, EngineSettings):
    """The workers that answer prompts."""

    backend: Annotated[Literal["torch", "huggingface", "vllm", "server"], BeforeValidator(no_sglang)] = Field(
        default="torch", description="Inference engine: torch (built in; also `huggingface`), vllm or server."
    )
    max_running_tokens: NonNegativeInt = Field(
        default=0, description="Maximum tokens, prompts and answers, in an engine at once; 0: no limit but GPU memory."
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


# The maximum tokens in a judge's engine at once.
JUDGED_TOKENS: Final = 65536


class LanguageJudgeConfig(EngineSettings):
    """The workers that hold the model that judges answers, in the precision of `actor.model`; `reward.options` says how
    it is asked.
    """

    group_name: ClassVar[str] = "JudgeGroup"

    model_path: OptionalModelPath = Field(default=None, description="Folder of the judge, with its own tokenizer.")
    backend: Annotated[Literal["torch", "vllm"], BeforeValidator(no_sglang)] = Field(
        default="torch", description="Inference engine of the judge: torch (built in) or vllm."
    )
