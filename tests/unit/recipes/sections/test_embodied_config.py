"""The embodied recipe's file: what does not fit together is found before anything runs."""

from __future__ import annotations

import importlib.util
import pickle
import re
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
# 8 ranks of each component, whatever the machine.
EIGHT = LAPTOP.replace("placement: 0", "placement: '0:0-7'")


def test_a_cluster_is_enough(findings: Any) -> None:
    assert findings(LAPTOP) == []
    assert findings(EIGHT) == []


def test_checking_a_file_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rlinf_core.job.load import load_job; assert load_job('laptop', environ={}).ok;"
        "print([name for name in ('ray', 'torch', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


VISION = ("env.train.env_type=franka_vision", "env.train.task=touch")


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (("env.train.options={size: 3}",), "unknown-key", "unknown key `size` in `env.train.options`"),
        ((*VISION, "env.train.options={point: 3}"), "unknown-key", "did you mean `points`?"),
        ((*VISION, "env.train.options={points: 5}"), "bad-value", "must be at most 4"),
        ((*VISION, "env.train.options={points: true}"), "wrong-type", "expected an integer"),
        ((*VISION, "env.train.options={mirrored: true}"), "unknown-key", "it is a key of `env_type` `libero`, not of"),
        ((*VISION, "env.train.num_processes=2"), "unknown-key", "`metaworld`, `robosuite` and `gymnasium_robotics`"),
        ((*VISION, "env.train.image_size=64"), "unknown-key", "`image_size` belongs in `env.train.options`"),
        # An evaluation has the kind of training where it names none.
        ((*VISION, "env.eval.options={mirrored: true}"), "unknown-key", "not of `franka_vision`"),
        (
            ("env.train.env_type=franka_visio", "env.train.task=touch"),
            "unknown-choice",
            "did you mean `franka_vision`?",
        ),
        (("env.train.env_type=4", "env.train.options={size: 3}"), "unknown-choice", "unknown env_type `4`"),
    ],
)
def test_options_of_our_environments_are_checked(
    findings: Any, overrides: tuple[str, ...], code: str, words: str
) -> None:
    ((reported, _, *texts),) = findings(LAPTOP, *overrides, messages=True)
    assert reported == code
    assert words in " ".join(texts)


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
    ("overrides", "code", "words"),
    [
        (
            ("actor.model.is_lora=true",),
            "unknown-key",
            "`model_type` `openvla`, `openvla_oft`, `pi0`, `pi05`, `smolvla` and",
        ),
        (("actor.model.options.noisy_steps=one",), "unknown-key", "`flow_policy`, `pi0`, `pi05` and `smolvla`, not of"),
        (("actor.model={model_type: flow_policy, options: {step: 3}}",), "unknown-key", "did you mean `steps`?"),
        (("actor.model={model_type: flow_policy, options: {steps: 0}}",), "bad-value", "must be at least 1"),
        (
            ("actor.model={model_type: flow_polcy, options: {steps: 3}}",),
            "unknown-choice",
            "did you mean `flow_policy`?",
        ),
        # Whose keys these are is not known: the name is told alone.
        (("actor.model={model_type: 4, options: {steps: 3}}",), "unknown-choice", "unknown model_type `4`"),
        (("actor.model={model_type: qwerty, options: {x: 3}}",), "unknown-choice", "unknown model_type `qwerty`"),
    ],
)
def test_a_policy_has_the_keys_of_its_kind(findings: Any, overrides: tuple[str, ...], code: str, words: str) -> None:
    ((reported, _, *texts),) = findings(LAPTOP, *overrides, messages=True)
    assert reported == code
    assert words in " ".join(texts)


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


def test_a_former_environment_is_refused_with_the_present_one(findings: Any) -> None:
    ((code, *_, help),) = findings(LAPTOP, "env.train.env_type=gymnasium_vector", messages=True)
    assert (code, "write `env_type: gymnasium`" in help) == ("unknown-choice", True)


def test_a_key_of_another_section_is_named_with_the_known_ones(findings: Any) -> None:
    ((code, _, _, help),) = findings(LAPTOP, "runner.seed=2", messages=True)
    assert code == "unknown-key"
    assert help.startswith("known keys: ")
    assert help.endswith("; `actor` has a key `seed`")


