"""From demonstrations of a script or a device to a policy, its evaluation and reinforcement learning."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.sync.client import ClientConnection, connect

from recipes.demonstrations.demonstrations import Demonstrations
from recipes.demonstrations.load_set import load_demonstrations
from recipes.embodied.config.intervention_types import ScriptedOptions
from recipes.embodied.interventions.registry import takeover_steps
from rlinf_core.runners.metrics import read_metrics
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.rlinf_command import rlinf
from tests.waiting import until

RLINF = Path(sys.executable).with_name("rlinf")

# A policy and batches that are the same in all of them.
SMALL = (
    "env.train.total_num_envs=8",
    "env.eval.total_num_envs=8",
    "actor.model.hidden_dim=32",
    "actor.global_batch_size=80",
    "runner.max_steps=2",
)


def evaluated(folder: Path, run: Path, out: str) -> dict[str, Any]:
    """Return `eval.json` without the one key that says when it was made."""
    return evaluation(folder, out, str(run))


def evaluation(folder: Path, out: str, *arguments: str) -> dict[str, Any]:
    rlinf(folder, "eval", *arguments, "-o", out)
    loaded: dict[str, Any] = json.loads((folder / out / "eval.json").read_text())
    del loaded["times"]
    return loaded


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_demonstrations_teach_a_policy_whose_evaluation_repeats(tmp_path: Path) -> None:
    rlinf(tmp_path, "record", "embodied/pick-laptop", "-o", "shown", "-n", "4")
    rlinf(tmp_path, "train", "recipe=sft", "data.train_data_paths=shown", "runner.val_check_interval=-1", *SMALL)
    (learned,) = (tmp_path / "runs").glob("sft-*")
    losses = [record.metrics["train/actor/bc_loss"] for record in read_metrics(learned / "metrics.jsonl")]
    assert len(losses) == 2
    assert losses[1] < losses[0]

    first = evaluated(tmp_path, learned, "first")
    assert json.dumps(first) == json.dumps(evaluated(tmp_path, learned, "second"))
    assert first["total"]["episodes"] == 8
    assert all((tmp_path / "first" / video["file"]).stat().st_size for video in first["videos"])
    assert first["videos"]

    # What is exported is evaluated as the model that a file begins with.
    rlinf(tmp_path, "export", str(learned), "--format", "safetensors", "-o", "policy")
    pretrained = evaluation(tmp_path, "third", "embodied/pick-laptop", "actor.model.model_path=policy", *SMALL[1:3])
    assert pretrained["total"] == first["total"]
    assert pretrained["checkpoint"]["step"] is None

    newest = RunFolder.open(learned).checkpoints.latest()
    assert newest is not None
    start = f"actor.checkpoint_load_path={newest.path}"
    filmed = "env.eval.video_cfg.save_video=true"
    rlinf(tmp_path, "train", "embodied/pick-laptop", start, "runner.val_check_interval=1", filmed, *SMALL)
    (continued,) = (tmp_path / "runs").glob("embodied-*")
    assert {path.name[:11] for path in (continued / "videos").iterdir()} == {f"step-00000{step}" for step in range(3)}
    begun = read_metrics(continued / "metrics.jsonl")[0]
    # The weights are those that were evaluated, before the first step.
    assert begun.step == 0
    assert begun.metrics["eval/return"] == pytest.approx(first["total"]["return"], rel=1e-5)


TOKEN = "of a test, this long"
SMALL_DEVICE = ("env.train.task=reach", "env.train.max_episode_steps=12", "env.train.ignore_terminations=true")


@contextmanager
def rlinf_here(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command, and wait until it has succeeded."""
    environ = {**os.environ, "RLINF_ADDRESS": "local", "PYTHONPATH": str(folder)}
    command = [str(RLINF), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
            said = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, said


def episodes(folder: Path) -> list[tuple[dict[str, int], Demonstrations]]:
    """Return the start of each episode of a data set, and its steps."""
    (file,) = folder.rglob("rlinf.json")
    starts = json.loads(file.read_text())["starts"]
    data = load_demonstrations([str(folder)])
    return [(start, data.chosen([number])) for number, start in enumerate(starts)]


def flags(episode: Demonstrations) -> NDArray[np.bool_]:
    assert episode.interventions is not None
    return episode.interventions


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_scripted_expert_is_recorded_in_just_the_steps_it_took(tmp_path: Path) -> None:
    options = ScriptedOptions(probability=0.2, shortest=2, longest=4, seed=7)
    values = [f"--option={name}={value}" for name, value in options.model_dump().items()]
    sizes = ("env.train.total_num_envs=3", *SMALL_DEVICE)
    with rlinf_here(
        tmp_path, "record", "embodied/pick-laptop", "--device", "scripted", *values, "-n", "6", "-o", "shown", *sizes
    ):
        pass
    result = episodes(tmp_path / "shown")
    assert len(result) == 6
    for start, episode in result:
        truth = takeover_steps(options, start["env"], start["reset"], 0, 0)[: len(episode)]
        assert flags(episode).tolist() == truth.tolist()
        # Nobody else acts: the arm stands still where the expert does not move it.
        assert not episode.actions[~truth].any()
        assert episode.actions[truth].any()
    assert any(flags(episode).any() and not flags(episode).all() for _, episode in result)


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_person_at_a_page_records_an_episode_and_judges_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = int(free.getsockname()[1])
    options = (f"--option=token_file={token}", f"--option=port={port}", "--option=release_steps=0")
    sizes = ("env.train.total_num_envs=1", "env.train.max_episode_steps=400", "env.train.task=pick")
    with rlinf_here(
        tmp_path, "record", "embodied/pick-laptop", "--device", "browser", *options, "-n", "1", "-o", "shown", *sizes
    ) as job:
        result: list[ClientConnection] = []

        def connected() -> bool:
            assert job.poll() is None, job.communicate()
            with suppress(OSError):
                page = f"127.0.0.1:{port}"
                result.append(connect(f"ws://{page}/operate", additional_headers={"Origin": f"http://{page}"}))
            return bool(result)

        until(connected, "the run", 240)
        with result[0] as person:
            person.send(json.dumps({"token": TOKEN}))
            hz = json.loads(person.recv(timeout=20))["hz"]
            steers, rests = (
                {"enabled": True, "keys": ["w"], "pressed": []},
                {"enabled": False, "keys": [], "pressed": []},
            )
            for message in [steers] * 10 + [rests] * 10 + [{**rests, "pressed": ["success"]}]:
                person.send(json.dumps(message))
                time.sleep(1 / hz)
            job.wait(240)
    ((_, episode),) = episodes(tmp_path / "shown")
    theirs = flags(episode)
    # It begins with the first motion, goes on with some, then they let go, and the last step is the one they judged.
    assert theirs[0]
    assert 0 < theirs.sum() < len(theirs) < 400
    assert episode.actions[theirs].any(axis=1).all()
    assert not episode.actions[~theirs].any()
    assert episode.successes is not None
    assert episode.successes.tolist() == [False] * (len(episode) - 1) + [True]


GRABBER = """
import json

import numpy as np

from recipes.embodied.interventions.intervention import InterventionSource, Takeover


class Grabber(InterventionSource):
    '''Grabs in the middle of chunks of five at steps drawn anew, and writes down what it does.'''

    def __init__(self, env, options):
        super().__init__(env, options)
        self.random = np.random.default_rng(3)
        self.file = open("truth.jsonl", "a", buffering=1)

    def read(self):
        progress = self.env.progress
        rows = self.random.random(self.env.num_envs) < 0.15
        for row, number in enumerate(progress.numbers.tolist()):
            line = [number, int(progress.reset), int(progress.steps[row]), bool(rows[row])]
            self.file.write(json.dumps(line) + "\\n")
        return Takeover(rows, np.full((self.env.num_envs, self.env.action_size), 0.25, np.float32), {})
"""


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_intervention_within_a_chunk_is_recorded_by_ticks(tmp_path: Path) -> None:
    (tmp_path / "grabber.py").write_text(GRABBER)
    learns = ("actor.model.num_action_chunks=5", "actor.model.hidden_dim=16", "runner.max_steps=1")
    sizes = ("env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=20", "actor.global_batch_size=8")
    ends = (
        "runner.val_check_interval=-1",
        "runner.save_interval=1",
        "env.train.max_episode_steps=20",
        *SMALL_DEVICE[::2],
    )
    with rlinf_here(tmp_path, "train", "embodied/pick-laptop", *learns, *sizes, *ends):
        pass
    (run,) = (tmp_path / "runs").glob("embodied-*")
    with rlinf_here(tmp_path, "record", str(run), "--device", "grabber:Grabber", "-n", "8", "-o", "corrected"):
        pass
    (log,) = {*tmp_path.rglob("truth.jsonl")}
    truth = {(number, reset, step): took for number, reset, step, took in map(json.loads, log.read_text().splitlines())}
    interrupted = 0
    for start, episode in episodes(tmp_path / "corrected"):
        messages = [truth[start["env"], start["reset"], step] for step in range(len(episode))]
        assert flags(episode).tolist() == messages
        for begin in range(0, len(episode), 5):
            chunk = slice(begin, begin + 5)
            taken = flags(episode)[chunk]
            np.testing.assert_allclose(episode.actions[chunk][taken], 0.25)
            # What the policy had chosen before somebody grabbed is dropped for the rest of the chunk.
            after = np.maximum.accumulate(taken) & ~taken
            assert not episode.actions[chunk][after].any()
            before = ~np.maximum.accumulate(taken)
            assert episode.actions[chunk][before].any(axis=1).all()
            interrupted += bool(after.any())
    assert interrupted > 3
