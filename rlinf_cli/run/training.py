"""Run a recipe: views, signals, exit status, and the final state of the run folder."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from rlinf_cli import console
from rlinf_cli.console import shown
from rlinf_cli.interrupts import SAVING_SECONDS, STEP_SECONDS, ExitCode, Interrupts, code_of, signals_held
from rlinf_cli.job.findings import without_effect
from rlinf_cli.live.progress import RunProgress
from rlinf_cli.live.view import PlainView, View, summary_record, summary_text
from rlinf_cli.run.driver import Settle, detached
from rlinf_cli.run.run_documents import DocumentWriter, StateWriter, failure_block, record_end
from rlinf_cli.runs.logs import DRIVER, PRINTED, driver_log
from rlinf_core.config.sections.runner import RunnerConfig, RunSettings
from rlinf_core.errors import RLinfError
from rlinf_core.job.load import Job
from rlinf_core.job.recipe import Recipe
from rlinf_core.process.proc import sigterm_deferred
from rlinf_core.runners import events
from rlinf_core.runners.recovery import reason_of
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.run_folder import RunFolder, config_text_of
from rlinf_core.runners.storage.run_status import RunStatus
from rlinf_core.suggest import escaped


def run(job: Job, recipe: Recipe) -> ExitCode:
    """Run a valid job in this process, and show its progress.

    Raises:
        RLinfError: the run folder cannot be made.
    """
    with signals_held() as release:
        return Training(job, recipe, make_folder(job, recipe)).run(release)


def run_detached(job: Job, recipe: Recipe) -> ExitCode:
    """Run a valid job in a detached process, which continues after this process and its terminal have ended.

    Return when the detached process has made its run folder, or has failed to.
    """

    def work(settle: Settle) -> int:
        from rlinf_cli.main import guarded

        return guarded(lambda: _run_settled(job, recipe, settle))

    message, code = detached(work)
    if message is None:
        return ExitCode(code) if code in list(ExitCode) else ExitCode.FAILED
    folder, pid = Path(message["folder"]), int(message["pid"])
    if console.verbosity.json:
        console.result_json(summary_record("running", recipe.name, folder, pid=pid))
    else:
        console.result(f"{shown(folder)}, process {pid}")
        run = shlex.quote(shown(folder))
        console.message(f"  rlinf logs {run} --follow\n  rlinf stop {run}")
    return ExitCode.OK


def _run_settled(job: Job, recipe: Recipe, settle: Settle) -> ExitCode:
    with signals_held() as release:
        folder = make_folder(job, recipe)
        output = folder.log_file(PRINTED, 0)
        output.parent.mkdir(parents=True, exist_ok=True)
        settle({"folder": str(folder.path), "pid": os.getpid()}, output)
        # Progress goes to the driver's log. This output gets everything else, and the final summary.
        console.verbosity.quiet, console.verbosity.json = True, False
        return Training(job, recipe, folder).run(release)


def make_folder(job: Job, recipe: Recipe) -> RunFolder:
    """Create the folder of a new run, or reopen the folder of a resumed run.

    Raises:
        RLinfError: the folder cannot be made, or there is no checkpoint to resume from.
    """
    runner = getattr(job.config, "runner", None)
    save_path = getattr(getattr(job.config, "actor", None), "checkpoint_save_path", None)
    # A user's recipe may have no `runner` section, or a different one.
    runner = runner if isinstance(runner, RunSettings) else RunnerConfig()
    facts = recipe.load(recipe.facts)
    text = config_text_of(job)
    folder = RunFolder.create(runner, recipe.name, save_path, facts(job.config) if facts else None, text)
    folder.write_config_text(text)
    return folder


class Training:
    """One run in its folder."""

    def __init__(self, job: Job, recipe: Recipe, folder: RunFolder) -> None:
        self._job, self._recipe, self._folder = job, recipe, folder
        # A rehearsal learns nothing, so it has no learning curve and no report, and its command prints the summary.
        self._rehearses = folder.state.kind == "rehearsal"
        self._progress = RunProgress(times_only=self._rehearses)
        # Of a resumed run, also before its workers have started.
        self._progress.step = folder.state.step
        self._documents = DocumentWriter(self._progress, job, folder)
        self._report: Path | None = None
        self._unread = without_effect(job.diagnostics)
        self._interrupts = Interrupts(
            within=Training._run_program.__code__,
            on_first=self._progress.end,
            patience=self._patience,
            # During a launch a signal may end this process at once: the cluster's guardian ends what was started.
            holds_nothing=lambda: self._progress.started is None,
            before_hard=self._before_hard_end,
        )

    def run(self, ready: Callable[[], None]) -> ExitCode:
        """Run the program to its end; report the outcome on the streams, in the run's state, and as the exit code.

        Args:
            ready: called when signals can end the run cleanly.
        """
        failure: BaseException | None = None
        with self._interrupts, driver_log(self._folder.log_file(DRIVER, 0)) as log:
            # From here on a signal raises an exception only within the program.
            ready()
            for diagnostic in self._unread:
                log.info("%s: %s", diagnostic.span, diagnostic.message)
            try:
                self._run_program(log)
            except BaseException as error:  # noqa: BLE001 - users' code, and libraries in Rust, raise anything
                failure = error
            unseen = _leave_cluster()
            failure = failure or unseen
            self._draw_curve(log)
            if self._is_interrupted(failure):
                return self._interrupted(log)
            if failure is None:
                failure = self._end(RunStatus.FINISHED)
            if failure is not None:
                return self._failed(failure, log)
            return self._finished(log)

    def _is_interrupted(self, failure: BaseException | None) -> bool:
        """Return whether a signal ended the run; False for a signal that came after the end."""
        if self._interrupts.code is None:
            return isinstance(failure, KeyboardInterrupt)
        return failure is not None or self._progress.finished is None

    def _run_program(self, log: logging.Logger) -> None:
        with ExitStack() as stack:
            views = [stack.enter_context(view) for view in self._views(log)]
            # Standard output is reserved for the summary; output of the program and its workers goes elsewhere.
            stack.enter_context(redirect_stdout(sys.stderr))

            def listen(event: events.Event) -> None:
                self._progress.take(event)
                for view in views:
                    view.show(event)
                self._end_if_asked(event)

            self._interrupts.check()
            with sigterm_deferred(), suppress(ImportError):
                # Import numpy with signals deferred: its BLAS threads must not receive signals that Ray handles.
                import_module("numpy")
            program = self._recipe.load(self._recipe.program)
            if program is None:
                raise RLinfError(f"recipe `{self._recipe.name}` has no program")
            program(self._job, self._folder, listen)

    def _patience(self) -> float:
        """Return the seconds after a signal that the run has to finish its step and write a checkpoint."""
        runner = getattr(self._job.config, "runner", None)
        progress = self._progress
        if not getattr(runner, "save_on_interrupt", False) or not progress.has_unsaved_steps:
            return 0.0
        if progress.phase == events.SAVE_CHECKPOINT:
            return SAVING_SECONDS
        if progress.phase == events.EVALUATE or progress.seconds_of_step_left > STEP_SECONDS:
            return 0.0
        return STEP_SECONDS

    def _end_if_asked(self, event: events.Event) -> None:
        """End the run after a signal, at an event between two steps."""
        if isinstance(event, events.PhaseProgress):
            return
        if isinstance(event, events.PhaseStarted):
            if event.phase == events.SAVE_CHECKPOINT and self._interrupts.code is not None:
                self._interrupts.extend()
        elif not isinstance(event, events.RunFinished):
            self._interrupts.check(again=not isinstance(event, events.CheckpointSaved))

    def _views(self, log: logging.Logger) -> list[View]:
        place = shown(self._folder.path)
        views: list[View] = [
            StateWriter(self._progress, self._folder),
            self._documents,
            PlainView(self._progress, log.info),
        ]
        if console.verbosity.quiet:
            return views
        if console.colored(sys.stderr) and not console.verbosity.verbose:
            from rlinf_cli.live.terminal import TerminalView

            return [*views, TerminalView(self._progress, self._recipe.name, place)]
        console.message(f"run folder: {place}")
        return [*views, PlainView(self._progress)]

    def _finished(self, log: logging.Logger) -> ExitCode:
        log.info("finished after step %d", self._progress.step)
        self._documents.add_event(
            run_events.FINISHED, self._progress.step, f"finished after step {self._progress.step}"
        )
        if self._rehearses:
            return ExitCode.OK
        self._write_report()
        if not console.verbosity.json:
            console.result(summary_text(self._progress, self._folder.path, self._report, self._unread, self._causes()))
        return self._close(RunStatus.FINISHED, ExitCode.OK)

    def _interrupted(self, log: logging.Logger) -> ExitCode:
        from rlinf_cli.why.facts import limit_reached

        code = self._interrupts.code or ExitCode.INTERRUPTED
        reason = _reason_of_end(code)
        self._end_as_can_be(RunStatus.INTERRUPTED, reason)
        limit = limit_reached(os.environ, time.time())
        details = [self._kept(), *([limit] if limit else [])]
        self._documents.add_event(run_events.INTERRUPTED, self._progress.step, reason, details)
        log.info("%s after step %d; %s", reason, self._progress.step, self._kept())
        console.message(f"{reason} after step {self._progress.step}; the run folder is {shown(self._folder.path)}")
        console.message(self._kept())
        self._say_how_to_go_on()
        return self._close(RunStatus.INTERRUPTED, code, reason)

    def _failed(self, error: BaseException, log: logging.Logger) -> ExitCode:
        from rlinf_core.runners.evidence import evidence_line, keep_evidence

        reason = reason_of(error)
        self._end_as_can_be(RunStatus.FAILED, reason)
        trace = "".join(traceback.format_exception(error)).rstrip()
        # The log level keeps this off the screen, which shows the error block.
        log.info("failed after step %d: %s\n%s", self._progress.step, reason, trace)
        if console.verbosity.verbose:
            console.error(trace)
        block = failure_block(error, self._folder.logs, shown(self._folder.path), _components(self._job))
        console.error_block(block.what, where=block.where, why=block.why, do=block.do)
        evidence = keep_evidence(self._folder.path, error, self._progress.step, _components(self._job))
        details = [*(part for part in (block.where, block.why, block.do) if part), *evidence_line(evidence)]
        self._documents.add_event(run_events.FAILED, self._progress.step, block.what, details)
        for label, line in self._causes():
            console.message(f"{label}: {line}")
        if evidence is not None:
            console.message(f"`rlinf why {shlex.quote(shown(self._folder.path))}` shows the evidence, and what to do")
        self._say_how_to_go_on()
        self._write_report()
        if self._report is not None:
            console.message(f"report: {shown(self._report)}")
        return self._close(
            RunStatus.FAILED, code_of(error) if isinstance(error, RLinfError) else ExitCode.FAILED, reason
        )

    def _draw_curve(self, log: logging.Logger) -> None:
        """Draw the learning curve, also of a failed or interrupted run."""
        from rlinf_cli.report.curves import draw_curve

        if self._rehearses:
            return
        try:
            drawn = draw_curve(self._folder.metrics_file, self._folder.path, self._folder.path.name)
        except RLinfError as error:
            log.warning("%s", error)
        else:
            self._progress.curve = drawn[0] if drawn is not None else None

    def _write_report(self) -> None:
        """Write the report of a finished run; a signal aborts the report."""
        from rlinf_cli.report.curves import write_report_at_end

        if self._rehearses:
            return
        before = self._interrupts.code
        self._report = write_report_at_end(self._folder.path, console.warn, lambda: self._interrupts.code is not before)

    def _causes(self) -> list[tuple[str, str]]:
        """Return the short answer of `rlinf why` about the run."""
        from rlinf_cli.why.diagnosis import diagnose, why_brief
        from rlinf_cli.why.facts import read_facts

        return why_brief(diagnose(read_facts(self._folder)))

    def _kept(self) -> str:
        """Return a sentence on the finished steps that a checkpoint preserves, and the lost ones."""
        if not hasattr(getattr(self._job.config, "runner", None), "save_interval"):
            return "weights that clients saved are kept"
        done, latest = self._progress.step, self._folder.checkpoints.latest()
        if latest is None:
            return "nothing was saved: no checkpoint was written"
        first = latest.step + 1
        lost = f"step {first} is" if first == done else f"steps {first} to {done} are"
        return f"saved: checkpoint {latest.path.name}" + (f"; {lost} lost" if first <= done else "")

    def _say_how_to_go_on(self) -> None:
        if self._folder.checkpoints.latest() is not None:
            place = shlex.quote(f"runner.resume_dir={shown(self._folder.path)}")
            console.message(f"run the same command with `{place}` to resume from the last checkpoint")

    def _end(self, status: str, reason: str = "", *, at_once: bool = False) -> RLinfError | None:
        step = None if self._progress.started is None else self._progress.step
        return record_end(self._folder, step, status, reason, at_once=at_once)

    def _end_as_can_be(self, status: str, reason: str, *, at_once: bool = False) -> None:
        """Record the end; only print a failure of this, which must not hide the reason for the end."""
        error = self._end(status, reason, at_once=at_once)
        if error is not None:
            console.error(f"the end of the run could not be recorded in {self._folder.path}: {error.why}")

    def _close(self, status: str, code: ExitCode, reason: str = "") -> ExitCode:
        if console.verbosity.json:
            record = summary_record(
                status,
                self._recipe.name,
                self._folder.path,
                self._progress,
                reason=reason,
                report=self._report,
                unread=self._unread,
            )
            console.result_json(record)
        return code

    def _before_hard_end(self, code: ExitCode) -> None:
        """Write the end status, and print it without using the streams, which may be busy at this moment."""
        if sys.stderr.isatty():
            # Show the cursor, which the live view hides.
            os.write(2, b"\x1b[?25h")
        reason = _reason_of_end(code)
        self._end_as_can_be(RunStatus.INTERRUPTED, reason, at_once=True)
        if not console.verbosity.quiet:
            text = f"{reason} after step {self._progress.step}; the run folder is {escaped(str(self._folder.path))}\n"
            os.write(2, text.encode(errors="backslashreplace"))


def _components(job: Job) -> dict[str, str]:
    """Return the component of each worker group whose section sets `group_name`."""
    placed = job.cluster.component_placement if job.cluster is not None else ()
    groups = {name: getattr(getattr(job.config, name, None), "group_name", None) for name in placed}
    return {group: name for name, group in groups.items() if isinstance(group, str)}


def _reason_of_end(code: ExitCode) -> str:
    words = {ExitCode.INTERRUPTED: "interrupted", ExitCode.TERMINATED: "terminated"}
    return words.get(code) or f"terminated by {signal.Signals(code - 128).name}"


def _leave_cluster() -> BaseException | None:
    """Leave the cluster, if the program did not; return the first failure of a call whose result was never read."""
    engine: Any = sys.modules.get("rlinf_core.cluster.engine")
    if engine is None or engine.current() is None:
        return None
    unseen = engine.disconnect()
    return unseen[0] if unseen else None
