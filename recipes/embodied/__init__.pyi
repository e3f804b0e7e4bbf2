"""The public names, each with the module that defines it; `__init__.py` imports a name on first use."""

from recipes.embodied.cameras.drivers import CameraDriver as CameraDriver
from recipes.embodied.config import EmbodiedModelConfig as EmbodiedModelConfig
from recipes.embodied.envs.base import VectorEnv as VectorEnv
from recipes.embodied.envs.contract import check_env as check_env
from recipes.embodied.envs.env_spec import EnvSettings as EnvSettings
from recipes.embodied.envs.env_spec import EnvSpec as EnvSpec
from recipes.embodied.envs.env_spec import Transition as Transition
from recipes.embodied.envs.env_state import Starts as Starts
from recipes.embodied.envs.real.driver import RobotDriver as RobotDriver
from recipes.embodied.envs.real.driver import check_driver as check_driver
from recipes.embodied.envs.registry import make_env as make_env
from recipes.embodied.interventions.intervention import InterventionSource as InterventionSource
from recipes.embodied.interventions.intervention import SuccessJudge as SuccessJudge
from recipes.embodied.models.base_policy import ActionEval as ActionEval
from recipes.embodied.models.base_policy import BasePolicy as BasePolicy
from recipes.embodied.models.base_policy import PolicyOutput as PolicyOutput
from recipes.embodied.models.feature_policy import FeaturePolicy as FeaturePolicy
from recipes.embodied.models.policy_folder import save_policy as save_policy
from recipes.embodied.robots.robot_errors import RobotStoppedError as RobotStoppedError
from recipes.embodied.robots.robot_errors import RobotUnreachableError as RobotUnreachableError
from rlinf_core import Recipe

recipe: Recipe
__all__: list[str]
