"""The forecast of memory as text."""

from __future__ import annotations

from typing import Any, Final

_COLUMNS: Final = ("host", "host measured", "accelerator", "accelerator measured")
# What makes a part smaller.
_REMEDIES: Final = {
    "activations": "lower `micro_batch_size` or `max_tokens_per_micro_batch`, or set `gradient_checkpointing: true`",
    "optimizer": "set `model.is_lora: true`, or let more actors share it (`sharding_strategy: full_shard`)",
    "keys and values": "lower `rollout.max_running_tokens`",
    "replay": "lower `algorithm.off_policy.replay.capacity`, or write `storage`",
    "simulators": "lower `env.train.num_processes`",
    "trajectories": "lower `env.train.total_num_envs`",
    "answers": "lower `data.rollout_batch_size`",
}
# Said of a node whose memory nobody has declared.
_WHOSE: Final = " (this machine; override: `--available GIB`, or `memory_gib` of a node group)"


def memory_text(record: dict[str, Any]) -> str:
    """Return a line for each component, the sums of nodes, notes, and the largest part where it does not fit.

    Args:
        record: the record of `memory_record`.
    """
    components: dict[str, Any] = record["components"]
    columns = [name for name in _COLUMNS if any(sizes[name.replace(" ", "_")] for sizes in components.values())]
    rows = [("component", "processes", *columns, "of which")]
    for name, sizes in components.items():
        parts = ", ".join(f"{part} {_size(size)}" for part, size in sizes["parts"].items() if size >= 2**19)
        cells = (sizes[column.replace(" ", "_")] for column in columns)
        rows.append((name, str(sizes["processes"]), *(_size(cell) if cell else "-" for cell in cells), parts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    shared = sum(sizes["shared_memory"] for sizes in components.values())
    lines.append(f"messages in shared memory (/dev/shm): up to {_size(shared)}")
    for node in record["nodes"]:
        name, whose = f"node {node['node_rank']}", _WHOSE if node["host_is_this_machine"] else ""
        lines.append(f"{name}: {_size(node['host'])}{_of(node['host_available'])}{whose}")
        if node["accelerator"]:
            fullest = f"{_size(node['accelerator'])}{_of(node['accelerator_available'])}"
            lines.append(f"{name}, its fullest accelerator: {fullest}")
    notes = dict.fromkeys(note for sizes in components.values() for note in sizes["notes"])
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines if record["fits"] else [*lines, *_remedies(record)])


def _remedies(record: dict[str, Any]) -> list[str]:
    """Return the component that takes most of the scarce memory, and the settings that make its parts smaller."""
    short = [node for node in record["nodes"] if not node["fits"]]
    host = any(node["host_available"] is not None and node["host"] > node["host_available"] for node in short)
    kind, what = ("host", "a node") if host else ("accelerator", "an accelerator")
    name, most = max(record["components"].items(), key=lambda item: item[1]["processes"] * item[1][kind])
    whose = "its process" if most["processes"] == 1 else f"each of {most['processes']} processes"
    remedies = [
        f"  to reduce `{part}` ({_size(most['parts'][part])}): {change}"
        for part, change in _REMEDIES.items()
        if 20 * most["parts"].get(part, 0) >= most[kind]
        and (not most["accelerator"] or host != (part in most["on_device"]))
    ]
    return [f"{what} has too little memory; `{name}` takes the most, {_size(most[kind])} in {whose}", *remedies]


def _of(available: int | None) -> str:
    return "" if available is None else f" of {_size(available)}"


def _size(size: int) -> str:
    """Return a size in MiB, from 10 GiB on in GiB."""
    return f"{size / 2**20:,.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
