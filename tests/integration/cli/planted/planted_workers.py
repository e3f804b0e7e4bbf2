"""Workers with a planted fault, and `rlinf` with one of them in the place of the recipe's own.

python -m tests.integration.cli.planted.planted_workers PLANT ARGUMENTS...    as `rlinf ARGUMENTS...`
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, Final

from recipes.language.answers.prompt_messages import Prompt
from recipes.language.loop.worker_groups import GenerationGroup
from recipes.language.workers.rollout_worker import LanguageRolloutWorker
from rlinf_core.worker.worker import WorkerReference

# The version of the weights from which on an engine takes no others.
_LAST: Final = 3
# The place of the problem in the order of training: in the batch of step 2.
DEADLY: Final = 8


class DeafRollout(LanguageRolloutWorker):
    """Reports weights of a later version as loaded, and answers by those of an earlier one."""

    def init_worker(self, layout: Any) -> None:
        super().init_worker(layout)
        deafen(self, honest=False)


class HonestlyDeafRollout(LanguageRolloutWorker):
    """Keeps its weights from a version on, and says by their fingerprint which it has."""

    def init_worker(self, layout: Any) -> None:
        super().init_worker(layout)
        deafen(self, honest=True)


def deafen(worker: Any, *, honest: bool) -> None:
    """Let the engine of a rollout worker take no weights of later versions."""
    engine = worker._engine
    load = engine.load_weights
    kept: list[tuple[str, Any]] = []
    digests: list[str] = []

    def loaded(tensors: Any, version: int, **options: Any) -> str:
        arrived = [(name, tensor.clone()) for name, tensor in tensors]
        digest = load(arrived, version, **options)
        if version < _LAST or not kept:
            kept[:], digests[:] = arrived, [digest]
            return digest
        old = load(kept, version, **options)
        return old if honest else digest

    engine.load_weights = loaded


class DyingRolloutWorker(LanguageRolloutWorker):
    """Answers all prompts but one, of which it dies, as of one that an engine cannot bear."""

    def init_worker(self, layout: Any) -> None:
        super().init_worker(layout)
        answering: Any = self._answering
        submit = answering._submit

        def submitted(prompt: Prompt) -> None:
            if prompt.trains and prompt.position == DEADLY and not prompt.set_aside:
                os.kill(os.getpid(), signal.SIGKILL)
            submit(prompt)

        answering._submit = submitted


PLANTS: Final = {
    "deaf": f"{__name__}:DeafRollout",
    "honestly deaf": f"{__name__}:HonestlyDeafRollout",
    "dies of a prompt": f"{__name__}:DyingRolloutWorker",
}


def main() -> None:
    import recipes.math.program
    from rlinf_cli.launcher import launch

    planted, *arguments = sys.argv[1:]
    path = PLANTS[planted].replace("__main__", "tests.integration.cli.planted.planted_workers")
    recipes.math.program.ROLLOUT = WorkerReference[GenerationGroup](path, GenerationGroup, "rollout")
    sys.argv = ["rlinf", *arguments]
    sys.exit(launch())


if __name__ == "__main__":
    main()
