"""Configuration of the embodied recipe: sections, defaults and allowed values."""

from recipes.embodied.config.embodied_config import COMPONENTS as COMPONENTS
from recipes.embodied.config.embodied_config import EmbodiedActorConfig as EmbodiedActorConfig
from recipes.embodied.config.embodied_config import EmbodiedConfig as EmbodiedConfig
from recipes.embodied.config.embodied_config import EmbodiedOptimConfig as EmbodiedOptimConfig
from recipes.embodied.config.embodied_config import EmbodiedRunnerConfig as EmbodiedRunnerConfig
from recipes.embodied.config.embodied_config import PolicyActorConfig as PolicyActorConfig
from recipes.embodied.config.embodied_config import PolicyJob as PolicyJob
from recipes.embodied.config.embodied_config import PolicyOptimConfig as PolicyOptimConfig
from recipes.embodied.config.embodied_config import PolicyRunnerConfig as PolicyRunnerConfig
from recipes.embodied.config.embodied_config import comparing_setting as comparing_setting
from recipes.embodied.config.embodied_config import facts as facts
from recipes.embodied.config.embodied_config import group_size as group_size
from recipes.embodied.config.embodied_config import inputs as inputs
from recipes.embodied.config.embodied_config import resets_each_pass as resets_each_pass
from recipes.embodied.config.embodied_config import uses_values as uses_values
from recipes.embodied.config.model_config import EmbodiedModelConfig as EmbodiedModelConfig
