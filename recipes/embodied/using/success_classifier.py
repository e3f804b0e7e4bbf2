"""Image-based success classifier, trained by `recipe=sft` with `data.target: success`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.embodied.config.intervention_types import ClassifierOptions
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.interventions.intervention import Steerable, SuccessJudge, Verdict
from recipes.embodied.using.trained_policy import TrainedPolicy
from recipes.training.arrays import Array
from rlinf_core import ConfigError, load_policy


class ClassifierJudge(SuccessJudge):
    """Ends an episode as solved after enough consecutive images classified as success. It never reports a failure."""

    options_model = ClassifierOptions

    def __init__(self, env: Steerable, options: ClassifierOptions) -> None:
        super().__init__(env, options)
        torch.set_num_threads(1)
        self._classifier = cast("TrainedPolicy", load_policy(options.path))
        wanted, seen = self._classifier.spec, cast("VectorEnv", env).spec
        if wanted.num_choices != 2 or wanted.state_size or wanted.action_size != 1:
            raise ConfigError(
                "this model is not a success classifier",
                where=options.path,
                help="train one: `rlinf train recipe=sft data.target=success`",
            )
        strange = [name for name, shape in wanted.cameras.items() if seen.cameras.get(name) != shape]
        if strange:
            raise ConfigError(
                f"the classifier reads the camera `{strange[0]}` with {wanted.cameras[strange[0]]}, but the"
                f" environment has {dict(seen.cameras) or 'no cameras'}",
                where=options.path,
                help="give the environment that camera in that size, or train on images of this environment",
            )
        self._in_a_row = np.zeros(env.num_envs, np.int64)

    def probabilities(self, observations: Mapping[str, Array]) -> NDArray[np.float64]:
        """Return the probability that each environment is solved, [B]."""
        module = self._classifier.module
        seen = {name: observations[name] for name in self._classifier.spec.observations}
        with torch.inference_mode():
            output = module.act(module.prepare(seen), greedy=True)
        # A categorical distribution has log-probabilities of greedy actions, too.
        likely = cast("torch.Tensor", output.logprobs).exp().reshape(-1).double().numpy()
        return np.where(module.to_env(output.actions).reshape(-1) == 1, likely, 1 - likely)

    def judge(self, observations: Mapping[str, Array]) -> dict[int, Verdict]:
        """See `SuccessJudge`."""
        solved = self.probabilities(observations) >= self.options.threshold
        before = np.where(self.env.progress.steps > 0, self._in_a_row, 0)  # not those of an episode before
        self._in_a_row = np.where(solved, before + 1, 0)
        ended = np.flatnonzero(self._in_a_row >= self.options.in_a_row)
        self._in_a_row[ended] = 0
        return {int(row): "success" for row in ended}
