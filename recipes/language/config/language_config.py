"""Configuration sections of language recipes, and the rules between their values."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, cast

from pydantic import Field, model_validator

from recipes.language.config.algorithm_config import LanguageAlgorithmConfig
from recipes.language.config.language_no_effect import LANGUAGE, OPTIONAL
from recipes.language.config.problem_config import LanguageDataConfig, LanguageRewardConfig
from recipes.language.config.rollout_config import LanguageJudgeConfig, LanguageRolloutConfig
from recipes.language.text.chat_template import ChatRoles, ChatTemplate
from recipes.sections.actor import ActorConfig, ModelConfig, OptimConfig
from recipes.sections.checks import Report, blame, near_divisors
from rlinf_core import ConfigModel, Count, IgnoredKeys, JobConfig, RunnerConfig
from rlinf_core.config.sections.runner import RolloutRunnerConfig
from rlinf_core.config.sections.values import NonNegativeInt, OptionalModelPath, PositiveFloat, Precision, StepsOrNever
from rlinf_core.scalars import Bool


class ModelRunnerConfig(RunnerConfig):
    """Settings of a run that trains a language model."""

    seq_length: Count = Field(
        default=2048, description="Maximum sequence length, prompt and answer together, in tokens."
    )
    save_format: Literal["dcp", "huggingface", "both"] = Field(
        default="both",
        description="Contents of a checkpoint: dcp, the state to resume from; huggingface, a folder `huggingface` that"
        " transformers loads, which cannot be resumed from; both. The last two also write `model` at the end.",
    )

    @property
    def saves_model(self) -> bool:
        """Whether checkpoints have a folder that transformers loads."""
        return self.save_format != "dcp"

    @property
    def saves_state(self) -> bool:
        """Whether checkpoints can be resumed from."""
        return self.save_format != "huggingface"


class LanguageRunnerConfig(RolloutRunnerConfig, ModelRunnerConfig):
    """Settings of the run."""

    partial_rollout: Bool = Field(
        default=True,
        description="With `max_staleness`: continue unfinished answers under new weights. false: finish them under the"
        " old weights first.",
    )
    sample_interval: StepsOrNever = Field(
        default=10, description="Training steps between sample files, `samples/step_N.jsonl`, of 64 answers; -1: never."
    )


SIZES_OF_A_FOLDER: Final = IgnoredKeys(
    ("hidden_dim", "num_layers"),
    lambda model, sizes: model.model_path is not None,
    "`model_path` names a model, which fixes the sizes",
    because=("model_path",),
)


# Rotary positions pair the numbers of an attention head.
Width = Annotated[Count, Field(multiple_of=2)]


class LanguageModelConfig(ModelConfig):
    """The language model."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        *ModelConfig.no_effect,
        SIZES_OF_A_FOLDER,
    )

    precision: Precision = Field(
        default="fp32",
        description="Compute type, and the type in which weights are sent and exported: fp32 or bf16; fp16 only with"
        " `runner.only_eval`. Trained weights and optimizer state are kept in fp32.",
    )
    hidden_dim: Width = Field(default=128, description="Width of the model built without `model_path`.")
    num_layers: Count = Field(default=2, description="Layers of the model built without `model_path`.")


class LanguageOptimConfig(OptimConfig):
    """AdamW and the clipping of gradients."""

    lr: PositiveFloat = Field(
        default=1e-4,
        description="Learning rate. Default: 1e-6 for all weights of `model_path`, 1e-4 for adapters (`lora`) and for"
        " a model built from scratch.",
    )
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95