class TestComponents:
    def test_a_missing_one(self, findings: Any) -> None:
        text = LAPTOP.replace("actor,rollout,env", "actor,rollout")
        assert findings(text, messages=True) == [
            (
                "missing-component",
                "component_placement",
                "recipe `embodied` needs a placement for `env`",
                "add `env: {node_group: node, placement: 0}`",
            )
        ]

    def test_help_writes_no_group_where_the_file_has_none(self, findings: Any) -> None:
        text = LAPTOP.replace(f"actor,rollout,env: {NODE}", "actor,rollout: 0")
        diagnostics = findings(text, messages=True)
        assert [diagnostic[3] for diagnostic in diagnostics if diagnostic[0] == "missing-component"] == ["add `env: 0`"]

    def test_a_mistyped_one(self, findings: Any) -> None:
        diagnostics = findings(LAPTOP.replace("env:", "evn:"), messages=True)
        assert [diagnostic[0] for diagnostic in diagnostics] == ["missing-component", "unused-component"]
        assert diagnostics[1][3] == "did you mean `env`?"

    def test_one_that_nobody_runs(self, findings: Any) -> None:
        diagnostics = findings(LAPTOP + f"    agent: {NODE}\n", messages=True)
        assert [(code, text, help) for code, text, _, help in diagnostics] == [
            ("unused-component", "agent", "its components are `actor`, `rollout`, `env`")
        ]


REMOVE = "or remove it: a batch is then about a quarter of a step's samples"


class TestBatches:
    def test_a_batch_and_its_micro_batches(self, findings: Any) -> None:
        diagnostics = findings(EIGHT + "actor:\n  global_batch_size: 800\n  micro_batch_size: 30\n", messages=True)
        assert diagnostics == [
            (
                "batch-not-divisible",
                "30",
                "`actor.global_batch_size` does not divide evenly: 800 / (micro_batch_size 30 x 8 ranks = 240)"
                " = 3.33333",
                # No batch is whole micro batches of 30 on 8 ranks and divides 3200.
                f"nearest valid `actor.global_batch_size`: 640 or 800, without `actor.micro_batch_size`; {REMOVE}",
            )
        ]

    def test_a_batch_and_its_ranks(self, findings: Any) -> None:
        text = (
            LAPTOP.replace("actor,rollout,env", "rollout,env") + "    actor: {node_group: node, placement: '0:0-2'}\n"
        )
        diagnostics = findings(text + "actor:\n  global_batch_size: 800\n", messages=True)
        message = "`actor.global_batch_size` does not divide evenly: 800 / 3 ranks = 266.667"
        help_text = f"3 actors cannot split 3200 samples evenly with a fixed batch size: {REMOVE[3:]}"
        assert diagnostics == [("batch-not-divisible", "800", message, help_text)]
        assert findings(text) == []

    def test_every_remedy_is_accepted(self, findings: Any) -> None:
        for actors, wanted in ((64, 800), (64, 768), (5, 777), (8, 3000)):
            place = f"    actor: {{node_group: node, placement: '0:0-{actors - 1}'}}\n"
            text = LAPTOP.replace("actor,rollout,env", "rollout,env") + place + "actor:\n  global_batch_size: "
            ((code, _, _, help_text),) = findings(f"{text}{wanted}\n", messages=True)
            assert code == "batch-not-divisible"
            sizes = re.findall(r"\d+", help_text.partition(";")[0])
            assert sizes
            for size in sizes:
                assert findings(f"{text}{size}\n") == []

    def test_the_samples_of_a_step(self, findings: Any) -> None:
        text = LAPTOP + "env:\n  train:\n    total_num_envs: 48\n    rollout_epoch: 2\n"
        diagnostics = findings(text + "actor:\n  global_batch_size: 900\n", messages=True)
        assert diagnostics == [
            (
                "batch-not-divisible",
                "900",
                "a step has total_num_envs 48 x max_steps_per_rollout_epoch 50 x rollout_epoch 2 = 4800 samples, not a"
                " multiple of `actor.global_batch_size` 900",
                f"nearest valid `actor.global_batch_size`: 800 or 960; {REMOVE}",
            )
        ]

    def test_the_key_that_was_written_is_underlined(self, findings: Any) -> None:
        text = LAPTOP + "env:\n  train:\n    max_steps_per_rollout_epoch: 51\n"
        assert findings(text) == []
        assert findings(text, "actor.global_batch_size=800") == [("batch-not-divisible", "800")]

    def test_a_value_that_is_wrong_already_is_not_judged_again(self, findings: Any) -> None:
        text = LAPTOP + "env:\n  train:\n    total_num_envs: many\nactor:\n  global_batch_size: 999\n"
        assert findings(text) == [("wrong-type", "many")]

    def test_what_dynamic_sampling_leaves_out_stays_in_the_batches(self, findings: Any) -> None:
        algorithm = "algorithm: {adv_type: grpo, loss_type: actor, group_size: 8, filter_rewards: true}\n"
        assert findings(LAPTOP + algorithm) == []
        text = LAPTOP + "actor:\n  global_batch_size: 999\n" + algorithm
        assert findings(text) == [("batch-not-divisible", "999")]

    def test_an_unknown_number_of_ranks_is_not_guessed(self, findings: Any) -> None:
        text = "recipe: embodied\ncluster:\n  num_nodes: 1\n  component_placement:\n    actor,rollout,env: all\n"
        assert findings(text) == [("accelerators-unknown", "actor")]


