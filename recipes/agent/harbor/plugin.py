"""Harbor's environment and verifier on boxes: for rlinf's trials, and for use with `harbor run` alone.

    harbor run -p tasks/terminal -a terminus-2 --env recipes.agent.harbor.plugin:BoxEnvironment
        --verifier recipes.agent.harbor.plugin:FreshVerifier

Imported where Harbor is installed.
"""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import tarfile
import time
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Final

from recipes.agent.boxes.box import BoxEnded
from recipes.agent.boxes.box_limits import half_of_memory
from recipes.agent.boxes.boxes import DEFAULT_FOLDER, MIB, BoxHost
from recipes.agent.boxes.image_building import image_of
from recipes.agent.boxes.image_store import Image, ImageStore
from recipes.agent.harbor.grading import Expected, files_of, find_check, finish, grade, task_box
from recipes.agent.harbor.task_folder import TaskFolder, read_task
from recipes.agent.harbor.trials import TrialBox, trial_boxes
from rlinf_core import ConfigError

_environments: Any = import_module("harbor.environments.base")
_capabilities: Any = import_module("harbor.environments.capabilities")
_verifiers: Any = import_module("harbor.verifier.base")
_results: Any = import_module("harbor.models.verifier.result")

# The maximum size of one download from a box.
_MOST_BYTES: Final = 64 * MIB
# The maximum files and folders of one download; an archive of that size could contain millions.
_MOST_FILES: Final = 50_000
_TAKE_SECONDS: Final = 120.0
_TIMED_OUT: Final = 124
# The share of Harbor's verifier time for one test run, as there may be two.
_ONE_RUN: Final = 0.45
_stores: dict[tuple[Path, int], ImageStore] = {}


