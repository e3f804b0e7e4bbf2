"""The configuration of recipe `serve`: its sections, defaults and validation rules.

The defaults build a Qwen2 of 0.3 M parameters that reads the characters of sums.
"""

from __future__ import annotations

import errno
import re
import socket
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from recipes.language.config.language_config import SIZES_OF_A_FOLDER, SYMBOLS, TokenizerConfig, Width
from recipes.language.config.rollout_config import LARGEST_RANK, RESERVED_OPTIONS, EngineSettings
from recipes.language.rules.engine_rules import check_backend
from recipes.language.rules.model_rules import faults_of_folder, faults_of_tokenizer
from recipes.sections.checks import (
    Report,
    WorldSizes,
    check_components,
    check_log_path,
    check_loggers,
)
from recipes.sections.imports import lacks_packages, runs_in_this_interpreter
from recipes.sections.model_folders import SETTINGS, read_object
from rlinf_core import ConfigError, ConfigModel, Count, IgnoredKeys, JobConfig, Seed
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.runner import RunSettings
from rlinf_core.config.sections.values import (
    NonNegativeInt,
    OptionalModelPath,
    OptionalPath,
    Port,
    PositiveFloat,
    Precision,
    StepsOrNever,
)
from rlinf_core.config.tree import Path as KeyPath
from rlinf_core.scalars import Text, problem

# The maximum number of most likely tokens that a request may ask for per position.
MOST_LIKELY: Final = 100
# Arguments of vLLM that other keys determine.
RECIPE_OPTIONS: Final = ("enable_lora", "max_lora_rank", "max_logprobs")
PACKAGES: Final = ("starlette", "uvicorn", "google.protobuf", "peft", "transformers")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def _tenant(name: str) -> str:
    """Return a tenant's name unchanged.

    Raises:
        PydanticCustomError: the name cannot be a file name.
    """
    if not _NAME.fullmatch(name):
        raise problem(
            "bad-value",
            f"`{name}` cannot name a file",
            help="use letters, digits, `-` and `_`, at most 64, as in `team-a`",
        )
    return name


Tenant = Annotated[Text, AfterValidator(_tenant)]


class ServeRunnerConfig(RunSettings):
    """The run as a whole."""

    max_steps: StepsOrNever = Field(
        default=-1, description="End after this many optimizer steps of all clients together; -1: serve until stopped."
    )


