"""A trial of Harbor on a box, with a model that says what it is told to; run where Harbor is.

Its argument is JSON: the `harness`, the folder of `tasks` and that of `boxes`, and the `turns` of the model. It prints
JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

from recipes.agent.config.tool_config import HarborKeys
from recipes.agent.conversation.agents import AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.environments.harbor_agent import TaskAgent
from recipes.agent.tools.toolbox import Toolbox
from rlinf_core import ConfigError
from tests.unit.recipes.agent.test_llm import SETTINGS, Script


def main(asked: dict[str, Any]) -> dict[str, Any]:
    environment = HarborKeys(
        path=asked["tasks"],
        box_folder=asked["boxes"],
        box_memory_mib=1024,
        harness=asked["harness"],
        options=asked.get("options", {}),
    )
    config: Any = SimpleNamespace(
        agent=SimpleNamespace(tool_timeout=10.0, timeout=120.0, environment=environment),
        data=SimpleNamespace(val_size=1, apply_chat_template=True, system_prompt=""),
        runner=SimpleNamespace(seq_length=60_000),
    )
    script = Script(*asked["turns"])
    limits = {"max_tokens": 60_000, "max_new_tokens": 4000, "max_turns": len(asked["turns"])}
    llm = LanguageModel(script, SETTINGS._replace(**limits))
    shown: list[tuple[str, str]] = []
    tools = Toolbox((), 30.0, lambda call, seen: shown.append((call.argument, seen.text)))
    task = AgentTask("episode 0", (), "", {"seed": 0})

    async def run() -> dict[str, Any]:
        agent = TaskAgent(config, config.agent.environment)
        try:
            outcome = await agent(task, llm, tools)
        finally:
            if agent._store is not None:
                agent._store.close()
                await agent._store.boxes.close()
        return {"reward": outcome.reward, "parts": dict(outcome.parts)}

    try:
        result = asyncio.run(run())
    except (Exception, ConfigError) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    segments = [
        {
            "drawn": [token for token, mine in zip(segment.tokens, segment.trained, strict=True) if mine],
            "whole": [*segment.prompt, *segment.tokens],
        }
        for segment in llm.segments()
    ]
    asked_for = [list(request.context) for request in script.requests]
    return {
        **result,
        "segments": segments,
        "contexts": asked_for,
        "shown": shown,
        "figures": dict(tools.figures),
        "limit": llm.limit,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
