"""Errors that ended a run: what its code, its machine or rlinf itself refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rlinf_cli.why.finding import FindingKind, RunFinding
from rlinf_cli.why.incidents import Incident

_VERSION: Final = re.compile(r"the engine's weights of version (\d+) differ")
_TOOL: Final = re.compile(r"the tool `([^`]+)`: ([^\n]+)")
_FIRST: Final = re.compile(r"the first: ([^\n]+)")
_SHOWN: Final = 12


def disk_full(incident: Incident) -> RunFinding | None:
    """Report that a file system has no room."""
    text = incident.text
    if "No space left on device" not in text and "Disk quota exceeded" not in text:
        return None
    shared = "/dev/shm" in text
    where = "/dev/shm, which processes share memory by" if shared else "the disk"
    do = (
        "give the container more of it (`--shm-size`), or hold less in flight"
        if shared
        else "free some space, keep fewer checkpoints (`runner.keep_checkpoints`), or write elsewhere"
        " (`runner.logger.log_path`, `actor.checkpoint_save_path`)"
    )
    return _finding(incident, "disk-full", f"there is no room on {where}", _quoted(incident), do)


def accelerator_memory(incident: Incident) -> RunFinding | None:
    """Report that the memory of an accelerator was used up."""
    if not incident.is_a("OutOfMemoryError") and "CUDA out of memory" not in incident.text:
        return None
    return _finding(
        incident,
        "accelerator-memory",
        f"the memory of the accelerator of {_name(incident)} was used up",
        _quoted(incident),
        "use smaller micro batches (`actor.micro_batch_size`), shard or offload the actor, or give the engine less;"
        " `rlinf inspect memory FILE` forecasts what each needs",
    )


def host_memory(incident: Incident) -> RunFinding | None:
    """Report that a process was refused memory."""
    words = ("Cannot allocate memory", "raised MemoryError")
    if not incident.is_a("MemoryError") and not any(word in incident.text for word in words):
        return None
    return _finding(
        incident,
        "host-memory",
        f"{_name(incident)} asked for more memory than there is",
        _quoted(incident),
        "make what it was about to allocate smaller, or give its machine or container more memory",
    )


def weights_not_arrived(incident: Incident) -> RunFinding | None:
    """Report that an engine answers by other weights than the actor's."""
    match = _VERSION.search(incident.text)
    if match is None:
        return None
    return _finding(
        incident,
        "weights-not-arrived",
        f"the actor's weights of version {match[1]} did not arrive in the engine: their fingerprints differ",
        _quoted(incident),
        "let actor and rollout have the same model, precision and adapter; an engine that reports an adapter as loaded"
        " and answers without it needs another version",
    )


def nothing_to_learn(incident: Incident) -> RunFinding | None:
    """Report that a step had no samples."""
    text = incident.text
    if "has no samples to learn from" not in text:
        return None
    if "could be scored" in text:
        code, what, do = _of_answers(text, "the reward fails for the answers of a whole step")
    elif "equal rewards" in text:
        what, code = "all answers to a prompt have the same reward, for every prompt of a step", "groups-equal"
        do = "use other problems, a larger `algorithm.group_size` or a higher temperature, or `filter_groups: false`"
    else:
        what, code = "no prompt of a step could be used", "prompts-skipped"
        do = "raise `data.max_prompt_length`, or use shorter prompts"
    return _finding(incident, code, what, _quoted(incident), do)


def rewards_failed(incident: Incident) -> RunFinding | None:
    """Report that too many answers could not be scored, or made."""
    text = incident.text
    if "could not be scored" not in text and not ("answers of" in text and "max_failed_fraction" in text):
        return None
    code, what, do = _of_answers(text, "the reward fails for more answers than `runner.max_failed_fraction` allows")
    return _finding(incident, code, what, _quoted(incident), do)


def _of_answers(text: str, otherwise: str) -> tuple[str, str, str]:
    """Return code, cause and remedy of answers that failed, by the reason of the first one."""
    tool = _TOOL.search(text)
    if tool is not None:
        what = f"the tool `{tool[1]}` fails: {tool[2]}"
        return "tool-fails", what, "call it by hand; one that takes long needs a longer `agent.tool_timeout`"
    do = "score one answer by hand with the same function; `rlinf report --samples` shows answers with the reasons"
    first = _FIRST.search(text)
    return "reward-fails", otherwise if first is None else f"{otherwise}: {first[1]}", do


def simulators_failed(incident: Incident) -> RunFinding | None:
    """Report that the simulators of too many episodes raised."""
    if "the simulators of" not in incident.text or "max_failed_fraction" not in incident.text:
        return None
    return _finding(
        incident,
        "simulators-fail",
        "simulators raise in more episodes than `runner.max_failed_fraction` allows",
        _quoted(incident),
        "the log of the env worker has environments, action and traceback: look at the line that raised",
    )


def simulator_raised(incident: Incident) -> RunFinding | None:
    """Report that the code of an environment raised, and did so again where the episode was repeated."""
    if not incident.is_a("SimulatorError"):
        return None
    return _finding(
        incident,
        "simulator-raises",
        f"{_name(incident)}: {_first_line(incident).partition(' (environment')[0]}",
        _quoted(incident),
        "look at that line of its code: the same episode raises there again",
        *_help(incident, "the log of the worker has its traceback"),
    )