class ServedModelConfig(ConfigModel):
    """The model that all clients train adapters or copies of. Its own weights stay as they are."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (SIZES_OF_A_FOLDER,)

    model_path: OptionalModelPath = Field(
        default=None, description="Folder of the model. Default: a small model built from scratch."
    )
    precision: Precision = Field(
        default="fp32",
        description="Type of the model's weights on accelerators: fp32, bf16 or fp16. Adapters are in fp32.",
    )
    hidden_dim: Width = Field(default=128, description="Width of the model built without `model_path`.")
    num_layers: Count = Field(default=2, description="Layers of the model built without `model_path`.")


class ServeActorConfig(ConfigModel):
    """The workers that train adapters: each has the whole model, and takes a share of every batch."""

    built_symbols: ClassVar[str] = SYMBOLS
    built_words: ClassVar[tuple[str, ...]] = ()
    built_template: ClassVar[str | None] = None

    group_name: ClassVar[str] = "ActorGroup"

    seed: Seed = Field(default=1234, description="Seed of the weights of a model built without `model.model_path`.")
    threads: Count = Field(default=1, description="CPU threads per process.")
    max_tokens_per_micro_batch: Count = Field(
        default=4096, description="Packed tokens per forward and backward pass on one rank."
    )
    lora_alpha: PositiveFloat = Field(
        default=32.0, description="Scale of all adapters (alpha), divided by the rank that a client chooses."
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, description="Tokenizer of the language model: tokenizer_model."
    )
    model: ServedModelConfig = Field(
        default_factory=ServedModelConfig, description="The language model: model_path, precision."
    )


class ServeRolloutConfig(EngineSettings):
    """The workers that sample. Each loads the snapshots that it samples from."""

    group_name: ClassVar[str] = "RolloutGroup"

    threads: Count = Field(default=1, description="CPU threads per process.")
    max_running_tokens: NonNegativeInt = Field(
        default=0,
        description="Maximum tokens, prompts and answers, that run at once for one snapshot; 0: no limit but memory.",
    )
    max_snapshots: Count = Field(
        default=16, description="Snapshots that a worker keeps in memory; others are read again when they are used."
    )
    backend: Literal["torch", "vllm"] = Field(
        default="torch", description="Inference engine: torch (built in) or vllm."
    )


class ServerConfig(ConfigModel):
    """The server that clients talk to, on the loopback address of the machine that runs the command."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("max_full_models",),
            lambda server, sizes: server.full_weights is None,
            "all models are adapters",
            "remove it, or name a tenant in `full_weights`",
            because=("full_weights",),
        ),
    )

    port: Port = Field(default=8642, description="Port on the loopback address.")
    tenants: tuple[Tenant, ...] = Field(
        default=("default",),
        min_length=1,
        description="Names of those who use the service: each has a key, and sees its own models only.",
    )
    model_name: Text = Field(
        default="rlinf/base", description="Name by which clients ask for the model, such as `Qwen/Qwen3-8B`."
    )
    context_length: Count = Field(default=2048, description="Maximum tokens of a sequence, prompt and answer together.")
    max_models: Count = Field(default=8, description="Models that a tenant may train at once.")
    max_rank: Count = Field(default=128, description="Largest rank of an adapter.")
    full_weights: Tenant | None = Field(
        default=None,
        description="The tenant whose models train all weights of a copy of the model, instead of an adapter. Default:"
        " none.",
    )
    max_full_models: Count = Field(
        default=2,
        description="Models with all weights that are trained at once, and snapshots of them that a rollout worker"
        " keeps in memory.",
    )
    max_samples: Count = Field(default=256, description="Answers that one request may ask for.")
    max_pending: Count = Field(
        default=256, description="Unfinished requests of a tenant; further ones get HTTP 429 and a time to retry."
    )
    max_pending_mib: Count = Field(
        default=256, description="MiB of a tenant's unfinished requests; further ones are asked to wait (429)."
    )
    max_snapshots: Count = Field(
        default=256,
        description="Unnamed snapshots of a session that are kept; beyond it, the one unused for the longest goes.",
    )
    max_requests_per_minute: Count | None = Field(
        default=None,
        description="Requests to train, save or sample of a tenant in a minute; further ones get HTTP 429 and a time to"
        " retry. Default: no limit.",
    )
    max_tokens_per_minute: Count | None = Field(
        default=None,
        description="Tokens of a tenant in a minute: of batches, prompts and answers at their longest; further requests"
        " get HTTP 429. Default: no limit.",
    )
    max_stored_mib: Count | None = Field(
        default=None, description="MiB of saved weights of a tenant beyond which saving fails. Default: no limit."
    )
    session_timeout: PositiveFloat = Field(
        default=120.0, description="Seconds without a sign of life after which a client's session ends."
    )
    state_dir: OptionalPath = Field(
        default=None,
        description="Folder of keys, sessions and saved weights. A service started with the folder of an earlier one"
        " continues with its models and unfinished requests. Default: `service` in the run folder.",
    )
    save_interval: Count = Field(
        default=20,
        description="Optimizer steps of a model after which it is saved in `state_dir`; later requests are computed"
        " again after a restart of the service.",
    )


class ServeConfig(JobConfig):
    """Configuration of the serve recipe."""

    runner: ServeRunnerConfig = Field(
        default_factory=ServeRunnerConfig, description="The run: max_steps, and where results go."
    )
    actor: ServeActorConfig = Field(
        default_factory=ServeActorConfig, description="The model, and the workers that train adapters of it."
    )
    rollout: ServeRolloutConfig = Field(
        default_factory=ServeRolloutConfig, description="The workers that sample from snapshots."
    )
    server: ServerConfig = Field(default_factory=ServerConfig, description="The server, its tenants and limits.")


