"""The job file is valid, and the workers do their parts, which needs no cluster."""

from __future__ import annotations

from pathlib import Path

from rlinf_core import load_job

from my_recipe import BanditConfig, MyLearner, Player

JOB = load_job(str(Path(__file__).with_name("my_recipe.yaml")))


def test_job_file_is_valid() -> None:
    assert JOB.ok, JOB.diagnostics
    assert JOB.world_sizes == {"player": 2, "learner": 1}


def test_player_pulls_the_best_arm() -> None:
    player = Player()
    player.rank = 0  # which it has from its group otherwise
    assert {arm for arm, _ in player.play([0.0, 0.9, 0.1], pulls=5, exploration=0.0, seed="1")} == {1}


def test_learner_continues_from_its_checkpoint(tmp_path: Path) -> None:
    assert isinstance(JOB.config, BanditConfig)
    learner, resumed = MyLearner(JOB.config), MyLearner(JOB.config)
    learner.learn([(0, 1.0), (0, 3.0), (2, 5.0)])
    learner.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.means() == [2.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0]
