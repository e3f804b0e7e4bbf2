"""The imported jobs that are planned and trained with stand-ins, ten of each kind, and how they become small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

_EMBODIED: Final = "RLinf/examples/embodiment/config"
_MATH: Final = "RLinf/examples/reasoning/config/math"
_SFT: Final = "RLinf/examples/sft/config"
_LIBERO: Final = "RLinf/evaluations/libero"


class Kind(NamedTuple):
    """Jobs of one kind: their files below the folder of checkouts, ten or all there are, and a node's accelerators."""

    files: tuple[str, ...]
    accelerators: int


KINDS: Final[Mapping[str, Kind]] = {
    "embodied": Kind(
        (
            f"{_EMBODIED}/frankasim_ppo_mlp.yaml",
            f"{_EMBODIED}/libero_10_grpo_openvlaoft.yaml",
            f"{_EMBODIED}/libero_goal_ppo_openpi.yaml",
            f"{_EMBODIED}/libero_object_ppo_dexbotic_pi0.yaml",
            f"{_EMBODIED}/libero_spatial_ppo_gr00t_n1d7.yaml",
            f"{_EMBODIED}/maniskill_async_ppo_mlp.yaml",
            f"{_EMBODIED}/maniskill_ppo_openvla.yaml",
            f"{_EMBODIED}/metaworld_50_ppo_openpi_pi05.yaml",
            f"{_EMBODIED}/realworld_charger_sac_cnn_async.yaml",
            f"{_EMBODIED}/realworld_peginsertion_rlpd_cnn_async.yaml",
        ),
        8,
    ),
    "evaluation": Kind(
        (
            f"{_LIBERO}/libero_10_openpi_pi05_eval.yaml",
            f"{_LIBERO}/libero_10_openvlaoft_eval.yaml",
            f"{_LIBERO}/libero_goal_openpi_eval.yaml",
            f"{_LIBERO}/libero_goal_openvlaoft_eval.yaml",
            f"{_LIBERO}/libero_object_openpi_pi05_eval.yaml",
            f"{_LIBERO}/libero_object_openvlaoft_eval.yaml",
            f"{_LIBERO}/libero_spatial_eval_pi05_RTC.yaml",
            f"{_LIBERO}/libero_spatial_openpi_pi05_eval.yaml",
            "RLinf/evaluations/maniskill/maniskill_ood_openvlaoft_eval.yaml",
            "RLinf/evaluations/realworld/realworld_eval.yaml",
        ),
        4,
    ),
    "language": Kind(
        (
            f"{_MATH}/qwen2.5-1.5b-grpo-fsdp-pipeline.yaml",
            f"{_MATH}/qwen2.5-1.5b-grpo-fsdp.yaml",
            f"{_MATH}/qwen2.5-1.5b-grpo-megatron-dynamic.yaml",
            f"{_MATH}/qwen2.5-1.5b-grpo-megatron-pipeline.yaml",
            f"{_MATH}/qwen2.5-1.5b-grpo-megatron.yaml",
            f"{_MATH}/qwen2.5-1.5b-is-megatron.yaml",
            f"{_MATH}/qwen2.5-1.5b-reinpp-megatron.yaml",
            f"{_MATH}/qwen2.5-32b-grpo-megatron.yaml",
            f"{_MATH}/qwen2.5-7b-grpo-megatron.yaml",
            f"{_MATH}/qwen3-30b-grpo-megatron.yaml",
        ),
        8,
    ),
    "agent": Kind(
        (
            "RLinf/examples/agent/rstar2/config/rstar2-qwen2.5-1.5b-megatron.yaml",
            "RLinf/examples/agent/rstar2/config/rstar2-qwen2.5-7b-megatron.yaml",
            "RLinf/tests/e2e_tests/agent/rstar2/qwen2.5-1.5b-megatron.yaml",
        ),
        8,
    ),
    "sft": Kind(
        (
            f"{_SFT}/behavior_pi05_vla.yaml",
            f"{_SFT}/custom_sft_openpi.yaml",
            f"{_SFT}/libero_sft_openpi.yaml",
            f"{_SFT}/realworld_sft_openpi.yaml",
            f"{_SFT}/realworld_sft_openpi_dual_franka_tcp_rot6d.yaml",
            f"{_SFT}/realworld_sft_openpi_pytorch_dual_franka_tcp_rot6d.yaml",
            f"{_SFT}/robotwin_sft_openpi.yaml",
            f"{_SFT}/robotwin_sft_openpi_pi05.yaml",
            f"{_SFT}/robotwin_sft_openpi_rlinf.yaml",
            "RLinf/tests/e2e_tests/sft/maniskill_sft_openpi.yaml",
        ),
        4,
    ),
    "verl": Kind(
        (
            "verl/examples/cispo_trainer/run_qwen3_8b_fsdp.sh",
            "verl/examples/gmpo_trainer/run_qwen3_8b_fsdp.sh",
            "verl/examples/grpo_trainer/run_qwen3_4b_fsdp.sh",
            "verl/examples/grpo_trainer/run_qwen3_8b_fsdp.sh",
            "verl/examples/gspo_trainer/run_qwen3_8b_fsdp.sh",
            "verl/examples/ppo_trainer/run_qwen3_8b_fsdp.sh",
            "verl/examples/reinforce_plus_plus_trainer/run_qwen3_8b_fsdp.sh",
            "verl/examples/rloo_trainer/run_qwen3_8b_fsdp.sh",
            "verl/examples/tuning/lora/run_qwen3_8b_fsdp.sh",
            "verl/examples/sft/gsm8k/run_qwen2_5_0_5b_fsdp.sh",
        ),
        8,
    ),
}