class TestEnvironments:
    @pytest.mark.parametrize("actors", [3, 6, 64, 100])
    def test_any_number_of_actors_shares_any_number_of_environments(self, findings: Any, actors: int) -> None:
        text = LAPTOP.replace("actor,rollout,env", "rollout,env")
        text += f"    actor: {{node_group: node, placement: '0:0-{actors - 1}'}}\n"
        assert findings(text) == []
        assert findings(text, "env.train.total_num_envs=1", "env.eval.total_num_envs=1") == []
        assert findings(text, "algorithm.group_size=8") == []

    def test_by_workers_and_stages(self, findings: Any) -> None:
        text = EIGHT + "rollout:\n  pipeline_stage_num: 3\n"
        diagnostics = findings(text, messages=True)
        assert diagnostics == [
            (
                "envs-not-divisible",
                "3",
                "`env.train.total_num_envs` does not divide evenly: 64 / (8 workers x pipeline_stage_num 3 = 24)"
                " = 2.66667",
                "nearest valid `env.train.total_num_envs`: 48 or 72",
            )
        ]

    def test_evaluations_too(self, findings: Any) -> None:
        diagnostics = findings(EIGHT + "env:\n  eval:\n    total_num_envs: 12\n", messages=True)
        assert [(diagnostic[0], diagnostic[1]) for diagnostic in diagnostics] == [("envs-not-divisible", "12")]
        assert "`env.eval.total_num_envs`" in diagnostics[0][2]

    def test_groups_stay_together(self, findings: Any) -> None:
        text = EIGHT + "algorithm:\n  adv_type: grpo\n  loss_type: actor\n  group_size: 16\n"
        diagnostics = findings(text, messages=True)
        assert [diagnostic[:2] for diagnostic in diagnostics] == [("groups-not-divisible", "16")]
        assert (
            "64 / (8 workers x pipeline_stage_num 1 = 8) = 8 environments, / group_size 16 = 0.5" in diagnostics[0][2]
        )
        assert diagnostics[0][3] == "nearest valid `env.train.total_num_envs`: 128"

    def test_chunks_fill_a_pass(self, findings: Any) -> None:
        assert findings(LAPTOP + "actor:\n  model:\n    num_action_chunks: 8\n") == [("envs-not-divisible", "8")]
        text = LAPTOP + "actor:\n  global_batch_size: 160\n  model:\n    num_action_chunks: 5\n"
        assert findings(text) == []


