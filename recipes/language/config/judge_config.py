"""Section `judge`: a model that judges answers, for `reward_type: judge`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from recipes.language.config.engine_facts import no_sglang
from recipes.language.config.rollout_config import EngineSettings
from recipes.sections.values import KnownOrOwn
from rlinf_core import Count
from rlinf_core.config.sections.values import NonNegativeFloat, NonNegativeInt, OptionalModelPath, Precision
from rlinf_core.scalars import Bool, Data, Text

VERDICTS: Final = ("correct", "score")
# Keys that `rollout` has under the same names.
ENGINE_KEYS: Final = ("backend", *EngineSettings.model_fields)


class LanguageJudgeConfig(EngineSettings):
    """The workers that hold the model that judges answers."""

    group_name: Text = Field(
        default="JudgeGroup", description="Name of the worker group, by which other components address it."
    )
    model_path: OptionalModelPath = Field(default=None, description="Folder of the judge, with its own tokenizer.")
    precision: Precision = Field(default="bf16", description="Type of the judge's weights: fp32, bf16 or fp16.")
    backend: Annotated[Literal["torch", "vllm"], BeforeValidator(no_sglang)] = Field(
        default="torch", description="Inference engine of the judge: torch (built in) or vllm."
    )
    max_running_tokens: NonNegativeInt = 65536
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
