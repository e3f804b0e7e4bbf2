"""rlinf_core: configuration, placement and the worker runtime beneath the `rlinf` command.

The public names are listed here once and imported on first use, so that reading a configuration
never pays for ray or torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlinf_core.import_path import pin_own_packages
from rlinf_core.version import __version__

if TYPE_CHECKING:
    from rlinf_core.address import WorkerAddress as WorkerAddress
    from rlinf_core.algorithms.advantages import Advantages as Advantages
    from rlinf_core.algorithms.advantages import AdvantageSettings as AdvantageSettings
    from rlinf_core.algorithms.advantages import Trajectories as Trajectories
    from rlinf_core.algorithms.losses.inputs import Loss as Loss
    from rlinf_core.algorithms.losses.inputs import LossInputs as LossInputs
    from rlinf_core.algorithms.losses.inputs import LossSettings as LossSettings
    from rlinf_core.algorithms.options import checked_options as checked_options
    from rlinf_core.channel.channel import Channel as Channel
    from rlinf_core.channel.load_balancing import LeastLoaded as LeastLoaded
    from rlinf_core.channel.load_balancing import RoundRobin as RoundRobin
    from rlinf_core.channel.load_balancing import distribute as distribute
    from rlinf_core.channel.load_balancing import rank_key as rank_key
    from rlinf_core.channel.operation import ChannelEmpty as ChannelEmpty
    from rlinf_core.channel.operation import ChannelFull as ChannelFull
    from rlinf_core.channel.queue_state import KeyStatistics as KeyStatistics
    from rlinf_core.cluster.cluster import Cluster as Cluster
    from rlinf_core.collective.work import Work as Work
    from rlinf_core.config.cluster import ClusterConfig as ClusterConfig
    from rlinf_core.config.model import ConfigModel as ConfigModel
    from rlinf_core.config.sections.job import JobConfig as JobConfig
    from rlinf_core.config.sections.runner import RunnerConfig as RunnerConfig
    from rlinf_core.context import WorkerInfo as WorkerInfo
    from rlinf_core.errors import AuthenticationError as AuthenticationError
    from rlinf_core.errors import CancelledOperationError as CancelledOperationError
    from rlinf_core.errors import ChannelClosed as ChannelClosed
    from rlinf_core.errors import ChannelError as ChannelError
    from rlinf_core.errors import CheckpointError as CheckpointError
    from rlinf_core.errors import ClusterError as ClusterError
    from rlinf_core.errors import CommunicationTimeoutError as CommunicationTimeoutError
    from rlinf_core.errors import ConfigError as ConfigError
    from rlinf_core.errors import DeadlockError as DeadlockError
    from rlinf_core.errors import EnvironmentVariableError as EnvironmentVariableError
    from rlinf_core.errors import InvalidNameError as InvalidNameError
    from rlinf_core.errors import MismatchError as MismatchError
    from rlinf_core.errors import PayloadError as PayloadError
    from rlinf_core.errors import PeerNotFoundError as PeerNotFoundError
    from rlinf_core.errors import PlacementError as PlacementError
    from rlinf_core.errors import RemoteError as RemoteError
    from rlinf_core.errors import RLinfError as RLinfError
    from rlinf_core.errors import RunError as RunError
    from rlinf_core.errors import RuntimeFailure as RuntimeFailure
    from rlinf_core.errors import UnknownGroupError as UnknownGroupError
    from rlinf_core.errors import WorkerDiedError as WorkerDiedError
    from rlinf_core.failures import WorkerGroupError as WorkerGroupError
    from rlinf_core.hardware.accelerators.registry import register_accelerator as register_accelerator
    from rlinf_core.hardware.robots.registry import register_hardware as register_hardware
    from rlinf_core.hardware.robots.unit import RobotUnit as RobotUnit
    from rlinf_core.job.load import Job as Job
    from rlinf_core.job.load import load_job as load_job
    from rlinf_core.job.recipe import Recipe as Recipe
    from rlinf_core.job.report import Report as Report
    from rlinf_core.placement.component import ComponentPlacement as ComponentPlacement
    from rlinf_core.placement.component import HybridComponentPlacement as HybridComponentPlacement
    from rlinf_core.placement.component import PlacementMode as PlacementMode
    from rlinf_core.placement.flexible import FlexiblePlacementStrategy as FlexiblePlacementStrategy
    from rlinf_core.placement.node import NodePlacementStrategy as NodePlacementStrategy
    from rlinf_core.placement.packed import PackedPlacementStrategy as PackedPlacementStrategy
    from rlinf_core.placement.strategy import PlacementStrategy as PlacementStrategy
    from rlinf_core.runners.embodied_runner import EmbodiedRunner as EmbodiedRunner
    from rlinf_core.runners.events import Waiting as Waiting
    from rlinf_core.runners.policies import load_policy as load_policy
    from rlinf_core.runners.program import run_job as run_job
    from rlinf_core.runners.program import with_recovery as with_recovery
    from rlinf_core.runners.reasoning_runner import ReasoningRunner as ReasoningRunner
    from rlinf_core.runners.record import RunRecord as RunRecord
    from rlinf_core.runners.run_folder import RunFolder as RunFolder
    from rlinf_core.runners.runner import Runner as Runner
    from rlinf_core.topology import ClusterTopology as ClusterTopology
    from rlinf_core.topology import NodeGroupInfo as NodeGroupInfo
    from rlinf_core.topology import NodeInfo as NodeInfo
    from rlinf_core.worker.handle import WorkerGroupHandle as WorkerGroupHandle
    from rlinf_core.worker.worker import Worker as Worker
    from rlinf_core.worker.worker_group import WorkerGroup as WorkerGroup


# Public name -> the module that defines it.
_PUBLIC: dict[str, str] = {
    "AdvantageSettings": "rlinf_core.algorithms.advantages",
    "Advantages": "rlinf_core.algorithms.advantages",
    "AuthenticationError": "rlinf_core.errors",
    "CancelledOperationError": "rlinf_core.errors",
    "Channel": "rlinf_core.channel.channel",
    "ChannelClosed": "rlinf_core.errors",
    "ChannelEmpty": "rlinf_core.channel.operation",
    "ChannelError": "rlinf_core.errors",
    "ChannelFull": "rlinf_core.channel.operation",
    "CheckpointError": "rlinf_core.errors",
    "Cluster": "rlinf_core.cluster.cluster",
    "ClusterConfig": "rlinf_core.config.cluster",
    "ClusterError": "rlinf_core.errors",
    "ClusterTopology": "rlinf_core.topology",
    "CommunicationTimeoutError": "rlinf_core.errors",
    "ComponentPlacement": "rlinf_core.placement.component",
    "ConfigError": "rlinf_core.errors",
    "ConfigModel": "rlinf_core.config.model",
    "DeadlockError": "rlinf_core.errors",
    "EmbodiedRunner": "rlinf_core.runners.embodied_runner",
    "EnvironmentVariableError": "rlinf_core.errors",
    "FlexiblePlacementStrategy": "rlinf_core.placement.flexible",
    "HybridComponentPlacement": "rlinf_core.placement.component",
    "InvalidNameError": "rlinf_core.errors",
    "Job": "rlinf_core.job.load",
    "JobConfig": "rlinf_core.config.sections.job",
    "KeyStatistics": "rlinf_core.channel.queue_state",
    "LeastLoaded": "rlinf_core.channel.load_balancing",
    "Loss": "rlinf_core.algorithms.losses.inputs",
    "LossInputs": "rlinf_core.algorithms.losses.inputs",
    "LossSettings": "rlinf_core.algorithms.losses.inputs",
    "MismatchError": "rlinf_core.errors",
    "NodeGroupInfo": "rlinf_core.topology",
    "NodeInfo": "rlinf_core.topology",
    "NodePlacementStrategy": "rlinf_core.placement.node",
    "PackedPlacementStrategy": "rlinf_core.placement.packed",
    "PayloadError": "rlinf_core.errors",
    "PeerNotFoundError": "rlinf_core.errors",
    "PlacementError": "rlinf_core.errors",
    "PlacementMode": "rlinf_core.placement.component",
    "PlacementStrategy": "rlinf_core.placement.strategy",
    "RLinfError": "rlinf_core.errors",
    "ReasoningRunner": "rlinf_core.runners.reasoning_runner",
    "Recipe": "rlinf_core.job.recipe",
    "RemoteError": "rlinf_core.errors",
    "Report": "rlinf_core.job.report",
    "RobotUnit": "rlinf_core.hardware.robots.unit",
    "RoundRobin": "rlinf_core.channel.load_balancing",
    "RunError": "rlinf_core.errors",
    "RunFolder": "rlinf_core.runners.run_folder",
    "RunRecord": "rlinf_core.runners.record",
    "Runner": "rlinf_core.runners.runner",
    "RunnerConfig": "rlinf_core.config.sections.runner",
    "RuntimeFailure": "rlinf_core.errors",
    "Trajectories": "rlinf_core.algorithms.advantages",
    "UnknownGroupError": "rlinf_core.errors",
    "Waiting": "rlinf_core.runners.events",
    "Work": "rlinf_core.collective.work",
    "Worker": "rlinf_core.worker.worker",
    "WorkerAddress": "rlinf_core.address",
    "WorkerDiedError": "rlinf_core.errors",
    "WorkerGroup": "rlinf_core.worker.worker_group",
    "WorkerGroupError": "rlinf_core.failures",
    "WorkerGroupHandle": "rlinf_core.worker.handle",
    "WorkerInfo": "rlinf_core.context",
    "checked_options": "rlinf_core.algorithms.options",
    "distribute": "rlinf_core.channel.load_balancing",
    "load_job": "rlinf_core.job.load",
    "load_policy": "rlinf_core.runners.policies",
    "rank_key": "rlinf_core.channel.load_balancing",
    "register_accelerator": "rlinf_core.hardware.accelerators.registry",
    "register_hardware": "rlinf_core.hardware.robots.registry",
    "run_job": "rlinf_core.runners.program",
    "with_recovery": "rlinf_core.runners.program",
}

pin_own_packages()

__all__ = ["__version__", *_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'rlinf_core' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
