"""The workers that hold the teacher, which a policy learns from token by token."""

from __future__ import annotations

from typing import Any, cast

from recipes.language.config import LanguageConfig, LanguageTeacherConfig
from recipes.language.config.frozen_models import teacher_model, with_model
from recipes.language.config.group_names import LanguageLayout
from recipes.language.models.load_model import make_tokenizer
from recipes.language.rules.vocabularies import vocabulary_difference
from recipes.language.workers.reference_worker import LanguageReference
from recipes.training.huggingface import load_tokenizer
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference


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

    def init_worker(self, layout: LanguageLayout) -> None:
        """Compare the tokens of teacher and actor, and load or build the teacher."""
        self._contact.compare("tokens of the teacher", "those of the actor's tokenizer", self._same_tokens, cheap=True)
        super().init_worker(layout)

    def _same_tokens(self) -> Difference | None:
        """Compare the tokens of the teacher's folder with those of the actor; None where it has no tokenizer.

        Raises:
            ConfigError: they differ.
        """
        folder = self._config.teacher.model_path
        if folder is None:
            return None
        tokenizers = make_tokenizer(self._config.actor), load_tokenizer(folder)
        mine, theirs = (cast("Any", tokenizer).get_vocab() for tokenizer in tokenizers)
        difference = vocabulary_difference(mine, theirs)
        if difference is not None:
            raise ConfigError(
                f"the teacher in `{folder}` was trained with other tokens than the actor: {difference}",
                help="distillation compares token by token: use a teacher of the same family",
            )
        return Difference(note=f"{len(mine)} tokens")