class Training(NamedTuple):
    """A job that is trained: its file, what makes it small enough for one CPU, and the metric that shows learning."""

    file: str
    changes: tuple[str, ...]
    metric: str


def _placed(components: str) -> str:
    return f'cluster.component_placement={{"{components}": {{node_group: node, placement: 0}}}}'


_SMALL_LANGUAGE: Final = (
    "cluster.num_nodes=1",
    "rollout.backend=torch",
    "~rollout.engine_options",
    "reward.reward_type=stand_in_reward:odd",
    "data.rollout_batch_size=4",
    "algorithm.group_size=4",
    "rollout.sampling_params.max_new_tokens=24",
    "runner.seq_length=256",
    "data.max_prompt_length=200",
    "runner.val_check_interval=-1",
)
TRAININGS: Final[Mapping[str, Training]] = {
    "embodied": Training(
        f"{_EMBODIED}/frankasim_ppo_mlp.yaml",
        (
            _placed("actor,env,rollout"),
            "env.train.total_num_envs=8",
            "env.train.max_steps_per_rollout_epoch=16",
            "actor.micro_batch_size=16",
            "actor.global_batch_size=32",
            "algorithm.update_epoch=2",
            "runner.val_check_interval=-1",
        ),
        "train/actor/grad_norm",
    ),
    "language": Training(
        f"{_MATH}/qwen2.5-1.5b-grpo-megatron.yaml",
        (*_SMALL_LANGUAGE, _placed("actor,rollout,reward"), "algorithm.n_minibatches=1"),
        "train/actor/grad_norm",
    ),
    "sft": Training(
        f"{_SFT}/robotwin_sft_openpi_pi05.yaml",
        (_placed("actor"), "actor.model.num_action_chunks=6", "actor.micro_batch_size=4", "actor.global_batch_size=8"),
        "train/actor/grad_norm",
    ),
    "verl": Training(
        "verl/examples/grpo_trainer/run_qwen3_8b_fsdp.sh",
        (
            *_SMALL_LANGUAGE,
            _placed("actor,reference,rollout,reward"),
            "~cluster.node_groups",
            "actor.global_batch_size=16",
        ),
        "train/actor/grad_norm",
    ),
}
