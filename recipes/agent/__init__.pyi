"""The public names, each with the module that defines it; `__init__.py` imports a name on first use."""

from recipes.agent.conversation.agents import AgentOutcome as AgentOutcome
from recipes.agent.conversation.agents import TextEnvironment as TextEnvironment
from recipes.agent.conversation.agents import TextStep as TextStep
from recipes.agent.endpoint import serve as serve
from recipes.agent.tools.tool import ToolError as ToolError
from recipes.agent.tools.tool import ToolUnavailable as ToolUnavailable
from rlinf_core import Recipe

recipe: Recipe
__all__: list[str]