class TestKinds:
    def test_an_unknown_kind(self, findings: Any) -> None:
        diagnostics = findings(LAPTOP + "env:\n  train:\n    env_type: franka_kim\n", messages=True)
        assert [(diagnostic[0], diagnostic[1]) for diagnostic in diagnostics] == [("unknown-choice", "franka_kim")]
        assert diagnostics[0][3].startswith("did you mean `franka_kin`?")

    def test_an_unknown_task(self, findings: Any) -> None:
        diagnostics = findings(LAPTOP + "env:\n  train:\n    task: pikc\n", messages=True)
        assert diagnostics == [
            ("unknown-choice", "pikc", "`env_type: franka_kin` has no task `pikc`", "did you mean `pick`?")
        ]

    def test_an_evaluation_of_its_own_task(self, findings: Any) -> None:
        assert findings(LAPTOP + "env:\n  eval:\n    task: reach\n") == []
        assert findings(LAPTOP + "env:\n  eval:\n    task: push\n") == [("unknown-choice", "push")]

    def test_your_own(self, findings: Any) -> None:
        assert (
            findings(
                LAPTOP + "env:\n  train:\n    task: anything\n"
                "    env_type: recipes.embodied.envs.franka.franka_kin:FrankaKinEnv\n"
            )
            == []
        )

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

    def test_a_simulator_that_has_no_lock(self, findings: Any) -> None:
        diagnostics = findings(LAPTOP + "env:\n  train:\n    env_type: maniskill\n", messages=True)
        assert [(diagnostic[0], diagnostic[1]) for diagnostic in diagnostics] == [("missing-extra", "maniskill")]
        assert "pip install mani_skill" in diagnostics[0][3]

    def test_options_of_a_simulator_are_checked_without_it(self, findings: Any) -> None:
        text = "env:\n  train:\n    env_type: libero\n    options: {camras: [main], image_size: 4}\n"
        results = {diagnostic[0]: diagnostic for diagnostic in findings(LAPTOP + text, messages=True)}
        assert results.keys() == {"missing-extra", "bad-value", "unknown-key"}
        assert "rlinf venv setup libero" in results["missing-extra"][3]
        assert "must be at least 8" in results["bad-value"][2]
        assert results["unknown-key"][3] == "did you mean `cameras`?"

    def test_a_policy_on_images_needs_a_camera_of_the_simulator(self, findings: Any) -> None:
        text = (
            "actor: {model: {model_type: cnn_policy}}\nenv: {train: {env_type: metaworld, options: {cameras: [%s]}}}\n"
        )
        assert [diagnostic[0] for diagnostic in findings(LAPTOP + text % "wrist")] == ["missing-extra"]
        assert {diagnostic[0] for diagnostic in findings(LAPTOP + text % "")} == {
            "missing-extra",
            "conflicting-settings",
        }

    def test_videos_need_evaluations(self, findings: Any) -> None:
        text = LAPTOP + "env:\n  eval:\n    video_cfg:\n      save_video: true\n"
        assert findings(text) == []
        # The whole section has no effect, which is said once.
        assert findings(text + "runner:\n  val_check_interval: -1\n") == []


def test_a_checkpoint_to_start_from_is_there(findings: Any) -> None:
    assert findings(LAPTOP + "actor:\n  checkpoint_load_path: /runs/a\n") == [("unusable-path", "/runs/a")]


def test_a_weight_of_demonstrations_needs_some(findings: Any) -> None:
    assert findings(LAPTOP + "algorithm:\n  bc_weight: 0.5\n") == [("conflicting-settings", "0.5")]
    wanted = "algorithm:\n  bc_weight: 0.5\ndata:\n  train_data_paths: /no/such\n"
    assert findings(LAPTOP + wanted) == [("unusable-path", "/no/such")]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("actor:\n  fsdp_config:\n    gradient_checkpointing: true\n", "true"),
        ("actor:\n  tokenizer:\n    tokenizer_model: /models/vla\n", "tokenizer"),
        ("env:\n  enable_offload: true\n", "enable_offload"),
        ("algorithm:\n  kl_beta: 0.1\n", "kl_beta"),
    ],
)
def test_no_key_is_left_without_effect(findings: Any, text: str, value: str) -> None:
    assert findings(LAPTOP + text) == [("not-available", value)]


# It may be there where the actor will run.
NO_FOLDER = ("unusable-path", "/models/vla")


def test_a_model_of_your_own_is_told_where_weights_are(findings: Any) -> None:
    own = "recipes.embodied.models.small.feature_policy:MlpPolicy"
    model = f"actor: {{model: {{model_type: '{own}', model_path: /models/vla, is_lora: true, lora_rank: 8}}}}\n"
    assert findings(LAPTOP + model) == [NO_FOLDER]


