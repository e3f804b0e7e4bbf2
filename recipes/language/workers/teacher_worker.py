"""The workers that hold the teacher, which a policy learns from token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from recipes.language.config import LanguageConfig, LanguageTeacherConfig
from recipes.language.config.frozen_models import teacher_model, with_model
from recipes.language.models.policy import LanguagePolicy
from recipes.language.rules.vocabularies import vocabulary_difference
from recipes.language.workers.reference_worker import LanguageReference
from recipes.training.huggingface import load_tokenizer
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LanguageTeacher(LanguageReference):
    """Sends the actors the teacher's log-probabilities of the tokens that the policy drew."""

    config_section = "teacher"

    @property
    def _section(self) -> LanguageTeacherConfig:
        """See `LanguageReference`."""
        return self._config.teacher

    def _frozen(self) -> LanguageConfig:
        """See `LanguageReference`."""
        return with_model(self._config, teacher_model(self._config), self._config.teacher.warm_start)

    def _compare(self, policy: LanguagePolicy, tokenizer: PreTrainedTokenizerBase) -> None:
        """See `LanguageReference`."""
        super()._compare(policy, tokenizer)
        self._contact.compare(
            "tokens of the teacher", "those of the actor's tokenizer", lambda: self._same_tokens(tokenizer), cheap=True
        )

    def _same_tokens(self, tokenizer: PreTrainedTokenizerBase) -> Difference | None:
        """Compare the tokens of the teacher's folder with those of the actor; None where it has no tokenizer.

        Raises:
            ConfigError: they differ.
        """
        folder = self._config.teacher.model_path
        if folder is None:
            return None
        mine, theirs = (cast("Any", made).get_vocab() for made in (tokenizer, load_tokenizer(folder)))
        difference = vocabulary_difference(mine, theirs)
        if difference is not None:
            raise ConfigError(
                f"the teacher in `{folder}` was trained with other tokens than the actor: {difference}",
                help="distillation compares token by token: use a teacher of the same family",
            )
        return Difference(note=f"{len(mine)} tokens")
