"""Workers that score answers with a judge model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from recipes.language.config.group_names import LanguageLayout
from recipes.language.config.language_config import LanguageConfig
from recipes.language.judging.judge import Judge
from recipes.language.loop.order_inbox import Inbox
from recipes.language.prompts.prompt_messages import JudgeReply, JudgeRequest, judge_key, verdict_key
from recipes.language.workers.engine_stream import EngineStream
from recipes.training.worker_parts import ComparingWorker


class JudgeWorker(ComparingWorker):
    """A worker that judges answers for the reward workers with a frozen model."""

    config_section = "judge"

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config

    def init_worker(self, layout: LanguageLayout) -> None:
        """Load the model, and connect to the channel."""
        torch.set_num_threads(self._config.actor.threads)
        self._judge = Judge(self._config, self.torch_device, self._contact, str(self.worker_info.address))
        self._channel = self.connect_channel(layout.answers)
        self._inbox = Inbox(self._channel, judge_key(self._rank))

    def serve(self) -> None:
        """Judge answers for reward workers until the request None has arrived and all earlier ones are answered."""
        judge = self._judge
        stream = EngineStream(
            judge.engine, lambda asked: self._send(judge.submit(asked)), lambda drawn: self._send(judge.read(drawn))
        )
        stream.run(self._inbox)

    def _send(self, replies: Iterable[tuple[JudgeRequest, JudgeReply]]) -> None:
        """Send verdicts to the workers that asked, one message each."""
        by_sender: defaultdict[int, list[JudgeReply]] = defaultdict(list)
        for request, reply in replies:
            by_sender[request.sender].append(reply)
        for sender, theirs in by_sender.items():
            self._channel.put(tuple(theirs), key=verdict_key(sender))

    def _close(self) -> None:
        judge = getattr(self, "_judge", None)
        if judge is not None:
            judge.engine.stop()
