"""A bare MCP server on stdio, which answers as its mode says; run by `test_mcp.py`."""

from __future__ import annotations

import json
import sys
from typing import Any

MODE = sys.argv[1]
SCHEMAS: dict[str, Any] = {
    "any": {"x": True},
    "optional": {"x": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    "nullable": {"x": {"type": ["null", "string"]}},
    "never": {"x": False, "y": {}},
    "reference": {"x": {"$ref": "#/$defs/path"}},
    "loop": {"x": {"$ref": "#/properties/x"}, "y": {"$ref": "#/nothing"}},
    "choice": {"x": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "y": {"enum": ["a", 1]}, "z": {"const": 2}},
    "types": {"x": {"type": ["string", "null"]}, "y": {"type": "object"}, "z": {"description": "no type"}},
}
TEXT = {"type": "text", "text": "words"}
RESULTS: dict[str, Any] = {
    "structured": {"content": [], "structuredContent": {"answer": 42}},
    "structured_text": {"content": [TEXT], "structuredContent": {"answer": 42}},
    "structured_error": {"content": [], "structuredContent": {"error": "no such file"}, "isError": True},
    "silent_error": {"content": [], "isError": True},
    "resource": {"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "the text"}}]},
    "blob": {"content": [{"type": "resource", "resource": {"uri": "file:///a", "blob": "AA==", "mimeType": "a/b"}}]},
    "link": {"content": [{"type": "resource_link", "uri": "file:///a", "name": "notes"}]},
    "image": {"content": [TEXT, {"type": "image", "data": "AA==", "mimeType": "image/png"}]},
}


def tool(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": SCHEMAS.get(MODE, {"x": {"type": "string"}})}
    if MODE == "reference":
        schema |= {"$defs": {"path": {"type": "string"}}, "required": ["x"]}
    listed = {"name": name, "description": name, "inputSchema": schema}
    return {**listed, "outputSchema": {"type": "object", "required": ["b"]}} if MODE == "broken" else listed


def listed(cursor: str | None) -> dict[str, Any]:
    if MODE == "pages":
        return {"tools": [tool("c")]} if cursor else {"tools": [tool("a"), tool("b")], "nextCursor": "2"}
    if MODE == "same_cursor":
        return {"tools": [tool("a")], "nextCursor": "2"}
    if MODE == "cycle":
        return {"tools": [tool("a")], "nextCursor": "2" if cursor == "1" else "1"}
    return {"tools": [tool("a")]}


def result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        info = {"name": "raw", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return listed(params.get("cursor"))
    if method == "tools/call":
        if MODE == "echo_arguments":
            return {"content": [{"type": "text", "text": json.dumps(params["arguments"])}]}
        return RESULTS.get(MODE, {"content": [TEXT]})
    return {}


for line in sys.stdin:
    asked = json.loads(line)
    if MODE == "noise":
        print("Listening ...\n\n{not a message}", flush=True)
    if "id" in asked:
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": asked["id"]}
        if MODE == "refuses" and asked["method"] == "tools/call":
            answer["error"] = {"code": -32602, "message": "x is wrong"}
        elif MODE == "fails" and asked["method"] == "tools/call":
            answer["error"] = {"code": -32603, "message": "the database is gone"}
        else:
            answer["result"] = result(asked["method"], asked.get("params") or {})
        print(json.dumps(answer), flush=True)
