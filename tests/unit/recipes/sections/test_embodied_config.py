"""Files of the recipes embodied and agent: what does not fit together is found before anything runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from recipes.agent.harbor.grading import write_checks
from recipes.agent.harbor.task_folder import read_task
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.embodied_config import batch_sizes
from recipes.embodied.config.env_config import stepping
from recipes.embodied.config.model_config import policy_model
from recipes.sections.algorithm import refuse_unknown_options
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import ConfigError
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.job.load import load_job
from tests.known import known
from tests.unit.recipes.agent.harbor.made_tasks import double_task, fit, greeting_task

AGENT = (
    "recipe: agent\ncluster:\n  num_nodes: 1\n  component_placement:\n"
    "    actor,rollout,reward,agent: {node_group: node, placement: 0}\n"
)


def codes(findings: Any, text: str) -> list[str]:
    return [finding[0] for finding in findings(text)]


def without_effect(text: str) -> list[str]:
    """Return the keys of a file that have none."""
    diagnostics = load_with_lint("-", stdin=text.encode()).diagnostics
    return [one.message.partition(" ")[0] for one in diagnostics if one.code == "no-effect"]


def test_mcp_servers(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = AGENT + "agent:\n  mcp:\n    files: {command: [python3, server.py], env: {ROOT: /data}}\n"
    monkeypatch.setattr("recipes.sections.imports.missing_modules", lambda names: [])
    assert findings(servers) == findings(servers.replace("[python3, server.py]", "python3")) == []
    (diagnostic,) = findings(servers.replace("python3", "no-such-program"), messages=True)
    assert (diagnostic[0], "`no-such-program` does not exist" in diagnostic[2]) == ("unusable-path", True)
    assert codes(findings, servers.replace("command: [python3, server.py], ", "")) == ["missing-key"]
    assert codes(findings, servers.replace("[python3, server.py]", "[]")) == ["bad-value"]
    monkeypatch.setattr("recipes.sections.imports.missing_modules", list)
    assert findings(servers)[0][0] == "missing-extra"


def test_environments_are_played_from_seeds(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    played = AGENT + "agent:\n  run: env_agent\n  environment: {}\ndata:\n  type: episodes\n"
    assert findings(played) == []
    for text in (AGENT + "data:\n  type: episodes\n", AGENT + "agent:\n  run: env_agent\n"):
        assert codes(findings, text) == ["conflicting-settings"]
    monkeypatch.setattr("recipes.sections.imports.missing_modules", lambda names: [])
    for kind, whole in (
        ("openenv", "openenv, options: {url: 'http://127.0.0.1:8000'}"),
        ("verifiers", "verifiers, options: {taskset: textarena, game: Wordle-v0}"),
    ):
        text = played.replace("{}", f"{{type: {kind}}}")
        assert [finding[:2] for finding in findings(text)] == [("missing-key", "environment")]
        assert findings(text.replace(kind, whole)) == []
    monkeypatch.setattr("recipes.sections.imports.missing_modules", lambda names: [*{"verifiers"} & {*names}])
    assert codes(findings, played.replace("{}", "{type: verifiers, options: {taskset: words}}")) == ["missing-extra"]
    assert codes(findings, played.replace("{}", "{type: chess}")) == ["unknown-choice"]
    assert codes(findings, played.replace("{}", "{type: 'no.such:Game'}")) == ["missing-extra"]


def test_keys_that_environments_and_harnesses_do_not_read(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = AGENT + "agent: {tools: [], tool_timeout: 30, run: env_agent, environment: %s}\ndata: {type: episodes}\n"
    tasks, terminus = "{type: harbor, options: {path: no/such/folder%s}}", ", harness: terminus-2, max_turns: 3"
    monkeypatch.setattr("recipes.agent.agent_rules.missing_modules", list)
    assert codes(findings, text % (tasks % terminus)) == ["unusable-path", "missing-extra"]
    for environment, keys in (
        ("{type: treasure}", ["`tools`", "`tool_timeout`"]),
        (tasks % "", ["`tools`"]),  # in boxes a time limit of commands counts
        (tasks % terminus, ["`tools`", "`tool_timeout`"]),
        (tasks % ", max_turns: 3", ["`tools`", "`max_turns`"]),
    ):
        assert without_effect(text % environment) == keys
    assert codes(findings, text % (tasks % ", box_folde: a")) == ["unusable-path", "unknown-key"]
    formats = "agent: {tool_timeout: 30, tool_format: plain, run: env_agent, environment: %s}\n"
    text = AGENT + formats + "data: {type: episodes, apply_chat_template: true, system_prompt: Be brief.}\n"
    assert without_effect(text % (tasks % "")) == []
    unread = ["`system_prompt`", "`tool_format`", "`tool_timeout`"]
    assert sorted(without_effect(text % (tasks % ", harness: terminus-2"))) == unread


def test_a_task_that_no_box_may_hold_is_named(findings: Any, tmp_path: Path) -> None:
    folders = (greeting_task(tmp_path), double_task(tmp_path))
    write_checks(tmp_path, [fit(read_task(folder)) for folder in folders])
    environment = "{type: harbor, options: {path: %s, box_memory_mib: %d}}"
    text = AGENT + f"agent: {{run: env_agent, environment: {environment}}}\ndata: {{type: episodes}}\n"
    assert findings(text % (tmp_path, 256)) == []
    ((code, _, message, help),) = findings(text % (tmp_path, 255), messages=True)
    assert code == "conflicting-settings"
    assert message.endswith("needs 256 MiB, and all boxes of a node may have 255 MiB")
    assert help.startswith("raise it to 256 at least")


def test_python_needs_bubblewrap(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = AGENT + "agent:\n  tools: [calculator, python]\n"
    monkeypatch.setattr("recipes.agent.agent_rules.shutil.which", lambda name: f"/usr/bin/{name}")
    assert findings(programs) == []
    monkeypatch.setattr("recipes.agent.agent_rules.shutil.which", lambda name: None)
    diagnostics = findings(programs, messages=True)
    assert [(diagnostic[0], diagnostic[1], diagnostic[3]) for diagnostic in diagnostics] == [
        ("missing-extra", "python", "run `apt install bubblewrap`")
    ]


def test_tools_of_one_name_are_found_before_a_job_starts(findings: Any) -> None:
    text = AGENT + "agent:\n  tools: [calculator, 'json:loads', 'pickle:%s']\n"
    assert findings(text % "dumps") == []
    ((code, _, message, _),) = findings(text % "loads", messages=True)
    assert (code, message) == ("conflicting-settings", "two tools are named `loads`")


@pytest.mark.parametrize("setting", ["run: 'json.decoder:JSONDecoder'", "tools: ['json.decoder:JSONDecoder']"])
def test_a_class_as_an_agent_or_a_tool_is_found_before_a_start(findings: Any, setting: str) -> None:
    ((code, _, message, help),) = findings(f"{AGENT}agent:\n  {setting}\n", messages=True)
    assert (code, message) == ("unknown-choice", "`json.decoder:JSONDecoder` is a class, not a function")
    assert help == "name a function"


def test_doctor_tries_the_sandbox_where_programs_are_run() -> None:
    def tried(tools: str) -> list[Any]:
        trials = (recipe := find_recipe("agent")).load(recipe.trials)
        return known(trials)(load_job("-", stdin=f"{AGENT}agent:\n  tools: [{tools}]\n".encode()).config)

    assert tried("calculator") == []
    (result,) = tried("calculator, python")
    assert result[:3] == ("agent", "sandbox", "recipes.language.sandbox.sandbox")


NODE = "{node_group: node, placement: 0}"
LAPTOP = f"recipe: embodied\ncluster:\n  num_nodes: 1\n  component_placement:\n    actor,rollout,env: {NODE}\n"


def test_checking_a_file_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rlinf_core.job.load import load_job; assert load_job('embodied/pick-laptop', environ={}).ok;"
        "print([name for name in ('ray', 'torch', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_evaluation_takes_what_its_kind_has() -> None:
    train = "train: {env_type: metaworld, task: reach-v3, num_processes: 3, options: {goal_seed: 4}}"

    def env_of(text: str) -> Any:
        return cast("EmbodiedConfig", load_job("-", stdin=(LAPTOP + text).encode(), environ={}).config).env

    env = env_of(f"env: {{{train}, eval: {{env_type: franka_vision}}}}\n")
    assert (env.eval.task, env.eval.options, stepping(env.train).num_processes) == (None, {}, 3)
    env = env_of(f"env: {{{train}}}\n")
    assert (env.eval.env_type, env.eval.task) == ("metaworld", "reach-v3")
    assert (env.eval.options, stepping(env.eval).num_processes) == ({"goal_seed": 4}, 3)


def test_the_section_of_a_saved_policy_is_read_whatever_wrote_it() -> None:
    earlier = {"model_type": "flow_policy", "is_lora": False, "lora_rank": 32, "lora": None, "options": {"steps": 3}}
    section = policy_model(earlier)
    assert (section.model_type, section.options, section.adapter()) == ("flow_policy", {"steps": 3}, None)
    adapted = policy_model({"model_type": "pi0", "lora": {"rank": 2}}).adapter()
    assert known(adapted).rank == 2
    with pytest.raises(ValidationError, match="lora"):
        policy_model({"model_type": "flow_policy", "is_lora": True})


class TestKinds:
    def test_a_missing_task(self, findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        assert findings(LAPTOP + "env:\n  train:\n    env_type: gymnasium\n") == [("missing-task", "gymnasium")]

    @pytest.mark.parametrize(
        ("extra", "what"),
        [
            ((), "evaluation"),
            (("runner.val_check_interval=-1",), None),
            (("runner.val_check_interval=-1", "env.train.auto_reset=false"), "pass"),
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
        env = load_job(
            "embodied/pick-laptop", (f"env.train.env_type={task}", "env.train.task=null"), environ={}
        ).config.env
        assert {(env.train.env_type, env.train.task), (env.eval.env_type, env.eval.task)} == {("gymnasium", task)}
        other = (f"env.eval.env_type={task}", "env.eval.task=null")
        assert load_job("embodied/pick-laptop", other, environ={}).config.env.eval.task == task


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
    job = load_job("embodied/pick-laptop", [f"env.train.total_num_envs={envs}"], environ={})
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


PRECISIONS = ("model.precision", *(f"fsdp_config.mixed_precision.{name}_dtype" for name in ("reduce", "param")))


@pytest.mark.parametrize(
    ("file", "keys"),
    [("embodied/pick-laptop", PRECISIONS), ("sft/pick-laptop", PRECISIONS), ("math/sums-laptop", PRECISIONS[:2])],
)
def test_half_precision_whose_gradients_would_vanish_is_refused(file: str, keys: tuple[str, ...]) -> None:
    def refused(*arguments: str) -> list[tuple[str, str | None]]:
        diagnostics = load_job(file, arguments, environ={}).diagnostics
        return [(item.code, item.help) for item in diagnostics if "would lose gradients" in item.message]

    for key in keys:
        assert refused(f"actor.{key}=fp16") == [("conflicting-settings", "write `bf16`, which has the range of fp32")]
        assert refused(f"actor.{key}=bf16") == []
        assert "sft" in file or refused(f"actor.{key}=fp16", "runner.only_eval=true") == []


PLACED = "cluster.component_placement"
ON_ALL = f"{PLACED}.rollout={{node_group: gpus, placement: 0-7}}"


@pytest.mark.parametrize(
    ("file", "overrides", "warned"),
    [
        ("embodied/libero-collocated-8gpu", ("runner.max_staleness=1",), True),
        ("embodied/libero-collocated-8gpu", (), False),
        (
            "embodied/libero-collocated-8gpu",
            ("runner.max_staleness=2", f"{PLACED}.rollout={{node_group: gpus, placement: 3}}"),
            True,
        ),
        ("embodied/libero-disaggregated-8gpu", (), False),
        ("embodied/libero-disaggregated-8gpu", (ON_ALL,), False),
        ("embodied/libero-disaggregated-8gpu", (ON_ALL, "actor.enable_offload=true"), True),
        ("math/async-80gpu", (), False),
        ("math/async-80gpu", (f"{PLACED}.rollout=all", f"{PLACED}.actor=all"), True),
    ],
)
def test_accelerators_that_hold_both_sides_at_once_are_named(
    file: str, overrides: tuple[str, ...], warned: bool
) -> None:
    messages = [str(finding.message) for finding in load_job(file, overrides).diagnostics]
    assert any("must hold both" in message for message in messages) == warned
