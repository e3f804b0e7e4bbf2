"""A recipe: players pull the arms of a bandit, and a learner keeps the mean reward of each arm."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from pydantic import Field

from rlinf_core import Count, Fraction, JobConfig, Recipe, Runner, RunnerConfig, Seed, Worker, runner_program

Pull = tuple[int, float]  # arm, reward


class BanditConfig(JobConfig):
    """The keys of a job file."""

    runner: RunnerConfig = Field(default_factory=RunnerConfig, description="How long the run lasts, what it keeps.")
    arms: Count = Field(default=8, description="Arms of the bandit; the last one pays most.")
    pulls: Count = Field(default=20, description="Pulls of each player in a training step.")
    exploration: Fraction = Field(default=0.3, description="Share of pulls that try any arm.")
    seed: Seed = Field(default=1, description="Seed of all randomness.")


class Player(Worker):
    """A player, in a process of its own."""

    def play(self, means: list[float], pulls: int, exploration: float, seed: str) -> list[Pull]:
        """Pull the best arm so far, or now and then any; return the arms and their rewards."""
        random = Random(f"{seed} {self.rank}")
        best = max(range(len(means)), key=means.__getitem__)
        arms = [random.randrange(len(means)) if random.random() < exploration else best for _ in range(pulls)]
        return [(arm, random.gauss(arm / len(means), 0.1)) for arm in arms]


class MyLearner(Worker):
    """The learner: counts and mean rewards of the arms."""

    def __init__(self, config: BanditConfig) -> None:
        super().__init__()
        self.counts, self.sums = [0] * config.arms, [0.0] * config.arms

    def means(self) -> list[float]:
        """Return the mean reward of each arm; 0 if it was never pulled."""
        return [total / max(1, count) for total, count in zip(self.sums, self.counts, strict=True)]

    def learn(self, pulls: list[Pull]) -> None:
        """Take new pulls into account."""
        for arm, reward in pulls:
            self.counts[arm] += 1
            self.sums[arm] += reward

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint."""
        (folder / "arms.json").write_text(json.dumps([self.counts, self.sums]))

    def load(self, folder: Path) -> None:
        """Read the state of a checkpoint."""
        self.counts, self.sums = json.loads((folder / "arms.json").read_text())


class BanditLoop(Runner):
    """The loop over the groups `player` and `learner`. A call on a group runs on all its ranks."""

    def train_step(self, step: int) -> dict[str, float]:
        """Run one step and return its metrics; each `phase` becomes `time/NAME`."""
        with self.phase(step, "play"):
            pulls = self._play(step, self.cfg.exploration)
        with self.phase(step, "learn"):
            self.groups["learner"].learn(pulls).wait()
        return {"env/return": _mean(pulls)}

    def evaluate_policy(self, step: int) -> dict[str, float]:
        """Play without exploration."""
        return {"eval/return": _mean(self._play(step, 0.0))}

    def write_checkpoint(self, folder: Path) -> None:
        """Write what a resumed run needs."""
        self.groups["learner"].save(folder).wait()

    def read_checkpoint(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        self.groups["learner"].load(folder).wait()

    def _play(self, step: int, exploration: float) -> list[Pull]:
        means = self.groups["learner"].means().wait()[0]
        seed = f"{self.cfg.seed} {step} {exploration}"
        by_player = self.groups["player"].play(means, self.cfg.pulls, exploration, seed).wait()
        return [pull for pulls in by_player for pull in pulls]


def _mean(pulls: list[Pull]) -> float:
    return sum(reward for _, reward in pulls) / len(pulls)


program = runner_program(BanditLoop, {"player": Player, "learner": MyLearner})
recipe = Recipe("bandit", "players and a learner of a bandit", BanditConfig, "my_recipe.yaml", program)