ARMS = """\
recipe: embodied
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout: {node_group: node, placement: 0}
    env: {node_group: arms, placement: 0-1}
  node_groups:
    - label: arms
      node_ranks: 0
      hardware:
        type: Franka
        configs:
          - {node_rank: 0, robot_ip: 10.10.10.1}
          - {node_rank: 0, robot_ip: 10.10.10.2}
actor:
  global_batch_size: 100
env:
  train:
    env_type: franka_robot
    total_num_envs: 2
"""


class TestRobots:
    def test_one_environment_on_each_arm(self, findings: Any) -> None:
        assert findings(ARMS) == []

    def test_no_arm_where_env_is_placed(self, findings: Any) -> None:
        moved = ARMS.replace("{node_group: arms, placement: 0-1}", "{node_group: node, placement: '0:0-1'}")
        diagnostics = findings(moved, messages=True)
        values = {code: (text, message) for code, text, message, *_ in diagnostics}
        assert values.keys() == {"conflicting-settings", "idle-robots"}
        assert values["conflicting-settings"][0] == "franka_robot"
        assert "`env` is placed on `node`, which declares none" in values["conflicting-settings"][1]

    def test_more_environments_than_arms(self, findings: Any) -> None:
        diagnostics = findings(ARMS.replace("total_num_envs: 2", "total_num_envs: 4"), messages=True)
        assert [(diagnostic[0], diagnostic[1], diagnostic[3]) for diagnostic in diagnostics] == [
            ("conflicting-settings", "4", "write `total_num_envs: 2`")
        ]

    def test_stages_would_share_an_arm(self, findings: Any) -> None:
        diagnostics = findings(ARMS + "rollout:\n  pipeline_stage_num: 2\n")
        assert ("conflicting-settings", "2") in diagnostics


class TestConflicts:
    @pytest.mark.parametrize(
        ("sections", "underlined"),
        [
            ("algorithm:\n  loss_type: actor\n", "actor"),
            ("actor:\n  model:\n    add_value_head: false\n", "false"),
            (
                "algorithm:\n  adv_type: gae\n  loss_type: json:loads\nactor: {model: {add_value_head: false}}\n",
                "false",
            ),
            ("algorithm:\n  adv_type: grpo\n  group_size: 8\n", "grpo"),
            ("algorithm:\n  adv_type: grpo\n  loss_type: actor_critic\n  group_size: 8\n", "actor_critic"),
            ("algorithm:\n  adv_type: grpo\n  loss_type: actor\n", "grpo"),
            ("algorithm:\n  adv_type: reinforce_pp_baseline\n  loss_type: actor\n", "reinforce_pp_baseline"),
            ("algorithm:\n  filter_rewards: true\n", "true"),
            ("algorithm:\n  adv_type: grpo\n  loss_type: actor\n  group_size: 1\n", "1"),
            ("actor: {fsdp_config: {cpu_offload: true}}\n", "true"),
            ("actor:\n  group_name: G\nrollout:\n  group_name: G\n", "G"),
        ],
    )
    def test_two_settings_that_contradict(self, findings: Any, sections: str, underlined: str) -> None:
        assert findings(LAPTOP + sections) == [("conflicting-settings", underlined)]

    def test_shards_to_offload(self, findings: Any) -> None:
        assert findings(EIGHT + "actor: {fsdp_config: {cpu_offload: true}}\n") == []
        replicated = EIGHT + "actor: {fsdp_config: {cpu_offload: true, sharding_strategy: no_shard}}\n"
        assert findings(replicated) == [("conflicting-settings", "true")]

    def test_grpo_as_it_should_be(self, findings: Any) -> None:
        assert findings(LAPTOP + "algorithm:\n  adv_type: grpo\n  loss_type: actor\n  group_size: 8\n") == []


