"""The algorithm that a job learns by.

Apart from `algorithm`, which the configuration imports by name to know its keys: this is the way back.
"""

from __future__ import annotations

from typing import Any, cast

from recipes.embodied.config.algorithm_config import LearningConfig
from recipes.embodied.config.off_policy_config import method_of
from recipes.embodied.off_policy.algorithm import OffPolicyAlgorithm


def algorithm_of(section: LearningConfig) -> type[OffPolicyAlgorithm[Any]]:
    """Return the algorithm that the section `algorithm` names.

    Raises:
        TypeError: it learns on-policy.
    """
    return cast("type[OffPolicyAlgorithm[Any]]", method_of(section))