class WarmStartConfig(ConfigModel):
    """Supervised warm start on correct answers, for models built from scratch."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(("lr",), lambda start, sizes: start.steps == 0, "`steps` is 0", because=("steps",)),
    )

    steps: NonNegativeInt = Field(default=50, description="Optimizer steps before reinforcement learning starts.")
    lr: PositiveFloat = Field(default=1e-3, description="Learning rate of these steps.")


class TokenizerConfig(ConfigModel):
    """The tokenizer of a language model."""

    tokenizer_model: OptionalModelPath = Field(
        default=None, description="Folder of the tokenizer. Default: the one in `actor.model.model_path`."
    )


# Learning rates for training all weights of a pretrained model, of policy and critic, as in verl and TRL.
PRETRAINED_RATE: Final = 1e-6
PRETRAINED_VALUE_RATE: Final = 1e-5

# Components that are placed only if the algorithm needs them.
OPTIONAL_COMPONENTS: Final = tuple(OPTIONAL)

# The characters of arithmetic problems, enough for a tiny model that learns them.
SYMBOLS: Final = "0123456789+-*/=() .,?"


class LanguageActorConfig(ActorConfig):
    """The workers that train a language model."""

    # A tiny random model's tokens (characters, and words of one token each) and its chat template.
    built_symbols: ClassVar[str] = SYMBOLS
    built_words: ClassVar[tuple[str, ...]] = ()
    built_template: ClassVar[str | None] = None

    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, description="Tokenizer of the language model: tokenizer_model."
    )
    max_tokens_per_micro_batch: Count = Field(
        default=4096, description="Packed tokens per forward and backward pass on one rank."
    )
    threads: Count = Field(default=1, description="CPU threads per process, of all groups that compute.")
    model: LanguageModelConfig = Field(
        default_factory=LanguageModelConfig, description="The language model: model_path, precision, lora."
    )
    optim: LanguageOptimConfig = Field(
        default_factory=LanguageOptimConfig, description="Optimizer: lr, betas, clipping."
    )


class AnswerActorConfig(LanguageActorConfig):
    """The workers that train."""

    global_batch_size: Count | None = Field(
        default=None,
        description="Answers per optimizer step, over all ranks. Default: all answers of a training step.",
    )
    micro_batch_size: Count | None = Field(
        default=None,
        description="Maximum answers per forward and backward pass on one rank. Default: limited only by"
        " `max_tokens_per_micro_batch`.",
    )
    warm_start: WarmStartConfig = Field(
        default_factory=WarmStartConfig,
        description="Supervised warm start of a model without `model_path`: steps, lr.",
    )


class LanguageCriticConfig(ConfigModel):
    """The workers that estimate values, for PPO: the language model with a linear value in the place of its logits.

    What `actor` says of computing, sharding and optimizing holds for them, too; their learning rates are constant.
    """

    group_name: ClassVar[str] = "CriticGroup"

    model_path: OptionalModelPath = Field(
        default=None, description="Folder of the model that learns values. Default: the actor's initial model."
    )
    lr: PositiveFloat = Field(
        default=1e-4,
        description="Learning rate, which is constant. Default: 1e-5 for all weights of a pretrained model, 1e-4 for"
        " adapters (`actor.model.lora`) and for a model built from scratch.",
    )


class LanguageReferenceConfig(ConfigModel):
    """The workers that hold the reference model, which `algorithm.kl_beta` keeps the policy near.

    They compute as `actor` does.
    """

    group_name: ClassVar[str] = "ReferenceGroup"

    model_path: OptionalModelPath = Field(
        default=None, description="Folder of the reference model. Default: the actor's initial model."
    )


class LanguageTeacherConfig(ConfigModel):
    """The workers that hold the teacher, whose log-probabilities `adv_type: distillation` learns from.

    They compute as `actor` does.
    """

    group_name: ClassVar[str] = "TeacherGroup"

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("hidden_dim",),
            lambda teacher, sizes: teacher.model_path is not None,
            "`model_path` names a model, which is used as it is",
            because=("model_path",),
        ),
    )

    model_path: OptionalModelPath = Field(
        default=None,
        description="Folder of the teacher, with the tokens of the actor's tokenizer. Default: a model built from"
        " scratch, where the actor's is, and trained on correct answers for 400 steps.",
    )
    hidden_dim: Width = Field(default=128, description="Width of the teacher built without `model_path`.")


class LanguageConfig(JobConfig):
    """Base configuration of recipes with a language model."""

    # The function that returns warm-start examples for a tiny random model, given configuration and tokenizer.
    warm_start_examples: ClassVar[str] = "recipes.language.learning.warm_start:right_answers"

    # Whether `reward.reward_type` scores every answer, and agents set no rewards.
    rewards_by_rule: ClassVar[bool] = True

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = LANGUAGE

    runner: LanguageRunnerConfig = Field(
        default_factory=LanguageRunnerConfig, description="Run length, what is saved, and where results go."
    )
    actor: AnswerActorConfig = Field(
        default_factory=AnswerActorConfig, description="The model that learns, its optimizer and its sharding."
    )
    rollout: LanguageRolloutConfig = Field(
        default_factory=LanguageRolloutConfig, description="The workers that generate answers."
    )
    critic: LanguageCriticConfig = Field(
        default_factory=LanguageCriticConfig, description="The workers that estimate values, for `adv_type: gae`."
    )
    reference: LanguageReferenceConfig = Field(
        default_factory=LanguageReferenceConfig, description="The reference model, for `algorithm.kl_beta`."
    )
    teacher: LanguageTeacherConfig = Field(
        default_factory=LanguageTeacherConfig, description="The teacher, for `adv_type: distillation`."
    )
    judge: LanguageJudgeConfig = Field(
        default_factory=LanguageJudgeConfig, description="The model that judges answers, for `reward_type: judge`."
    )
    reward: LanguageRewardConfig = Field(default_factory=LanguageRewardConfig, description="How answers are scored.")
    data: LanguageDataConfig = Field(
        default_factory=LanguageDataConfig,
        description="Problems for training and evaluation: files, prompts, batch size.",
    )
    algorithm: LanguageAlgorithmConfig = Field(
        default_factory=LanguageAlgorithmConfig,
        description="Advantages, losses, and how often samples are reused.",
    )

    @model_validator(mode="before")
    @classmethod
    def _rates_by_what_is_trained(cls, written: Any) -> Any:
        """Lower the default learning rates of actor and critic if they train all weights of a pretrained model, which
        the defaults for adapters and small models would damage.
        """
        if not isinstance(written, dict):
            return written
        job = dict(cast("dict[str, Any]", written))
        actor, critic = job.get("actor"), job.get("critic")
        model, optim = mapping(mapping(actor).get("model")), mapping(actor).get("optim")
        if adapts(model):
            return job
        # An empty text names no model.
        if model.get("model_path"):
            job["actor"] = {**mapping(actor), "optim": with_default(optim, "lr", PRETRAINED_RATE)}
        if mapping(critic).get("model_path") or model.get("model_path"):
            job["critic"] = with_default(critic, "lr", PRETRAINED_VALUE_RATE)
        return job

    @property
    def answers_per_step(self) -> int:
        """Answers that a training step learns from, when no group is dropped."""
        return self.data.rollout_batch_size * self.algorithm.group_size

    @property
    def longest_answer(self) -> int:
        """Maximum tokens of an answer."""
        return self.rollout.sampling_params.max_new_tokens

    def chat_roles(self, template: ChatTemplate) -> list[ChatRoles]:
        """Return the role sequences that the chat template must render, the simplest first."""
        asked = [ChatRoles(("data", "apply_chat_template"), ("user",))]
        return asked + [ChatRoles(("data", "system_prompt"), ("system", "user"))] * bool(self.data.system_prompt)

    @property
    def minibatches(self) -> int:
        """Optimizer steps of one pass over a training step's answers."""
        if self.algorithm.n_minibatches is not None:
            return self.algorithm.n_minibatches
        size = self.actor.global_batch_size
        return 1 if size is None else max(1, self.answers_per_step // size)


def adapts(model: dict[str, Any]) -> bool:
    """Return whether a section `model`, as written, asks for adapters; `lora: {}` does."""
    return model.get("lora") is not None


def with_default(section: Any, key: str, value: float) -> Any:
    """Return a section, as written, with the default of a key that is missing or null.

    A section that is neither a mapping nor null stays as it is, for validation to reject.
    """
    if mapping(section).get(key) is not None or not isinstance(section, dict | None):
        return section
    return {**mapping(section), key: value}


def mapping(value: Any) -> dict[str, Any]:
    """Return a mapping unchanged, and an empty one for any other value, which validation rejects later."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def check_minibatches(config: LanguageConfig, report: Report) -> None:
    """Report conflicting batch sizes."""
    size, answers = config.actor.global_batch_size, config.answers_per_step
    arithmetic = f"rollout_batch_size {config.data.rollout_batch_size} x group_size {config.algorithm.group_size}"
    prompts, steps = config.data.rollout_batch_size, config.minibatches
    if steps > prompts:
        report.conflict(
            "algorithm.n_minibatches actor.global_batch_size data.rollout_batch_size",
            f"{steps} optimizer steps cannot split the answers to {prompts} prompts: each takes whole groups",
            f"use at most {prompts} optimizer steps: `actor.global_batch_size` is at least `group_size`"
            f" {config.algorithm.group_size}",
        )
    if size is None:
        return
    at = blame(config, ("actor", "global_batch_size"), ("data", "rollout_batch_size"), ("algorithm", "group_size"))
    if answers % size:
        report(
            at,
            "batch-not-divisible",
            f"a step has {arithmetic} = {answers} answers, not a multiple of `actor.global_batch_size` {size}",
            f"nearest valid `actor.global_batch_size`: {near_divisors(answers, size)}",
        )
    elif config.algorithm.n_minibatches not in (None, answers // size):
        report.conflict(
            "algorithm.n_minibatches",
            f"`n_minibatches` is {config.algorithm.n_minibatches}, but {arithmetic} = {answers} answers /"
            f" `actor.global_batch_size` {size} = {answers // size}",
            "remove one of the two",
        )
