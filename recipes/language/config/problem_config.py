"""Sections `data` and `reward` of language recipes: problems, and the scoring of their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from recipes.sections.values import KnownOrOwn, TestFiles, WeightedFiles, check_names, read_options, unread_options
from rlinf_core import ConfigModel, Count, Fraction, IgnoredKeys, Seed
from rlinf_core.config.model import NoOptions, Options
from rlinf_core.config.sections.values import NonNegativeFloat, NonNegativeInt, PositiveFloat
from rlinf_core.scalars import Bool, Data, Float, Int, Text

# The maximum number of problems that are generated from one seed.
MOST_GENERATED = 1 << 24
# The number of evaluation problems that are answered at the same time.
EVALUATED_AT_ONCE: Final = 512
# Rewards are float32.
Reward = Annotated[Float, Field(ge=-3e38, le=3e38)]
VERDICTS: Final = ("correct", "score")
REWARD_TYPES = ("exact", "boxed", "number", "math", "code", "judge", "reasoning_gym")


def _source(value: Any) -> Any:
    """Return the source of problems; `math`, another project's name for problem files, becomes None."""
    return None if value == "math" else value


class CurriculumConfig(ConfigModel):
    """Bounds of the share of right answers of training problems; others are passed over for three epochs."""

    low: Fraction = Field(
        default=0.05, description="Problems with a smaller share of right answers, when last asked, are passed over."
    )
    high: Fraction = Field(default=0.95, description="The same for problems with a larger share.")


class GymOptions(ConfigModel):
    """Options of `type: reasoning_gym`, beside the settings of the task by the library's names."""

    task: Text | None = Field(default=None, description="Task of reasoning-gym, such as chain_sum.")
    train_size: Annotated[Int, Field(ge=1, le=MOST_GENERATED)] = Field(
        default=10_000, description="Number of training problems."
    )


class SumOptions(ConfigModel):
    """Options of `type: sums`."""

    digits: Annotated[Int, Field(ge=1, le=9)] = Field(default=1, description="Most digits of the numbers.")
    spaced: Bool = Field(default=False, description="Write `3 + 4 =`, not `3+4=`.")


class ProblemOptions(GymOptions, SumOptions, extra="allow"):
    """The options of all sources of problems, and settings of a task of reasoning-gym."""


PROBLEM_OPTIONS: Final[Mapping[str, type[ConfigModel]]] = {"reasoning_gym": GymOptions, "sums": SumOptions}