class TestPasses:
    """Episodes are continued by the next pass, or fit into one."""

    def test_continued_episodes_may_outlast_a_pass(self, findings: Any) -> None:
        assert findings(LAPTOP + "env:\n  train: {max_episode_steps: 500}\n") == []

    @pytest.mark.parametrize(
        "rest",
        [
            "env:\n  train: {max_episode_steps: 60, auto_reset: false}\n",
            "env:\n  train: {max_episode_steps: 60, reset_each_pass: true}\n",
            "env:\n  train: {max_episode_steps: 60}\nalgorithm: {adv_type: reinforce_pp, loss_type: actor}\n",
            "env:\n  train: {max_episode_steps: 60}\nalgorithm: {adv_type: grpo, loss_type: actor, group_size: 8}\n",
        ],
        ids=["rest", "told", "no values", "groups"],
    )
    def test_where_passes_reset_a_longer_episode_is_refused(self, findings: Any, rest: str) -> None:
        (diagnostics,) = findings(LAPTOP + rest, messages=True)
        assert (diagnostics[0], diagnostics[1]) == ("conflicting-settings", "60")
        assert "an episode has up to 60 steps, but a pass has 50" in diagnostics[2]
        assert diagnostics[3] == "write `max_steps_per_rollout_epoch: 60` or more, or `max_episode_steps: 50`"

    def test_the_limit_of_the_arm_counts_as_well(self, findings: Any) -> None:
        text = "env:\n  train: {max_steps_per_rollout_epoch: 25, auto_reset: false}\n"
        (diagnostics,) = findings(LAPTOP + text + "actor: {global_batch_size: 800}\n", messages=True)
        assert (diagnostics[0], diagnostics[1]) == ("conflicting-settings", "25")
        assert diagnostics[3] == "write `max_steps_per_rollout_epoch: 50` or more"

    @pytest.mark.parametrize(
        ("env", "algorithm", "why"),
        [
            ("auto_reset: false", "{}", "leaves an episode that ended"),
            ("seed: 8", "{adv_type: grpo, loss_type: actor, group_size: 8}", "compares episodes"),
            ("seed: 1", "{adv_type: reinforce_pp, loss_type: actor}", "has no values"),
        ],
    )
    def test_what_cannot_be_continued_is_refused(self, findings: Any, env: str, algorithm: str, why: str) -> None:
        text = f"env:\n  train: {{reset_each_pass: false, {env}}}\nalgorithm: {algorithm}\n"
        (diagnostics,) = findings(LAPTOP + text, messages=True)
        assert (diagnostics[0], diagnostics[1]) == ("conflicting-settings", "false")
        assert why in diagnostics[2]

    def test_the_limit_of_a_gymnasium_id_counts_as_well(self, findings: Any) -> None:
        pytest.importorskip("gymnasium")
        text = "env:\n  train: {env_type: gymnasium, task: CartPole-v1, reset_each_pass: true}\n"
        (diagnostics,) = findings(LAPTOP + text, messages=True)
        assert diagnostics[3] == "write `max_steps_per_rollout_epoch: 500` or more"


