"""rlinf_core: configuration, placement and the worker runtime that the `rlinf` command uses.

The public names are listed in `__init__.pyi` and imported on first use, so that reading a configuration never pays for
ray or torch.
"""

from __future__ import annotations

from rlinf_core.process.import_path import pin_own_packages
from rlinf_core.process.public_names import public_names

# What programs import from RLinf's scheduler.
_OF_RLINF = {
    "AcceleratorType": "`self.torch_device` is a worker's device; `register_accelerator` adds a kind",
    "CollectiveGroup": "workers talk with `self.send`, `self.recv` and `self.broadcast`",
    "CollectiveGroupOptions": "each message takes the fastest way there is; nothing is set",
    "FrankaConfig": "`self.hardware_infos` has a worker's robots, with the keys of `hardware.configs`",
    "ModelParallelComponentPlacement": "use `ComponentPlacement`; the recipe checks how a model is split over ranks",
    "NodeGroupEnvConfig": "`ClusterConfig` has the node groups with their `env_configs`",
    "WorkerGroupFuncResult": "a call of a group returns a `WorkerGroupHandle`",
}

pin_own_packages()
__getattr__, __dir__ = public_names(__name__, __file__, _OF_RLINF)