class LanguageDataConfig(ConfigModel):
    """Problems with verifiable answers."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("prompt_key", "answer_key"),
            lambda data, sizes: data.source != "files",
            lambda data: f"problems come from {data.source}, not from files",
            "remove it, or write `train_data_paths: FILE`",
            because=("type",),
        ),
        IgnoredKeys(
            ("chat_template_kwargs",),
            lambda data, sizes: not data.apply_chat_template,
            "questions are asked without a chat template",
            "remove it, or write `apply_chat_template: true`",
            because=("apply_chat_template",),
        ),
        IgnoredKeys(
            tuple(f"options.{name}" for name in GymOptions.model_fields),
            lambda data, sizes: data.source != "reasoning_gym",
            lambda data: f"problems come from {data.source}, not from reasoning_gym",
            "remove it, or write `type: reasoning_gym`",
            because=("type", "train_data_paths"),
        ),
        IgnoredKeys(
            ("val_size",),
            lambda data, sizes: data.source == "files",
            "problems come from files",
            "name the file of the held-out problems in `val_data_paths`, and remove it",
            because=("train_data_paths",),
        ),
        IgnoredKeys(
            tuple(f"options.{name}" for name in SumOptions.model_fields),
            lambda data, sizes: data.source not in ("reasoning_gym", "sums"),
            lambda data: f"problems come from {data.source}",
            "remove it, or write `type: sums`",
            because=("type", "train_data_paths"),
        ),
        IgnoredKeys(
            ("seed",),
            lambda data, sizes: data.source == "files" and not data.shuffle,
            "problems from files are used in order: `shuffle` is false",
            because=("shuffle",),
        ),
    )

    type: Annotated[
        Literal["calculations", "lookups", "episodes", "jsonl", "parquet", "reasoning_gym", "sums"] | None,
        BeforeValidator(_source),
    ] = Field(default=None, description="Source of the problems.")
    train_data_paths: WeightedFiles = Field(
        default=(),
        description="JSONL files with one problem per line: one path or a list. `{path: ..., weight: ...}` sets the"
        " share of a file among several. Default: generated sums.",
    )
    val_data_paths: TestFiles = Field(
        default=(),
        description="JSONL files for evaluation, one path or a list. Default: a held-out part of the training data.",
    )
    prompt_key: Text = Field(default="prompt", description="Key of the problem text in a line.")
    answer_key: Text = Field(default="answer", description="Key of the correct answer in a line.")
    max_prompt_length: Count = Field(
        default=1024, description="Maximum prompt length, in tokens; longer prompts are skipped."
    )
    rollout_batch_size: Count = Field(
        default=32, description="Prompts per training step; each is answered `algorithm.group_size` times."
    )
    curriculum: CurriculumConfig | None = Field(
        default=None,
        description="Pass over training problems that are too easy or too hard by their measured share of right"
        " answers: low, high. Default: every problem is asked.",
    )
    shuffle: Bool = Field(default=True, description="Reshuffle the problems in every epoch.")
    options: Options[ProblemOptions] = Field(
        default_factory=dict[str, Any],
        description="What one source alone reads (docs/reference/options.md). reasoning_gym: task, train_size, and the"
        " settings of the task by the library's names; sums: digits, spaced.",
    )
    val_size: Annotated[Int, Field(ge=1, le=MOST_GENERATED)] = Field(
        default=200, description="Number of evaluation problems of sums and reasoning-gym tasks."
    )
    val_samples: Count = Field(
        default=1, description="Answers per evaluation problem. 1: greedy; more: sampled, for pass@k."
    )
    apply_chat_template: Bool = Field(
        default=False, description="Format each question as a user message in the tokenizer's chat template."
    )
    chat_template_kwargs: dict[str, Data] = Field(
        default_factory=dict[str, Any],
        description="Arguments of the chat template, by its own names, such as `{enable_thinking: false}`.",
    )
    system_prompt: str = Field(
        default="",
        description="System message of prompts that have none; needs `apply_chat_template`.",
    )
    few_shot: str = Field(default="", description="Text before every question, such as few-shot examples.")
    seed: Seed = Field(default=0, description="Seed of the problem order and of generated problems.")

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.source != "reasoning_gym":
            reader = f"problems of {self.source}"
            check_names("options", self.options, ProblemOptions.model_fields, reader)
        return self

    @property
    def settings(self) -> ProblemOptions:
        """The options of the source, defaults included."""
        return ProblemOptions.model_validate(self.options)

    @property
    def task_settings(self) -> dict[str, Any]:
        """The settings of a task of reasoning-gym, by the library's names."""
        return {name: value for name, value in self.options.items() if name not in GymOptions.model_fields}

    @property
    def train_files(self) -> tuple[str, ...]:
        """The paths of `train_data_paths`."""
        return tuple(file if isinstance(file, str) else file.path for file in self.train_data_paths)

    @property
    def train_weights(self) -> tuple[float | None, ...]:
        """The weight of each file of `train_data_paths`; None: its number of rows."""
        return tuple(None if isinstance(file, str) else file.weight for file in self.train_data_paths)

    @property
    def reshuffles(self) -> bool:
        """Whether every epoch reorders the problems; seeds of episodes need no reordering."""
        return self.shuffle and self.type != "episodes"

    @property
    def source(self) -> str:
        """The source of the problems."""
        if self.type == "sums" or (self.type is None and not (self.train_data_paths or self.val_data_paths)):
            return "sums"
        return "reasoning_gym" if self.type == "reasoning_gym" else "files"


