"""Sections `rollout` and `judge`: engines that answer, and the model that judges for `reward_type: judge`.

Facts about engines stand here, too: names, packages and limits, which need no import.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from recipes.sections.actor import RolloutConfig
from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigError, ConfigModel, Count, Fraction
from rlinf_core.config.sections.values import (
    NonNegativeFloat,
    NonNegativeInt,
    OptionalModelPath,
    OptionalPath,
    PositiveFloat,
    StepsOrNever,
)
from rlinf_core.process.requirements import install_command
from rlinf_core.scalars import Bool, Data, Text, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """An engine by its name in `rollout.backend`.

    Attributes:
        name: the name, as written in files.
        modules: what the interpreter of the rollout workers must have besides torch and transformers.
        keys: the keys of `rollout` that it reads and others do not.
        keeps_partial: whether unfinished answers can continue under new weights, and aborted ones keep their tokens.
    """

    name: str
    modules: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()
    keeps_partial: bool = True


# Arguments of other engines that this project gives by itself: with other values tokens or log-probabilities are wrong.
RESERVED_OPTIONS: Final = {
    "vllm": frozenset(
        ("model", "dtype", "skip_tokenizer_init", "async_scheduling", "logprobs_mode", "tensor_parallel_size")
    ),
}
# The largest rank of an adapter that vLLM takes.
LARGEST_RANK: Final = 512
_GPU_KEYS: Final = frozenset(("tensor_parallel_size", "gpu_memory_utilization", "engine_options"))
# Copies of a prompt's tokens that storing it once must save: what is shared is put beside the rest at every step.
MIN_SAVED: Final = 4096
BACKENDS: Final = {
    "torch": Backend(name="torch"),
    "huggingface": Backend(name="torch"),
    "vllm": Backend(name="vllm", modules=("vllm",), keys=_GPU_KEYS),
    "server": Backend(name="server", modules=("httpx",), keys=frozenset(("server",)), keeps_partial=False),
}


def no_sglang(value: Any) -> Any:
    """Return the name of an engine.

    Raises:
        PydanticCustomError: it is that of an engine that was there once.
    """
    if value == "sglang":
        help = "write `vllm`, which reads the same keys, or `server` for a server that is running already"
        raise problem("bad-value", "SGLang is not an engine of this recipe any more", help=help)
    return value


def missing_package(module: str, why: str) -> ConfigError:
    """Return the error of an interpreter that lacks the package of an engine."""
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


class EngineSettings(ConfigModel):
    """The settings of an engine."""

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
    max_running_tokens: NonNegativeInt = Field(
        default=0, description="Maximum tokens, prompts and answers, in an engine at once; 0: no limit but GPU memory."
    )
    threads: Count = Field(default=1, description="CPU threads per process.")
    server: ServerSettings = Field(
        default_factory=ServerSettings, description="The server of `backend: server`: url, token_env, weights_dir."
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


VERDICTS: Final = ("correct", "score")
# Keys that `rollout` has under the same names.
ENGINE_KEYS: Final = ("backend", *EngineSettings.model_fields)
# Tokens that a judge's engine may hold at once.
JUDGED_TOKENS: Final = 65536


class LanguageJudgeConfig(EngineSettings):
    """The workers that hold the model that judges answers, in the precision of `actor.model`."""

    group_name: ClassVar[str] = "JudgeGroup"

    model_path: OptionalModelPath = Field(default=None, description="Folder of the judge, with its own tokenizer.")
    backend: Annotated[Literal["torch", "vllm"], BeforeValidator(no_sglang)] = Field(
        default="torch", description="Inference engine of the judge: torch (built in) or vllm."
    )
    seq_length: Count = Field(default=8192, description="Maximum tokens of a prompt of the judge and its reply.")
    max_new_tokens: Count = Field(default=1024, description="Maximum length of the judge's reply, in tokens.")
    temperature: NonNegativeFloat = Field(
        default=0.0,
        description="Sampling temperature of the judge; 0: greedy. A reply without a verdict is drawn once more, at 1"
        " where this is 0.",
    )
    template: Text | None = Field(
        default=None,
        description="Prompt of the judge: a text with {prompt}, {text} (the answer) and {answer} (the right one)."
        " Default: a question that fits `verdict`.",
    )
    verdict: Annotated[Text, KnownOrOwn("verdict", VERDICTS)] = Field(
        default="correct",
        description="How a reply is read: correct (the last `Verdict: CORRECT` or `Verdict: INCORRECT`), score (the"
        " last `Score: N`, from 0 to 10), or `package.module:function`, from the reply's text to a number from 0 to 1,"
        " or None.",
    )
    apply_chat_template: Bool = Field(
        default=True, description="Format the question as a user message in the judge's chat template."
    )
    system_prompt: str = Field(default="", description="System message of the judge; needs `apply_chat_template`.")
    chat_template_kwargs: dict[str, Data] = Field(
        default_factory=dict[str, Any], description="Arguments of the judge's chat template, by its own names."
    )