class BoxEnvironment(_environments.BaseEnvironment):
    """A box with the interface of Harbor's environments.

    Args:
        trial: the name of the trial of this process whose box is used; "": an own box.
        boxes: the folder for boxes and images.
        memory: the memory of all boxes of the machine, in MiB.
    """

    def __init__(self, *known: Any, trial: str = "", boxes: str = "", memory: int | None = None, **named: Any) -> None:
        self._shared = trial_boxes.get(trial)
        self._where = (Path(boxes or DEFAULT_FOLDER), int(memory or half_of_memory()))
        self._stack = AsyncExitStack()
        self._made: tuple[ImageStore, TaskFolder, Image] | None = None
        super().__init__(*known, **named)

    @staticmethod
    def type() -> str:
        """See Harbor."""
        return "rlinf-box"

    @property
    def capabilities(self) -> Any:
        """See Harbor."""
        return _capabilities.EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> Any:
        """See Harbor."""
        return _capabilities.EnvironmentResourceCapabilities(memory_limit=True)

    def _validate_definition(self) -> None:
        read_task(self.environment_dir.parent)

    @property
    def _box(self) -> TrialBox:
        if self._shared is None:
            raise RuntimeError("the box has not started, or has ended")
        return self._shared

    async def start(self, force_build: bool) -> None:
        """Start an own box, unless a trial's box is used."""
        if self._shared is not None:
            return
        task = read_task(self.environment_dir.parent)
        if self._where not in _stores:
            _stores[self._where] = ImageStore(BoxHost(*self._where))
        store = _stores[self._where]
        image = await image_of(store, task.environment, task.docker_image, seconds=task.build_seconds)
        try:
            await self._stack.enter_async_context(store.boxes.admission.admit(task.memory_mib))
            box = await self._stack.enter_async_context(task_box(store, task, image, env=self._persistent_env))
        except BaseException:
            await self._stack.aclose()
            raise
        self._made = store, task, image
        self._shared = TrialBox(box, task, image.user, lambda command, done, seconds: None)

    async def stop(self, delete: bool) -> None:
        """End the box that `start` started."""
        self._shared = None
        await self._stack.aclose()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Any:
        """See Harbor."""
        who, task = self._resolve_user(user), self._box.task
        done = await self._box.run(
            command,
            timeout=timeout_sec or max(task.agent_seconds, task.verifier_seconds),
            cwd=cwd,
            env=self._merge_env(env),
            user=self._box.user if who is None else str(who),
        )
        return _environments.ExecResult(
            stdout=done.output.decode(errors="replace"),
            stderr="timed out" if done.timed_out else done.errors.decode(errors="replace"),
            return_code=_TIMED_OUT if done.timed_out else done.status,
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """See Harbor."""
        target = Path(target_path)
        await self._box.box.put_files([(target.name, Path(source_path))], str(target.parent))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """See Harbor."""
        await self._box.box.put_files(files_of(Path(source_dir)), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """See Harbor."""
        data = await self._taken(f"cat -- {shlex.quote(source_path)}", source_path)
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(target.write_bytes, data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """See Harbor; only regular files and folders are downloaded."""
        data = await self._taken(f"tar -C {shlex.quote(source_dir)} -cf - .", source_dir)
        await asyncio.to_thread(_extract, data, Path(target_dir))

    async def _taken(self, command: str, path: str) -> bytes:
        try:
            done = await self._box.box.run(["bash", "-c", command], timeout=_TAKE_SECONDS, most=_MOST_BYTES + 1)
        except BoxEnded as error:
            raise FileNotFoundError(f"{path}: {error}") from None
        if done.status != 0 or done.timed_out:
            raise FileNotFoundError(f"{path}: {done.errors.decode(errors='replace').strip()}")
        if len(done.output) > _MOST_BYTES:
            raise OSError(f"{path} has more than {_MOST_BYTES >> 20} MiB")
        return done.output

    async def graded(self) -> tuple[float, dict[str, Any], str]:
        """End the agent's box, and return the reward of its files, the grading record and the tests' output.

        Raises:
            ConfigError: this is not the agent's box.
        """
        if self._made is None:
            raise ConfigError(
                "a fresh box grades what an agent's box has left, and this is none",
                help='for a task with `environment_mode = "separate"`, leave `--verifier` out',
            )
        store, task, image = self._made
        checked = find_check(task)
        expected = checked.expected if checked is not None else Expected()
        left = await finish(task, image, self._box.box, expected.mode)
        kept, seconds = store.boxes.kept(self._box.box), _ONE_RUN * task.verifier_seconds
        result = await grade(store, task, image, kept, expected, seconds=seconds)
        record = {
            "checked": checked is not None,
            "why": result.why,
            "tries": result.tries,
            "tampered": result.tampered,
            "dropped": left.dropped,
            "dropped_count": left.dropped_count,
        }
        return result.reward, record, result.output


class FreshVerifier(_verifiers.BaseVerifier):
    """Grades in a fresh box; `grading.json` beside the tests' output has the details."""

    async def verify(self) -> Any:
        """See Harbor."""
        if not isinstance(self.environment, BoxEnvironment):
            raise ConfigError(
                "a fresh box grades what a box of rlinf has left",
                help="run Harbor with `--env recipes.agent.harbor.plugin:BoxEnvironment`, too",
            )
        began = time.time()
        reward, record, output = await self.environment.graded()
        folder = Path(self.trial_paths.verifier_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "grading.json").write_text(json.dumps({**record, "seconds": time.time() - began}, indent=1))
        (folder / "test-stdout.txt").write_text(output)
        return _results.VerifierResult(rewards={"reward": reward})


def _extract(data: bytes, target: Path) -> None:
    """Extract the regular files and folders of an archive that a policy may have made.

    Raises:
        OSError: there are too many files, or one cannot be written.
        TarError: the data is no archive, is compressed, or leads out of the folder.
    """
    target.mkdir(parents=True, exist_ok=True)
    made = 0
    # A small compressed archive or sparse file could fill the disk.
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            made += len(PurePosixPath(member.name).parts)
            if made > _MOST_FILES:
                raise OSError(f"an archive has more than {_MOST_FILES} files and folders")
            if member.isdir() or (member.isreg() and not member.issparse()):
                archive.extract(member, target, filter="data")
