"""Models and data sets of the HuggingFace Hub, pinned and fetched before a job starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlinf_cli.console import console

if TYPE_CHECKING:
    from rlinf_core.config.sections.hub_names import HubPath
    from rlinf_core.job.load import Job


def with_hub_pins(job: Job, file: str, overrides: Sequence[str], *, trains: bool = True) -> Job:
    """Return a job with its names of the hub pinned to commits, and fetched if it runs on this machine alone.

    Args:
        job: the job of `file`, without errors.
        file, overrides: how it was loaded.
        trains: whether the data of training are read.

    Raises:
        ConfigError: a name is neither in the cache of huggingface_hub, nor can it be fetched.
    """
    from rlinf_cli.job.job_file import load
    from rlinf_core.config.sections.hub_names import commit_of, ensure_here, hub_paths, pins_of

    unread = () if trains or job.recipe is None else tuple(tuple(key.split(".")) for key in job.recipe.training_data)

    def read(config: object) -> list[HubPath]:
        return [path for at, path in hub_paths(config) if not any(at[: len(key)] == key for key in unread)]

    if job.tree is None or not read(job.config):
        return job
    stdin = next((source.text.encode() for source in job.sources if source.kind == "stdin"), None)
    # Of several machines each fetches what its own workers read.
    alone = job.cluster is not None and job.cluster.num_nodes == 1
    for name, kind in dict.fromkeys((path.name, path.kind) for path in read(job.config) if alone and not path.is_here):
        console.message(f"fetching `{name}`, a {kind} of the HuggingFace Hub, into its cache")
    pins = pins_of(read(job.config), job.tree, lambda path: commit_of(path, fetches=alone))
    pinned = load(file, (*overrides, *pins), stdin=stdin) if pins else job
    missing = [path for path in read(pinned.config) if alone and not path.is_here]
    for path in missing:
        ensure_here(path)
    # What was fetched is checked by the rules of the recipe.
    return load(file, (*overrides, *pins), stdin=stdin) if missing else pinned
