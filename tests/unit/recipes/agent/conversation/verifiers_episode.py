"""Episodes of an environment of verifiers, with a model that says what it is told to; run where verifiers is.

Its argument is JSON: `options` of the taskset, the `seed`, and the `turns` of the model; it prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from recipes.agent.conversation.agents import AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.tool_config import VerifiersOptions
from recipes.agent.tools.tool import Toolbox
from recipes.agent.verifiers_agent import VerifiersAgent, VerifiersError
from tests.unit.recipes.agent.scripted import SETTINGS, Script


def main(asked: dict[str, Any]) -> dict[str, Any]:
    agent = VerifiersAgent(VerifiersOptions(taskset="verifiers-words", **asked["options"]), 1)
    script = Script(*asked["turns"])
    llm = LanguageModel(script, SETTINGS._replace(max_tokens=4000, max_new_tokens=1000))
    task = AgentTask("", (), "", {"seed": asked["seed"]})
    try:
        outcome = asyncio.run(agent(task, llm, Toolbox((), 30.0)))
    except VerifiersError as error:
        return {"error": str(error)}
    said = [[message.role, message.text] for request in script.requests for message in request.messages]
    drawn = [
        "".join(chr(token) for token, mine in zip(segment.tokens, segment.trained, strict=True) if mine)
        for segment in llm.segments()
    ]
    return {"reward": outcome.reward, "parts": dict(outcome.parts), "told": said, "drawn": drawn}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
