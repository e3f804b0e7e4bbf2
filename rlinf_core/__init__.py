"""rlinf_core: configuration, placement and the worker runtime that the `rlinf` command uses.

The public names are listed in `__init__.pyi` and imported on first use, so that reading a configuration never pays for
ray or torch.
"""

from __future__ import annotations

from rlinf_core.process.import_path import pin_own_packages
from rlinf_core.process.public_names import public_names

# Names that programs import from RLinf's scheduler, with what replaces each here.
_OF_RLINF = {
    "AcceleratorType": "`self.torch_device` is a worker's device; `register_accelerator` adds a kind",
    "CollectiveGroup": "workers talk with `self.send`, `self.recv` and `self.broadcast`",
    "CollectiveGroupOptions": "each message takes the fastest way there is; nothing is set",
    "FrankaConfig": "`self.hardware_infos` has a worker's robots, with the keys of `hardware.configs`",
    "ModelParallelComponentPlacement": "use `ComponentPlacement`; the recipe checks how a model is split over ranks",
    "NodeGroupEnvConfig": "`ClusterConfig` has the node groups with their `env_configs`",
    "WorkerGroupFuncResult": "a call of a group returns a `WorkerGroupHandle`",
}

# Names that release 0.2 exported: importing them from here warns, and in the next release only their modules have them.
_HIDDEN = {
    "rlinf_core.algorithms.options": "checked_options",
    "rlinf_core.channel.queue_state": "KeyStatistics",
    "rlinf_core.config.diagnostics": "Severity",
    "rlinf_core.config.sections.cluster": "ClusterConfig",
    "rlinf_core.config.sections.values": "FilePath NonNegativeFloat NonNegativeInt OptionalPath PositiveFloat"
    " StepsOrNever",
    "rlinf_core.errors": "AuthenticationError CancelledOperationError ChannelError EnvironmentVariableError"
    " InvalidNameError MismatchError PayloadError PeerNotFoundError RayStartError RemoteError RunError RuntimeFailure"
    " UnknownGroupError",
    "rlinf_core.registry": "Registry",
    "rlinf_core.runners": "events",
    "rlinf_core.runners.events": "Waiting",
    "rlinf_core.runners.metrics": "read_metrics",
    "rlinf_core.runners.record": "RunRecord",
    "rlinf_core.runners.run_program": "with_recovery",
    "rlinf_core.runners.storage.run_folder": "RunFolder",
    "rlinf_core.scalars": "Bool Float Int Text",
    "rlinf_core.topology": "ClusterTopology NodeGroupInfo NodeInfo",
    "rlinf_core.worker.worker_group": "launch_together",
    "rlinf_core.worker.worker": "WorkerReference",
}
_RENAMED = {
    "NoEffect": "IgnoredKeys",
    "expand_mask": "broadcast_mask",
    "expand_trailing": "broadcast_trailing",
    "loop_program": "runner_program",
    "open_run": "load_run",
    "rank_means": "mean_over_ranks",
    "with_options": "options_model",
}
_FORMER = {
    **{name: module for module, names in _HIDDEN.items() for name in names.split()},
    **{old: f"{__name__}:{new}" for old, new in _RENAMED.items()},
}

pin_own_packages()
__getattr__, __dir__ = public_names(__name__, __file__, _OF_RLINF, _FORMER)
