"""Codes of the stage `job`: the rules of the recipes that come with rlinf."""

from __future__ import annotations

from rlinf_core.config.codes.entry import Code, Example
from rlinf_core.config.diagnostics import Severity

_EMBODIED = "recipe: embodied\ncluster:\n  num_nodes: 1\n  component_placement:\n    "
_NODE = "{node_group: node, placement: 0}\n"
_WHOLE = f"{_EMBODIED}actor,rollout,env: {_NODE}"
_FOUR_ENVS = f"{_EMBODIED}actor,rollout: {_NODE}    env: {{node_group: node, placement: '0:0-3'}}\n"
_ROBOTS = (
    "recipe: embodied\ncluster:\n  num_nodes: 1\n  node_groups:\n    - label: arms\n      node_ranks: 0\n"
    "      hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: 10.0.0.1}]}\n  component_placement:\n"
    f"    actor,rollout: {_NODE}    env: {{node_group: arms, placement: 0}}\n"
)


def _error(name: str, title: str, meaning: str, wrong: str, right: str) -> Code:
    return Code(name, Severity.ERROR, title, meaning, Example(wrong), Example(right))


_COMPONENTS = (
    _error(
        "missing-component",
        "a component of the recipe has no place",
        "A recipe runs certain components, and `cluster.component_placement` says where each one sits. "
        "Several components may share a place: `actor,rollout,env: 0-7`.",
        f"recipe: embodied\ncluster:\n  num_nodes: 1\n  «component_placement»:\n    actor,rollout: {_NODE}",
        _WHOLE,
    ),
    Code(
        "unused-component",
        Severity.WARNING,
        "a component is placed that the recipe does not have",
        "Nothing will run there. The name is mistyped, or the entry was left from another recipe's file.",
        Example(f"{_EMBODIED}actor,rollout,env: {_NODE}    «agent»: {_NODE}"),
        Example(_WHOLE),
    ),
    Code(
        "unused-robots",
        Severity.WARNING,
        "environments are placed on robots and use none",
        "The processes of `env` are placed on a group that declares robots, and the kind of environment is a "
        "simulation: the robots stand still. `env.train.env_type` names the kind.",
        Example(_ROBOTS.replace("hardware:", "«hardware»:") + "env:\n  train:\n    env_type: franka_kin\n"),
        Example(_ROBOTS + "env:\n  train:\n    env_type: franka_robot\n    total_num_envs: 1\n"),
    ),
)

_SIZES = (
    _error(
        "batch-not-divisible",
        "batch sizes do not divide",
        "An optimizer step learns from `actor.global_batch_size` samples. They are split evenly over the actor's "
        "ranks, and on each rank into whole passes of `actor.micro_batch_size`; and the samples of a training step "
        "make whole batches. The message shows the arithmetic, the help the nearest sizes that fit all of that at "
        "once. Without the key a batch is about a quarter of the samples, whatever their number.",
        f"{_WHOLE}actor:\n  global_batch_size: 800\n  micro_batch_size: «300»\n",
        f"{_WHOLE}actor:\n  global_batch_size: 800\n  micro_batch_size: 200\n",
    ),
    _error(
        "envs-not-divisible",
        "environments or their steps do not divide",
        "Every env worker steps the same number of environments in each of its pipeline stages, so `total_num_envs` is "
        "a multiple of workers x `rollout.pipeline_stage_num`. A policy that gives several actions at once "
        "(`actor.model.num_action_chunks`) fills a pass with whole chunks.",
        f"{_FOUR_ENVS}env:\n  train:\n    total_num_envs: «62»\n  eval:\n    total_num_envs: 64\n"
        "actor:\n  global_batch_size: 775\n",
        f"{_FOUR_ENVS}env:\n  train:\n    total_num_envs: 64\n  eval:\n    total_num_envs: 64\n",
    ),
    _error(
        "groups-not-divisible",
        "environments do not make whole groups",
        "The members of a group start alike and are compared with each other, so they live in one worker and one "
        "pipeline stage: what each of those steps is a multiple of the group size.",
        f"{_FOUR_ENVS}algorithm:\n  adv_type: grpo\n  loss_type: actor\n  group_size: «12»\n",
        f"{_FOUR_ENVS}algorithm:\n  adv_type: grpo\n  loss_type: actor\n  group_size: 8\n",
    ),
)

_CHOICES = (
    _error(
        "unknown-choice",
        "nothing here has this name",
        "The key selects something by name: a kind of environment, a task, a policy, an advantage, a loss, a reward. "
        "The help names the near one or lists them. Something of your own is written `package.module:name`.",
        f"{_WHOLE}algorithm:\n  adv_type: «gea»\n",
        f"{_WHOLE}algorithm:\n  adv_type: gae\n",
    ),
    _error(
        "missing-task",
        "the kind of environment needs a task",
        "`env_type: gymnasium` and the adapters for other simulators stand for many environments; `task` is the id of "
        "the one that is meant, in the simulator's own words.",
        f"{_WHOLE}env:\n  train:\n    env_type: «gymnasium»\n",
        f"{_WHOLE}env:\n  train:\n    env_type: franka_kin\n    task: reach\n",
    ),
    _error(
        "missing-extra",
        "a package that the file needs is not installed",
        "Simulators and the services that metrics go to are optional. This one would run in the Python that checks the "
        "file, and is not there. Install it, or give the env's nodes an interpreter that has it "
        "(`python_interpreter_path` of their `env_configs`). For a cluster of other machines, and for other "
        "interpreters, this is checked on the nodes.",
        f"{_WHOLE}env:\n  train:\n    env_type: «libero»\n    task: libero_spatial\n",
        f"{_WHOLE}env:\n  train:\n    env_type: franka_kin\n",
    ),
    _error(
        "unusable-path",
        "a file or folder of this machine cannot be used as the file asks",
        "`runner.resume_dir` names a checkpoint that is there, and `runner.logger.log_path` a folder, which is made"
        " when it is not there. Both are looked up on the machine that validates, from the folder in which `rlinf`"
        " starts.",
        f"{_WHOLE}runner:\n  resume_dir: «checkpoints/global_step_100»\n",
        f"{_WHOLE}runner:\n  resume_dir: auto\n",
    ),
    _error(
        "not-available",
        "this version does not have what the key asks for",
        "The key is one that users of this field know, and what it stands for is not there yet. It is refused "
        "rather than left without effect in silence.",
        f"{_WHOLE}env:\n  train:\n    video_cfg:\n      save_video: «true»\n",
        f"{_WHOLE}env:\n  train:\n    video_cfg:\n      save_video: false\n",
    ),
    _error(
        "conflicting-settings",
        "two settings contradict each other",
        "Each is right by itself, and together they ask for something that does not exist: values from a model without "
        "a value head, a comparison within groups of one, answers longer than the sequence. No setting overrules "
        "another in silence.",
        f"{_WHOLE}algorithm:\n  adv_type: gae\n  loss_type: «actor»\n",
        f"{_WHOLE}algorithm:\n  adv_type: gae\n  loss_type: actor_critic\n",
    ),
)

CODES: tuple[Code, ...] = (*_COMPONENTS, *_SIZES, *_CHOICES)
