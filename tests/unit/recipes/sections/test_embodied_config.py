"""The embodied recipe's file: what does not fit together is found before anything runs."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.batch_sizes import batch_sizes
from recipes.embodied.config.env_config import stepping
from recipes.embodied.config.model_config import policy_model
from recipes.sections.algorithm import refuse_unknown_options
from rlinf_core import ConfigError
from rlinf_core.job.load import load_job

NODE = "{node_group: node, placement: 0}"
LAPTOP = f"recipe: embodied\ncluster:\n  num_nodes: 1\n  component_placement:\n    actor,rollout,env: {NODE}\n"


def test_checking_a_file_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rlinf_core.job.load import load_job; assert load_job('laptop', environ={}).ok;"
        "print([name for name in ('ray', 'torch', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


VISION = ("env.train.env_type=franka_vision", "env.train.task=touch")


@pytest.mark.parametrize(
    "overrides",
    [
        ("env.train.env_type=null",),
        (*VISION, "env.eval.options={points: 3}"),
        ("env.train.env_type='nowhere:Env'", "env.train.options={anything: [1]}", "env.eval.options={other: 2}"),
        # What the file below says to another kind goes with it.
        ("env.train.env_type=franka_kin", "env.train.task=reach"),
        ("env.eval.env_type=franka_kin", "env.eval.task=reach"),
    ],
)
def test_a_kind_of_environments_takes_its_own_keys(overrides: tuple[str, ...], tmp_path: Path) -> None:
    seen = "env:\n  train: {env_type: franka_vision, options: {points: 3}}\n  eval: {options: {points: 4}}\n"
    file = tmp_path / "job.yaml"
    file.write_text(LAPTOP + (seen if overrides[0].endswith("franka_kin") else ""))
    job = load_job(str(file), overrides, environ={})
    assert [finding.code for finding in job.diagnostics if finding.code == "unknown-key"] == []


def test_an_evaluation_takes_what_its_kind_has(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    train = "train: {env_type: metaworld, task: reach-v3, num_processes: 3, options: {goal_seed: 4}}"
    file.write_text(f"{LAPTOP}env: {{{train}, eval: {{env_type: franka_vision}}}}\n")
    config = cast("EmbodiedConfig", load_job(str(file), environ={}).config)
    assert (config.env.eval.task, config.env.eval.options) == (None, {})
    assert stepping(config.env.train).num_processes == 3
    file.write_text(f"{LAPTOP}env: {{{train}}}\n")
    config = cast("EmbodiedConfig", load_job(str(file), environ={}).config)
    assert (config.env.eval.env_type, config.env.eval.task) == ("metaworld", "reach-v3")
    assert (config.env.eval.options, stepping(config.env.eval).num_processes) == ({"goal_seed": 4}, 3)


@pytest.mark.parametrize(
    "text",
    [
        "{is_lora: false, lora: null, lora_rank: 32}",
        "{model_type: null}",
        "{model_type: 'planted_loss:Policy', options: {a: [1]}, is_lora: true}",
    ],
)
def test_a_policy_takes_what_says_nothing(text: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"{LAPTOP}actor:\n  model: {text}\n")
    assert not [finding for finding in load_job(str(file), environ={}).diagnostics if finding.code == "unknown-key"]


def test_the_section_of_a_saved_policy_is_read_whatever_wrote_it() -> None:
    earlier = {"model_type": "flow_policy", "is_lora": False, "lora_rank": 32, "lora": None, "options": {"steps": 3}}
    section = policy_model(earlier)
    assert (section.model_type, section.options, section.adapter()) == ("flow_policy", {"steps": 3}, None)
    adapted = policy_model({"model_type": "pi0", "lora": {"rank": 2}}).adapter()
    assert adapted is not None
    assert adapted.rank == 2
    with pytest.raises(ValidationError, match="is_lora"):
        policy_model({"model_type": "flow_policy", "is_lora": True})


def test_a_configuration_survives_being_sent() -> None:
    config = load_job("laptop", environ={}).config
    assert pickle.loads(pickle.dumps(config)) == config


class TestKinds:
    def test_a_missing_task(self, findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        assert findings(LAPTOP + "env:\n  train:\n    env_type: gymnasium\n") == [("missing-task", "gymnasium")]

    @pytest.mark.parametrize(
        ("extra", "what"),
        [
            ((), "evaluation"),
            (("runner.val_check_interval=-1",), None),
            (("runner.val_check_interval=-1", "env.train.reset_each_pass=true"), "pass"),
        ],
    )
    def test_episodes_without_a_limit(
        self, findings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...], what: str | None
    ) -> None:
        (tmp_path / "endless_slide.py").write_text(
            "import gymnasium\n\n\n"
            "class Slide(gymnasium.Env):\n"
            "    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (1,))\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        gymnasium = pytest.importorskip("gymnasium")
        gymnasium.register("EndlessSlide-v0", entry_point="endless_slide:Slide")
        text = LAPTOP + "env:\n  train: {env_type: gymnasium, task: EndlessSlide-v0}\n"
        messages = [finding[2] for finding in findings(text, *extra, messages=True)]
        assert [message.rpartition(": ")[2] for message in messages] == ([f"no {what} could end them"] if what else [])
        assert findings(text, *extra, "env.train.max_episode_steps=9") == []
        del gymnasium.registry["EndlessSlide-v0"]

    def test_a_missing_package(self, findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        task = "env:\n  train:\n    env_type: panda_gym\n    task: PandaReach-v3\n"
        diagnostics = findings(LAPTOP + task, messages=True)
        assert [diagnostic[:2] for diagnostic in diagnostics] == [("missing-extra", "panda_gym")]
        assert diagnostics[0][3].startswith(f"run `{sys.executable} -m pip install 'panda-gym>=3.0.7,<4'`")
        elsewhere = LAPTOP.replace("  component_placement", "  hosts: [trainer]\n  component_placement")
        self.is_left_to_the_run(findings(elsewhere + task, messages=True))
        own = (
            "  node_groups:\n    - label: sim\n      node_ranks: 0\n      env_configs:\n"
            "        - {node_ranks: 0, python_interpreter_path: /opt/sim/bin/python}\n"
        )
        # Nobody is placed through that group: the env's workers run with this interpreter all the same.
        assert ("missing-extra", "panda_gym") in findings(LAPTOP + own + task)
        own = own.replace("node_ranks: 0\n", "node_ranks: 0\n      ignore_hardware: true\n", 1)
        placed = LAPTOP.replace(NODE, "{node_group: sim, placement: 0}")
        self.is_left_to_the_run(findings(placed + own + task, messages=True))

    def is_left_to_the_run(self, actual: list[tuple[str, str, str, str]]) -> None:
        ((code, _, message, _),) = actual
        assert code == "missing-extra"
        assert message == "`PandaReach-v3` cannot be checked here: `env` runs in another interpreter"


class TestImports:
    """What the file names outside rlinf is looked for before a run starts."""

    def test_what_can_be_is_not_imported(self, findings: Any) -> None:
        assert findings(LAPTOP + "env: {train: {env_type: 'pexpect.popen_spawn:PopenSpawn'}}\n") == []
        assert "pexpect.popen_spawn" not in sys.modules

    @pytest.mark.parametrize("task", ["CartPole-v1", "own_ids:Slide-v3", "phys2d/CartPole-v1"])
    def test_an_id_is_an_env_type(self, task: str) -> None:
        env = load_job("laptop", (f"env.train.env_type={task}", "env.train.task=null"), environ={}).config.env
        assert {(env.train.env_type, env.train.task), (env.eval.env_type, env.eval.task)} == {("gymnasium", task)}
        other = (f"env.eval.env_type={task}", "env.eval.task=null")
        assert load_job("laptop", other, environ={}).config.env.eval.task == task


class TestManyActorsAndFewArms:
    """The documented file and `hetero18` are trained as they stand."""

    ROBOT = ("env.train.env_type=franka_robot",)
    # Of the agents, which share the nodes of the actor.
    NOTES = frozenset(("unused-component", "accelerators-not-reserved", "env-configs-unused"))

    @pytest.fixture(params=["config.md", "hetero18"])
    def text(self, request: pytest.FixtureRequest) -> str:
        root = Path(__file__).parents[4]
        if request.param == "hetero18":
            return (root / "configs" / "hetero18.yaml").read_text(encoding="utf-8")
        return (root / "docs" / "config.md").read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]

    def test_with_the_arms(self, findings: Any, text: str) -> None:
        arms = 2 if "agent" in text else 1
        robot = (*self.ROBOT, f"env.train.total_num_envs={arms}")
        assert {diagnostic[0] for diagnostic in findings(f"recipe: embodied\n{text}", *robot)} <= self.NOTES

    def test_robots_that_nothing_uses_are_a_warning(self, findings: Any, text: str) -> None:
        diagnostics = findings(f"recipe: embodied\n{text}", messages=True)
        (warned,) = [diagnostic for diagnostic in diagnostics if diagnostic[0] not in self.NOTES]
        assert warned[0] == "unused-robots"
        assert warned[2] == "`env` is placed on the robots of `franka`, but `env_type: franka_kin` uses none"
        assert "env_type: franka_robot" in warned[3]


@pytest.mark.parametrize(
    ("actors", "envs", "expected"), [(1, 64, (800, 800)), (8, 1, (2, 2)), (64, 2, (1, 1)), (64, 64, (10, 10))]
)
def test_a_batch_size_that_is_left_out_is_about_a_quarter(actors: int, envs: int, expected: tuple[int, int]) -> None:
    job = load_job("laptop", ["~actor.global_batch_size", f"env.train.total_num_envs={envs}"], environ={})
    assert batch_sizes(cast("EmbodiedConfig", job.config), actors) == expected


class TestOptions:
    OWN = "tests.unit.algorithms.test_formulas"

    def text(self, options: str, loss: str = "cispo") -> str:
        return f"{LAPTOP}algorithm:\n  loss_type: {self.OWN}:{loss}\n  options: {options}\n"

    def test_those_that_it_refuses_are_left_to_the_workers(self, findings: Any) -> None:
        wrong = {"largest_weight": 1, "largest_wieght": 2}
        assert findings(self.text(str(wrong))) == []
        names = {"adv_type": "gae", "loss_type": f"{self.OWN}:cispo"}
        with pytest.raises(ConfigError, match=r"unknown options: `algorithm.options.largest_wieght`"):
            refuse_unknown_options(wrong, names, "algorithm.options")
        refuse_unknown_options({"largest_weight": 1}, names, "algorithm.options")
        refuse_unknown_options(wrong, {"loss_type": f"{self.OWN}:plain"}, "algorithm.options")

    def test_an_owner_is_not_imported(self, findings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "planted_loss.py").write_text(
            "def cispo(): ...\nclass Policy: ...\nraise SystemExit('this was imported')\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        assert findings(self.text("{a: 1}").replace(self.OWN, "planted_loss")) == []
        policy = "actor:\n  model: {model_type: 'planted_loss:Policy', options: {a: 1}}\n"
        assert findings(f"{LAPTOP}{policy}") == []
        assert "planted_loss" not in sys.modules


@pytest.mark.parametrize(
    "key",
    [
        "actor.model.precision",
        "actor.fsdp_config.mixed_precision.param_dtype",
        "actor.fsdp_config.mixed_precision.reduce_dtype",
    ],
)
def test_half_precision_whose_gradients_would_vanish_is_refused(key: str) -> None:
    def refused(*arguments: str) -> list[str]:
        diagnostics = load_job("laptop", arguments, environ={}).diagnostics
        return [diagnostic.help for diagnostic in diagnostics if "would lose gradients" in diagnostic.message]

    assert refused(f"{key}=fp16") == ["write `bf16`, which has the range of fp32"]
    assert refused(f"{key}=bf16") == []
    assert refused(f"{key}=fp16", "runner.only_eval=true") == []


def test_a_run_that_only_evaluates_has_no_passes_to_divide() -> None:
    chunks = ("actor.model.num_action_chunks=4", "actor.global_batch_size=null")
    for evaluating, refused in (((), True), (("runner.only_eval=true",), False)):
        codes = [finding.code for finding in load_job("laptop", (*chunks, *evaluating), environ={}).diagnostics]
        assert ("envs-not-divisible" in codes) == refused
