"""A server on loopback that answers completion requests in the shapes of vLLM's, and lets our engine draw."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from recipes.language.answers.sequences import Request, SamplingParams, Sequence
from recipes.language.engines.torch_engine import TorchEngine
from tests.unit.recipes.language.engines.contract import contract_model, decode

Answer = tuple[int, Any]


class FakeServer:
    """What the server does.

    Attributes:
        url: its address.
        token: which it wants, if any.
        models: which it lists.
        faults: answers that are given instead, one a request to `/v1/completions`.
        change: changes the answers to completion requests.
        encoding: how answers are said to be compressed.
        cut: bytes after which answers break off, one an answer.
        defaults: fields of requests that leave them out, as of a model's generation_config.json.
        seen: paths and bodies of requests.
    """

    def __init__(self) -> None:
        self.url = ""
        self.token = ""
        self.models: Any = {"data": [{"id": "tiny", "max_model_len": 96}]}
        self.faults: list[Answer] = []
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.cut: list[int] = []
        self.encoding = ""
        self.defaults: dict[str, Any] = {}
        self.seen: list[tuple[str, Any]] = []
        self.hold = threading.Event()
        self.hold.set()
        self._lock = threading.Lock()
        self._engine = TorchEngine(contract_model(), decode=decode)

    def answer(self, path: str, body: Any, authorization: str) -> Answer:
        self.seen.append((path, body))
        if self.token and authorization != f"Bearer {self.token}":
            return 401, {"error": {"message": f"{authorization} is not known here"}}
        if path == "/v1/models":
            return 200, self.models
        if path == "/v1/completions":
            self.hold.wait(30)
            if self.faults:
                return self.faults.pop(0)
            with self._lock:
                return 200, self.change(self._complete(body))
        if path == "/collective_rpc":
            return 200, self._reload(body)
        return 200, None

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        # The penalties, biases and limits that this server would obey, at the values at which they do nothing.
        neutral = {
            "repetition_penalty": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "min_p": 0,
            "logit_bias": None,
        }
        for name, value in neutral.items():
            assert (self.defaults | body).get(name, value) == value, f"{name} changes what is drawn"
        params = SamplingParams(
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=body["top_k"],
            max_new_tokens=body["max_tokens"],
            min_new_tokens=body.get("min_tokens", 0),
            stop_token_ids=tuple(body["stop_token_ids"]),
            stop=tuple(body.get("stop", ())),
            seed=body["seed"],
        )
        assert body["model"] == "tiny"
        request = Request(request_id="", prompt=tuple(body["prompt"]), params=params, group_size=body["n"])
        self._engine.submit(request)
        return {"object": "text_completion", "choices": [_choice(result) for result in self._engine.results()]}

    def _reload(self, body: dict[str, Any]) -> dict[str, Any]:
        from safetensors.torch import load_file

        assert body["method"] == "reload_weights"
        self._engine.load_weights(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors").items(), 0)
        return {"results": [None]}


def _choice(result: Sequence) -> dict[str, Any]:
    tokens = [f"token_id:{token}" for token in result.tokens]
    choice = {"index": result.sample, "text": "", "finish_reason": result.finish_reason}
    choice |= {"token_ids": list(result.tokens), "prompt_token_ids": list(result.prompt)}
    return {**choice, "logprobs": {"tokens": tokens, "token_logprobs": list(result.logprobs)}}


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Run a server on loopback while the block lasts."""
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: Any) -> None:
            status, result = fake.answer(self.path, body, self.headers.get("Authorization", ""))
            text = b"" if result is None else result if isinstance(result, bytes) else json.dumps(result).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                if fake.encoding:
                    self.send_header("Content-Encoding", fake.encoding)
                self.end_headers()
                self.wfile.write(text[: fake.cut.pop(0)] if fake.cut else text)
            except OSError:
                pass  # the client has gone

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        fake.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