class TestImports:
    """What the file names outside rlinf is looked for before a run starts."""

    @pytest.mark.parametrize(
        ("text", "code", "value", "said"),
        [
            (
                "env: {train: {env_type: 'no_such.module:Env'}}",
                "missing-extra",
                "no_such.module:Env",
                "there is no module",
            ),
            ("env: {train: {env_type: 'no_such:Env'}}", "missing-extra", "no_such:Env", "there is no module `no_such`"),
            ("env: {train: {env_type: 'packaging:Env'}}", "unknown-choice", "packaging:Env", "defines no `Env`"),
            (
                "actor: {model: {model_type: 'packaging:Policy'}}",
                "unknown-choice",
                "packaging:Policy",
                "defines no `Policy`",
            ),
            ("algorithm: {adv_type: 'no_such:adv'}", "missing-extra", "no_such:adv", "there is no module"),
            ("algorithm: {loss_type: 'json:loss'}", "unknown-choice", "json:loss", "defines no `loss`"),
        ],
    )
    def test_what_cannot_be_imported(self, findings: Any, text: str, code: str, value: str, said: str) -> None:
        (diagnostics,) = findings(LAPTOP + text + "\n", messages=True)
        assert (diagnostics[0], diagnostics[1]) == (code, f"'{value}'")
        assert said in diagnostics[2]

    def test_what_can_be_is_not_imported(self, findings: Any) -> None:
        assert findings(LAPTOP + "env: {train: {env_type: 'pexpect.popen_spawn:PopenSpawn'}}\n") == []
        assert "pexpect.popen_spawn" not in sys.modules

    def test_in_another_interpreter_it_cannot_be_checked(self, findings: Any) -> None:
        text = LAPTOP.replace("cluster:\n", "cluster:\n  python_interpreter_path: /opt/sim/bin/python\n")
        notes = findings(text + "env: {train: {env_type: 'no_such:Env'}}\n", messages=True)
        assert ["cannot be checked here" in note[2] for note in notes if note[0] == "missing-extra"] == [True]

    def test_gymnasium_is_asked_for_its_ids(self, findings: Any) -> None:
        pytest.importorskip("gymnasium")
        text = "env: {{train: {{env_type: gymnasium, task: {}, options: {}}}}}\n"
        (diagnostics,) = findings(LAPTOP + text.format("CartPol-v1", "{}"), messages=True)
        assert (diagnostics[0], diagnostics[1]) == ("unknown-choice", "CartPol-v1")
        assert "CartPol" in diagnostics[2]
        (diagnostics,) = findings(LAPTOP + text.format("CartPole-v1", "{no_such: 1}"), messages=True)
        assert "no_such" in diagnostics[2]
        assert findings(LAPTOP + text.format("CartPole-v1", "{}")) == []

    @pytest.mark.parametrize("task", ["CartPole-v1", "own_ids:Slide-v3", "phys2d/CartPole-v1"])
    def test_an_id_is_an_env_type(self, task: str) -> None:
        env = load_job("laptop", (f"env.train.env_type={task}", "env.train.task=null"), environ={}).config.env
        assert {(env.train.env_type, env.train.task), (env.eval.env_type, env.eval.task)} == {("gymnasium", task)}
        other = (f"env.eval.env_type={task}", "env.eval.task=null")
        assert load_job("laptop", other, environ={}).config.env.eval.task == task

    def test_an_id_beside_another_task_is_refused(self, findings: Any) -> None:
        text = LAPTOP + "env: {train: {env_type: CartPole-v1, task: Acrobot-v1}}\n"
        assert ("conflicting-settings", "CartPole-v1") in findings(text)
        assert findings(text.replace("Acrobot", "CartPole")) == []

    @pytest.mark.parametrize(
        ("env", "where"),
        [("{env_type: franka_kin}", "franka_kin"), ("{env_type: gymnasium, task: CartPole-v1}", "CartPole-v1")],
    )
    def test_a_policy_on_images_needs_images(self, findings: Any, env: str, where: str) -> None:
        text = f"env: {{train: {env}}}\nactor: {{model: {{model_type: cnn_policy}}}}\n"
        (diagnostics,) = findings(LAPTOP + text, messages=True)
        assert (diagnostics[0], diagnostics[1]) == ("conflicting-settings", "cnn_policy")
        assert diagnostics[2] == f"`cnn_policy` needs images, but `{where}` has none"
        assert diagnostics[3] == "write `model_type: mlp_policy`"


class TestEvaluation:
    """`env.eval` is checked where something evaluates."""

    WRONG = LAPTOP + "env:\n  eval: {total_num_envs: 3, env_type: maniskill}\nrollout: {pipeline_stage_num: 2}\n"

    def test_it_is_judged_by_default(self, findings: Any) -> None:
        assert [code for code, _ in findings(self.WRONG)] == ["envs-not-divisible", "missing-extra"]

    def test_where_nothing_evaluates_it_is_not(self, findings: Any) -> None:
        assert findings(self.WRONG + "runner: {val_check_interval: -1}\n") == []
        assert len(findings(self.WRONG + "runner: {val_check_interval: -1, only_eval: true}\n")) == 2


