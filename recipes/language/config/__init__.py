"""The sections that the files of all recipes of language models share."""

from recipes.language.config.language_config import (
    OPTIONAL_COMPONENTS as OPTIONAL_COMPONENTS,
)
from recipes.language.config.language_config import (
    SYMBOLS as SYMBOLS,
)
from recipes.language.config.language_config import (
    AnswerActorConfig as AnswerActorConfig,
)
from recipes.language.config.language_config import (
    LanguageActorConfig as LanguageActorConfig,
)
from recipes.language.config.language_config import (
    LanguageConfig as LanguageConfig,
)
from recipes.language.config.language_config import (
    LanguageModelConfig as LanguageModelConfig,
)
from recipes.language.config.language_config import (
    LanguageOptimConfig as LanguageOptimConfig,
)
from recipes.language.config.language_config import (
    LanguageReferenceConfig as LanguageReferenceConfig,
)
from recipes.language.config.language_config import (
    LanguageRunnerConfig as LanguageRunnerConfig,
)
from recipes.language.config.language_config import (
    LanguageTeacherConfig as LanguageTeacherConfig,
)
from recipes.language.config.language_config import (
    ModelRunnerConfig as ModelRunnerConfig,
)
from recipes.language.config.language_config import (
    WarmStartConfig as WarmStartConfig,
)
from recipes.language.config.language_config import (
    check_minibatches as check_minibatches,
)
