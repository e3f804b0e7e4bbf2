"""Q-learning on a line of eight cells, rewarded at its end: `PYTHONPATH=. rlinf train recipe=own_recipe:recipe`."""

import json
from pathlib import Path
from random import Random

from pydantic import Field

from rlinf_core import Count, Fraction, JobConfig, Recipe, Runner, RunnerConfig, Worker, runner_program

Transition = tuple[int, int, float, int]  # cell, move (0 left, 1 right), reward, next cell


class LineConfig(JobConfig):
    runner: RunnerConfig = Field(default_factory=RunnerConfig, description="How long the run lasts, what it keeps.")
    moves: Count = Field(default=40, description="Moves of each walker in a training step.")
    exploration: Fraction = Field(default=0.3, description="Share of moves that are drawn at random.")


class Walker(Worker):
    def walk(self, values: list[list[float]], moves: int, exploration: float, seed: int) -> list[Transition]:
        random, cell, transitions = Random(seed * 1000 + self.rank), 0, []
        for _ in range(moves):
            left, right = values[cell]
            move = random.randrange(2) if left == right or random.random() < exploration else int(right > left)
            following = max(0, cell + (1 if move else -1))
            transitions.append((cell, move, float(following == 7), following))
            cell = 0 if following == 7 else following
        return transitions


class Learner(Worker):
    table: list[list[float]] = [[0.0, 0.0]] * 8

    def values(self) -> list[list[float]]:
        return self.table

    def learn(self, transitions: list[Transition]) -> dict[str, float]:
        values, errors = [list(row) for row in self.table], []
        for cell, move, reward, following in transitions:
            errors.append(reward + 0.9 * max(values[following]) - values[cell][move])
            values[cell][move] += 0.1 * errors[-1]
        self.table = values
        return {"train/loss": sum(error * error for error in errors) / len(errors)}

    def save(self, folder: Path) -> None:
        (folder / "values.json").write_text(json.dumps(self.table))

    def load(self, folder: Path) -> None:
        self.table = json.loads((folder / "values.json").read_text())


class LineLoop(Runner):
    def walk(self, moves: int, exploration: float, seed: int) -> list[Transition]:
        values = self.groups["learner"].values().wait()[0]
        walks = self.groups["walker"].walk(values, moves, exploration, seed).wait()
        return [transition for walk in walks for transition in walk]

    def train_step(self, step: int) -> dict[str, float]:
        with self.phase(step, "walk"):
            transitions = self.walk(self.cfg.moves, self.cfg.exploration, step)
        with self.phase(step, "learn"):
            return self.groups["learner"].learn(transitions).wait()[0]

    def evaluate_policy(self, step: int) -> dict[str, float]:
        return {"eval/return": sum(reward for _, _, reward, _ in self.walk(70, 0.0, step))}

    def write_checkpoint(self, folder: Path) -> None:
        self.groups["learner"].save(folder).wait()

    def read_checkpoint(self, folder: Path) -> None:
        self.groups["learner"].load(folder).wait()


CONFIG = """
cluster:
  num_nodes: 1
  component_placement: {walker: {node_group: node, placement: '0:0-1'}, learner: {node_group: node, placement: 0}}
runner: {max_steps: 12, val_check_interval: 6, save_interval: 6}
"""
program = runner_program(LineLoop, {"walker": Walker, "learner": Learner})
recipe = Recipe("line", "Q-learning on a line of eight cells", LineConfig, CONFIG, program)