def test_overrides_are_judged_like_the_file(findings: Any) -> None:
    assert findings(LAPTOP, "env.train.total_num_envs=63", "actor.global_batch_size=3150") == []
    sizes = ("actor.global_batch_size=800", "actor.micro_batch_size=300")
    assert findings(LAPTOP, *sizes) == [("batch-not-divisible", "300")]
    assert findings(LAPTOP, "env.train.totl_num_envs=63")[0][0].startswith("unknown")


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

    def test_those_that_the_model_of_their_owner_takes(self, findings: Any) -> None:
        assert findings(self.text("{largest_weight: 2}")) == []
        assert findings(self.text("{anything: 2}", "plain")) == []

    def test_those_that_it_refuses_are_left_to_the_workers(self, findings: Any) -> None:
        wrong = {"largest_weight": 1, "largest_wieght": 2}
        assert findings(self.text(str(wrong))) == []
        names = {"adv_type": "gae", "loss_type": f"{self.OWN}:cispo"}
        with pytest.raises(ConfigError, match=r"unknown options: `algorithm.options.largest_wieght`"):
            refuse_unknown_options(wrong, names, "algorithm.options")
        refuse_unknown_options({"largest_weight": 1}, names, "algorithm.options")
        refuse_unknown_options(wrong, {"loss_type": f"{self.OWN}:plain"}, "algorithm.options")

    def test_without_an_owner_they_have_no_effect(self, findings: Any) -> None:
        assert [diagnostic[0] for diagnostic in findings(LAPTOP, "actor.model.options.depth=3")] == ["unknown-key"]
        assert [diagnostic[0] for diagnostic in findings(LAPTOP, "algorithm.options.x=1")] == ["not-available"]

    def test_an_owner_that_is_not_there_is_told_once(self, findings: Any) -> None:
        text = self.text("{a: 1}").replace(self.OWN, "my_lab.elsewhere")
        ((code, _, message, _),) = findings(text, messages=True)
        assert code == "missing-extra"
        assert message.startswith("`my_lab.elsewhere:cispo` cannot be imported: ")

    def test_an_owner_is_not_imported(self, findings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "planted_loss.py").write_text("def cispo(): ...\nraise SystemExit('this was imported')\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert findings(self.text("{a: 1}").replace(self.OWN, "planted_loss")) == []
        policy = "actor:\n  model: {model_type: 'planted_loss:cispo', options: {a: 1}}\n"
        assert findings(f"{LAPTOP}{policy}") == []
        assert "planted_loss" not in sys.modules


class TestLearningRates:
    def test_one_that_falls_needs_an_end(self, findings: Any) -> None:
        falling = ("actor.optim.lr_scheduler=cosine", "runner.max_steps=-1")
        ((code, _, message, help_text),) = findings(LAPTOP, *falling, messages=True)
        assert (code, message) == (
            "conflicting-settings",
            "`lr_scheduler: cosine` decays until the last step, but this run has no last step",
        )
        assert "actor.optim.total_training_steps" in help_text
        assert findings(LAPTOP, *falling, "actor.optim.total_training_steps=40") == []

    def test_a_warmup_is_over_before_the_end(self, findings: Any) -> None:
        assert findings(LAPTOP, "actor.optim.lr_warmup_steps=20") == []
        ((code, _, message, _),) = findings(
            LAPTOP, "actor.optim.lr_warmup_steps=20", "runner.max_steps=20", messages=True
        )
        assert (code, message) == (
            "conflicting-settings",
            "`lr_warmup_steps: 20` does not end before the last of 20 steps",
        )

    def test_a_warmup_of_values_leaves_steps_for_the_policy(self, findings: Any) -> None:
        warmup = "algorithm.critic_warmup_steps=20"
        assert findings(LAPTOP, warmup, "runner.max_steps=21") == []
        assert findings(LAPTOP, warmup, "runner.max_steps=20") == [("cannot-train", "20")]
        assert findings(LAPTOP, warmup, "runner.max_steps=20", "runner.only_eval=true") == []
        own = (
            "algorithm.adv_type=grpo",
            "algorithm.group_size=8",
            "algorithm.loss_type=os:getcwd",
            "runner.max_steps=50",
        )
        assert findings(LAPTOP, warmup, *own) == []
        assert findings(LAPTOP, warmup, *own, "actor.model.add_value_head=false") == [("conflicting-settings", "20")]


def test_vision_language_policy_takes_adapters_and_options(findings: Any) -> None:
    model = """
actor:
  model:
    model_type: openvla
    model_path: /models/vla
    lora: {rank: 4}
    trainable: ["critic.*"]
    options: {max_prompt_tokens: %s}
  fsdp_config: {gradient_checkpointing: true}
env: {train: {env_type: franka_vision}}
"""
    assert findings(LAPTOP + model % 16) == [NO_FOLDER]
    assert findings(LAPTOP + model % 0) == [NO_FOLDER, ("bad-value", "0")]


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