def check(config: ServeConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report inconsistent settings of this recipe."""
    check_components(config.cluster, config.recipe, ("actor", "rollout"), report)
    check_loggers(config.runner, report)
    check_log_path(config.runner, report)
    names = config.server.tenants
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        report.conflict("server.tenants", f"`{repeated[0]}` is listed twice", "name every tenant once")
    _check_full_weights(config, report)
    if config.rollout.backend == "vllm":
        _check_vllm(config, report)
    if runs_in_this_interpreter(config, "actor"):
        lacks_packages(("recipe",), "recipe `serve` needs", PACKAGES, report)
        _check_model(config, report)


def _check_full_weights(config: ServeConfig, report: Report) -> None:
    name = config.server.full_weights
    if name is not None and name not in config.server.tenants:
        names = ", ".join(config.server.tenants)
        report.conflict(
            "server.full_weights",
            f"`{name}` is not one of the tenants: {names}",
            "write the name of one of them, or add it to `server.tenants`",
            about="server.tenants",
        )


def _check_vllm(config: ServeConfig, report: Report) -> None:
    """Report settings that vLLM does not support."""
    check_backend(config, "rollout", "vllm", report)
    if config.server.full_weights is not None:
        report.conflict(
            "server.full_weights",
            "vLLM samples from adapters of one model, and not from models whose weights are all their own",
            "write `rollout.backend: torch`, or leave `server.full_weights` out",
            about="rollout.backend",
        )
    if config.server.max_rank > LARGEST_RANK:
        report.conflict(
            "server.max_rank",
            f"vLLM takes adapters of a rank up to {LARGEST_RANK}",
            f"write `server.max_rank: {LARGEST_RANK}` or less, or `rollout.backend: torch`",
            about="rollout.backend",
        )
    for key in config.rollout.engine_options:
        if key in (*RESERVED_OPTIONS["vllm"], *RECIPE_OPTIONS):
            report.conflict(
                f"rollout.engine_options.{key}",
                f"the recipe sets `{key}` of vllm",
                "remove it; use `actor.model.precision`, `tensor_parallel_size` and `server.max_rank`",
            )


def _check_model(config: ServeConfig, report: Report) -> None:
    at: KeyPath = ("actor", "model", "model_path")
    folder = config.actor.model.model_path
    if folder is None:
        return
    if not Path(folder).is_dir():
        message = f"`model_path` names `{folder}`, which is not a folder on this machine"
        help = "name a folder that `save_pretrained` wrote, or a model of the HuggingFace Hub, `ORG/NAME`"
        report(at, "unusable-path", message, help, severity=Severity.WARNING)
        return
    server = config.server
    faults = faults_of_folder(at, folder, server.context_length, length=("server", "context_length"))
    tokenizer = config.actor.tokenizer.tokenizer_model
    where: KeyPath = ("actor", "tokenizer", "tokenizer_model") if tokenizer else at
    settings = read_object(Path(folder) / SETTINGS)
    for fault in [*faults, *faults_of_tokenizer(Path(tokenizer or folder), where, settings, chat=False)]:
        report(fault.path, "unusable-path", fault.message, fault.help)


def require_port(port: int) -> None:
    """Check that the service can listen on a port.

    Raises:
        ConfigError: the port is in use or not usable.
    """
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise unusable_port(port, error) from None


def unusable_port(port: int, error: OSError) -> ConfigError:
    """Return the error for a port on which the service cannot listen."""
    in_use = error.errno == errno.EADDRINUSE
    return ConfigError(
        f"port {port} of 127.0.0.1 " + ("is in use" if in_use else "cannot be used"),
        why=None if in_use else error.strerror,
        help="end the other server, or write another `server.port`" if in_use else "write another `server.port`",
    )


def inputs(config: ServeConfig) -> list[Path]:
    """Return the folders that a run reads."""
    names = (config.actor.model.model_path, config.actor.tokenizer.tokenizer_model)
    return [Path(name) for name in names if name]