def not_finite(incident: Incident) -> RunFinding | None:
    """Tell which number was NaN or infinite first."""
    if not incident.is_a("NonFiniteError"):
        return None
    return _finding(
        incident,
        "not-finite",
        f"{_name(incident)} met a number that is NaN or infinite: {_first_line(incident)}",
        _quoted(incident),
        *_help(incident, "lower `actor.optim.lr`, or bound gradients by `actor.optim.clip_grad`"),
    )


def untrained(incident: Incident) -> RunFinding | None:
    """Tell which trained tensor no update reached."""
    if not incident.is_a("UntrainedError"):
        return None
    return _finding(
        incident,
        "untrained",
        f"{_name(incident)} trains tensors that the loss does not reach: {_first_line(incident)}",
        _quoted(incident),
        *_help(incident, "use in the loss what the model returns, or freeze the tensor"),
    )


def deadlock(incident: Incident) -> RunFinding | None:
    """Tell who waits for whom."""
    if not incident.is_a("DeadlockError"):
        return None
    return _finding(
        incident,
        "deadlock",
        f"Deadlock: {_first_line(incident)}",
        _quoted(incident),
        "let one of them send before it receives; `waits.json` and `stacks.txt` in the evidence show where each waits",
    )


def timed_out(incident: Incident) -> RunFinding | None:
    """Tell which operation was not done in time."""
    if not incident.is_a("CommunicationTimeoutError"):
        return None
    return _finding(
        incident,
        "timed-out",
        f"{_name(incident)} waited too long: {_first_line(incident)}",
        _quoted(incident),
        *_help(
            incident, "`stacks.txt` in the evidence shows what its peer was doing; a slow one needs a longer `timeout`"
        ),
    )


def checkpoint(incident: Incident) -> RunFinding | None:
    """Report that a checkpoint cannot be read or written."""
    if not incident.is_a("CheckpointError"):
        return None
    return _finding(
        incident,
        "checkpoint",
        _first_line(incident),
        _quoted(incident),
        *_help(incident, "`runner.resume_dir=auto` takes the newest one that is whole"),
    )


def cluster(incident: Incident) -> RunFinding | None:
    """Report that the cluster cannot start what was asked, or does not answer."""
    if not incident.is_a("ClusterError"):
        return None
    return _finding(
        incident,
        "cluster",
        f"the cluster refused: {_first_line(incident)}",
        _quoted(incident),
        *_help(incident, "`rlinf doctor FILE` looks for what is wrong on all machines"),
    )


def raised(incident: Incident) -> RunFinding | None:
    """Tell an exception of a worker or of the driver, with its place in the code."""
    process = incident.process
    if process is None:
        return None
    place = f" at {process.position}" if process.position else ""
    what = f"{_name(incident)} raised {process.type.removeprefix('builtins.')}{place}"
    own = "RLinfError" in process.bases
    return _finding(
        incident,
        "refused" if own else "exception",
        f"{_name(incident)} failed: {_first_line(incident)}" if own else what,
        _quoted(incident),
        *_help(incident, "look at that line: the same input raises it again, so the run was not started again"),
    )


def recorded(incident: Incident) -> RunFinding:
    """Tell what the record says, where there is no evidence."""
    return _finding(
        incident,
        "failed",
        incident.what,
        list(incident.lines),
        "`rlinf logs` has the lines of every process",
    )


RULES: Final = (
    disk_full,
    accelerator_memory,
    host_memory,
    weights_not_arrived,
    nothing_to_learn,
    simulator_raised,
    simulators_failed,
    rewards_failed,
    not_finite,
    untrained,
    deadlock,
    timed_out,
    checkpoint,
    cluster,
    raised,
    recorded,
)


def _finding(incident: Incident, code: str, what: str, evidence: Sequence[str], *do: str) -> RunFinding:
    return RunFinding(
        FindingKind.FAILURE,
        code,
        what,
        (*[line for line in evidence if line.strip()][:_SHOWN], f"file: {incident.source}"),
        do,
        step=incident.step,
        time=incident.time,
        followed=incident.others,
    )


def _name(incident: Incident) -> str:
    process = incident.process
    if process is None:
        return "the run"
    return f"`{process.name}` in `{process.method}`" if process.method else f"{process.name}"


def _first_line(incident: Incident) -> str:
    text = incident.process.text if incident.process is not None else incident.what
    return text.strip().partition("\n")[0]


def _quoted(incident: Incident) -> list[str]:
    process = incident.process
    if process is None:
        return [incident.what, *incident.lines]
    position = [f"at {process.position}"] if process.position else []
    # The remedy in an error of rlinf's own is shown as such.
    text = process.text.partition("\n  help: ")[0] if process.help else process.text
    return [*text.strip().splitlines()[:_SHOWN], *position]


def _help(incident: Incident, otherwise: str) -> list[str]:
    process = incident.process
    return process.help.splitlines() if process is not None and process.help else [otherwise]
