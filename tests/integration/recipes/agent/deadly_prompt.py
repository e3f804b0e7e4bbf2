"""Rollout workers that die of one problem, as of one that an engine cannot bear."""

from __future__ import annotations

import os
import signal
from typing import Any, Final

from recipes.language.prompts.prompt_messages import Prompt
from recipes.language.workers.rollout_worker import LanguageRolloutWorker

# The place of the problem in the order of training: in the batch of step 2.
DEADLY: Final = 8


class DyingRolloutWorker(LanguageRolloutWorker):
    """Answers all prompts but one, of which it dies."""

    def init_worker(self, layout: Any) -> None:
        super().init_worker(layout)
        answering: Any = self._answering
        submit = answering._submit

        def submitted(prompt: Prompt) -> None:
            if prompt.trains and prompt.position == DEADLY and not prompt.set_aside:
                os.kill(os.getpid(), signal.SIGKILL)
            submit(prompt)

        answering._submit = submitted
