"""The public names, each with the module that defines it; `__init__.py` imports a name on first use."""

from recipes.language.answers.answer_batch import RolloutBatch as RolloutBatch
from recipes.language.answers.sequences import Request as Request
from recipes.language.answers.sequences import SamplingParams as SamplingParams
from recipes.language.data.problem_sources import load_problems as load_problems
from recipes.language.engines.torch_engine import TorchEngine as TorchEngine
from recipes.language.learning.token_targets import token_advantages as token_advantages
from recipes.language.models.fingerprint import fingerprint as fingerprint
from recipes.language.models.load_model import built_model as built_model
from recipes.language.models.load_model import built_tokenizer as built_tokenizer
from recipes.language.models.packing import pack as pack
from recipes.language.models.policy import LanguagePolicy as LanguagePolicy
from recipes.language.rewards.matching.rules import RULES as RULES
from recipes.language.rewards.scoring import Item as Item
from recipes.language.rewards.scoring import Scorer as Scorer

__all__: list[str]