class MathDataConfig(LanguageDataConfig):
    """Problems with verifiable answers."""

    type: Annotated[Literal["jsonl", "parquet", "reasoning_gym", "sums"] | None, BeforeValidator(_source)] = Field(
        default=None,
        description="Source: JSONL or Parquet files, a reasoning_gym task, or generated sums. Default: files if"
        " `train_data_paths` is set, else sums.",
    )


class ProgramOptions(ConfigModel):
    """Options of `reward_type: code`."""

    program_memory_mib: Annotated[Int, Field(ge=64)] = Field(
        default=256, description="Memory limit of a program, in MiB."
    )


class JudgeOptions(ConfigModel):
    """Options of `reward_type: judge`."""

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


class RewardOptions(ProgramOptions, JudgeOptions):
    """The options of all types of rewards."""


REWARD_OPTIONS: Final[Mapping[str, type[ConfigModel]]] = {"code": ProgramOptions, "judge": JudgeOptions}


class LanguageRewardConfig(ConfigModel):
    """Scoring by rule."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        *unread_options("options", "reward_type", {**dict.fromkeys(REWARD_TYPES, NoOptions), **REWARD_OPTIONS}),
        IgnoredKeys(
            ("timeout",),
            lambda reward, sizes: reward.asks_judge,
            "a judge is waited for: `options.max_new_tokens` limits it",
            because=("reward_type",),
        ),
    )

    group_name: ClassVar[str] = "RewardGroup"

    reward_type: Annotated[Text, KnownOrOwn("reward_type", REWARD_TYPES, {"numeric": "number", "symbolic": "math"})] = (
        Field(
            default="number",
            description="How an answer is judged correct: exact (same text), boxed (contents of \\boxed{}), number"
            " (the number that is boxed, stated as the answer, or last), math (equal numbers, lists and"
            " expressions, by math-verify), code (a program that passes tests, in a sandbox), judge (by a model, in a"
            " group `judge`), reasoning_gym (by that library), or `package.module:function`.",
        )
    )
    correct_reward: Reward = Field(default=1.0, description="Reward of a correct answer.")
    incorrect_reward: Reward = Field(default=0.0, description="Reward of any other answer.")
    timeout: PositiveFloat | None = Field(
        default=None,
        description="Time limit for scoring one answer, in seconds; an answer that exceeds it is dropped. The first"
        " call of a function, which may load a judge, gets at least 60. Default: 5 for rules, 60 for a"
        " function. For `code`: processor time of one run of a program; one that exceeds it is wrong.",
    )
    options: Options[RewardOptions] = Field(
        default_factory=dict[str, Any],
        description="What one `reward_type` alone reads (docs/reference/options.md). judge: template, verdict,"
        " max_new_tokens and others; code: program_memory_mib.",
    )

    @property
    def judging(self) -> JudgeOptions:
        """The options of `reward_type: judge`."""
        return read_options(JudgeOptions, self.options)

    @property
    def program(self) -> ProgramOptions:
        """The options of `reward_type: code`."""
        return read_options(ProgramOptions, self.options)

    @property
    def asks_judge(self) -> bool:
        """Whether a model of the group `judge` scores answers."""
        return self.reward_type == "judge"

    @property
    def overlong_margin(self) -> int:
        """Tokens before an answer's length limit over which a penalty grows; 0: no penalty."""
        return 0


class MathRewardConfig(LanguageRewardConfig):
    """Scoring by rule."""

    soft_overlong: NonNegativeInt = Field(
        default=0, description="Tokens before the length limit over which a penalty grows from 0 to -1; 0: none."
    )

    @property
    def overlong_margin(self) -> int:
        return self.soft_overlong
