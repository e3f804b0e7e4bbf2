"""The harness that plays verifiers environments in the agent's own process: a chat with the task's tools.

verifiers finds it by its module name. It can be imported only where verifiers is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus
from importlib import import_module
from typing import Any, Final

from recipes.agent.tools.mcp_servers import listed_tools, result_text
from rlinf_core.foreign.strict_json import load_json_object

_library: Any = import_module("verifiers.v1")
_openai: Any = import_module("openai")

__all__ = ["InProcessChat"]


class InProcessChat(_library.Harness[_library.HarnessConfig]):
    """A chat with the model until a turn calls no tool."""

    APPENDS_SYSTEM_PROMPT: Final = True
    SUPPORTS_MCP: Final = True
    SUPPORTS_RESUME: Final = True
    EXECUTES_CODE: Final = False
    NEEDS_CONTAINER: Final = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # One client for all rollouts, as making one takes longer than a turn.
        self._client: Any = _openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
    ) -> Any:
        """Run the chat, and return the result of a successful program."""
        client = self._client.with_options(base_url=endpoint, api_key=secret)
        messages = _first_messages(*self.resolve_prompt(data))
        async with AsyncExitStack() as stack:
            tools = _Tools()
            for url in mcp_urls.values():
                await tools.connect(stack, url)
            offered: dict[str, Any] = {"tools": tools.listed} if tools.listed else {}
            while True:
                try:
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **offered)
                except _openai.APIStatusError as error:
                    if error.status_code != HTTPStatus.TOO_MANY_REQUESTS:
                        raise
                    break  # no turns or tokens are left: score the present state
                said = answer.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    break
                for call in said.tool_calls:
                    seen = await tools.call(call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
        return _library.ProgramResult(0, "", "")


class _Tools:
    """The tools of a task and their servers.

    Attributes:
        listed: the tools in the form of chat completions.
    """

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self._clients: dict[str, Any] = {}

    async def connect(self, stack: AsyncExitStack, url: str) -> None:
        """Connect to a server until the stack is closed."""
        client = await stack.enter_async_context(import_module("mcp").Client(url))
        for tool in await listed_tools(client, url):
            self._clients[tool.name] = client
            described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            self.listed.append({"type": "function", "function": described})

    async def call(self, name: str, arguments: str) -> str:
        """Return the result of a tool call; errors become text for the model."""
        if name not in self._clients:
            return f"unknown tool `{name}`; known: {', '.join(self._clients)}"
        try:
            result = await self._clients[name].call_tool(name, load_json_object(arguments or "{}"))
        except Exception as error:  # noqa: BLE001 - of the tool, or of the arguments
            return f"{type(error).__name__}: {error}"
        return result_text(result)


def _first_messages(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """Return the initial messages of the conversation."""
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    wire = import_module("verifiers.v1.dialects.chat").message_to_wire
    return messages + [wire(message) for message in prompt or ()]
