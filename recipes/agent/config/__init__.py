"""The file of the agent recipe."""

from recipes.agent.config.agent_config import (
    EPISODES as EPISODES,
)
from recipes.agent.config.agent_config import (
    AgentConfig as AgentConfig,
)
from recipes.agent.config.agent_config import (
    AgentDataConfig as AgentDataConfig,
)
from recipes.agent.config.agent_config import (
    check as check,
)
from recipes.agent.config.agent_config import (
    inputs as inputs,
)
from recipes.agent.config.agent_config import (
    trials as trials,
)
