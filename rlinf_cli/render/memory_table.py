"""The forecast of memory as text."""

from __future__ import annotations

from typing import Any, Final

_COLUMNS: Final = ("host", "host measured", "accelerator", "accelerator measured")
# The keys that make a part smaller.
_KEYS: Final = {
    "activations": "`micro_batch_size`, `max_tokens_per_micro_batch` or `fsdp_config.gradient_checkpointing: true`",
    "optimizer": "`model.is_lora: true`, or more actors that share it (`fsdp_config.sharding_strategy: full_shard`)",
    "keys and values": "`rollout.max_running_tokens`",
    "replay": "`algorithm.off_policy.replay.capacity` or `memory_gib`",
    "simulators": "`env.train.num_processes`",
    "trajectories": "`env.train.total_num_envs`",
    "answers": "`data.rollout_batch_size`",
}
# Said of a node whose memory nobody has declared.
_WHOSE: Final = ", the memory of this machine; `memory_gib` of a node group or `--available GIB` says that of another"


def memory_text(record: dict[str, Any]) -> str:
    """Return a line for each component, the sums of nodes, notes, and what there is most of where it does not fit.

    Args:
        record: of `memory_record`.
    """
    components: dict[str, Any] = record["components"]
    columns = [name for name in _COLUMNS if any(each[name.replace(" ", "_")] for each in components.values())]
    rows = [("component", "processes", *columns, "of which")]
    for name, each in components.items():
        parts = ", ".join(f"{part} {_size(size)}" for part, size in each["parts"].items() if size >= 2**19)
        sizes = (each[column.replace(" ", "_")] for column in columns)
        rows.append((name, str(each["processes"]), *(_size(size) if size else "-" for size in sizes), parts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    shared = sum(each["shared_memory"] for each in components.values())
    lines.append(f"messages in shared memory (/dev/shm): up to {_size(shared)}")
    for node in record["nodes"]:
        name, whose = f"node {node['node_rank']}", _WHOSE if node["host_is_this_machine"] else ""
        lines.append(f"{name}: {_size(node['host'])}{_of(node['host_available'])}{whose}")
        if node["accelerator"]:
            fullest = f"{_size(node['accelerator'])}{_of(node['accelerator_available'])}"
            lines.append(f"{name}, its fullest accelerator: {fullest}")
    lines += [f"note: {note}" for note in dict.fromkeys(note for each in components.values() for note in each["notes"])]
    return "\n".join(lines if record["fits"] else [*lines, *_remedies(record)])


def _remedies(record: dict[str, Any]) -> list[str]:
    """Return which component holds most of what there is too little of, and the keys that make it smaller."""
    short = [node for node in record["nodes"] if not node["fits"]]
    host = any(node["host_available"] is not None and node["host"] > node["host_available"] for node in short)
    kind, what = ("host", "a node") if host else ("accelerator", "an accelerator")
    name, most = max(record["components"].items(), key=lambda item: item[1]["processes"] * item[1][kind])
    whose = "the process" if most["processes"] == 1 else f"each of {most['processes']} processes"
    keys = [
        f"  `{part}`, {_size(most['parts'][part])}, become less by {keys}"
        for part, keys in _KEYS.items()
        if most["parts"].get(part) and (not most["accelerator"] or host != (part in most["on_device"]))
    ]
    return [f"{what} does not have enough memory: the most is {_size(most[kind])} in {whose} of `{name}`", *keys]


def _of(available: int | None) -> str:
    return "" if available is None else f" of {_size(available)}"


def _size(size: int) -> str:
    """Return a size in MiB, from 10 GiB on in GiB."""
    return f"{size / 2**20:,.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
