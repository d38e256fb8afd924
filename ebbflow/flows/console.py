"""The terminal of a run: a checklist of the flow's steps, one progress bar, events as they happen,
and a closing block.

Metaflow's own log goes to a file. On a terminal, rich draws the bar. Elsewhere the same information
is printed as plain lines, with one progress line per 10 s and no escape codes. `--verbose` shows
Metaflow's log instead, with the full plan and report.
"""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import enum
import io
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.event_payloads import (
    BudgetPayload,
    CommitFailedPayload,
    CommitPayload,
    FaultDetectedPayload,
    FaultInjectedPayload,
    GenerationEndedPayload,
    GenerationStartedPayload,
    GuardPayload,
    NoticePayload,
    OutcomePayload,
    PlacedPayload,
    StepPayload,
)
from ebbflow.core.events import Event, LogFollower
from ebbflow.core.launchers import claim_of_parent
from ebbflow.core.layout import PLAN_KEY, job_prefix, make_local_folder
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import GuardedStream, one_line, strip_colours, wrap_line
from ebbflow.flows.command_line import CommandLine, option_values
from ebbflow.flows.remote import requested_backend

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ebbflow.core.config.schema import RunConfig

WIDTH = 80
_TASK = re.compile(r"\[(?P<run>[^/\]]+)/(?P<step>\w+)/(?P<task>[^/ \]]+)")
_RUN_ID = re.compile(r"\(run-id ([^)]+)\)")
# With "|", if the locale is ASCII
_PROGRESS = re.compile(r"step (?P<step>\d+)(?:/(?P<steps>\d+))? [·|] ")
_CHECK = re.compile(r"(ok|skip|warn|FAIL)  +\S")
_MOST_UNSEEN = 200
# Metaflow's, above the message of a failed task
_HEADLINE = re.compile(r"<flow .*> failed:$|This attempt ended:$")
_PLAN_MARKS = "┌│└+|"  # each line of the full plan begins with one
# Technical steps, shown only if they fail
_QUIET_STEPS = frozenset({"_parameters", "fan_out", "join", "end"})
# Between two looks at the event log: in a local folder, elsewhere
_LOOK_SECONDS = {True: 2.0, False: 10.0}
_LINES_OF_A_TASK = 12  # lines of user code shown per task; all are in the log


class SpendQuestion(enum.Enum):
    """When to ask the user for permission to spend money."""

    NONE = enum.auto()
    AFTER_PLAN = enum.auto()
    AT_START = enum.auto()  # of a resumed run, whose plan is known


class RunView:
    """The terminal's view of one run. Its methods may be called from several threads.

    Args:
        job: name of the job; "" if it is named after its run.
        fancy: draw a live bar with rich; otherwise print plain lines.
        question: when to ask the user for permission to spend money.
    """

    def __init__(
        self,
        job: str,
        config: RunConfig | None,
        *,
        fancy: bool,
        question: SpendQuestion = SpendQuestion.NONE,
    ) -> None:
        self.job = job
        self.fancy = fancy
        self._config = config
        self._question = question
        self._lock = threading.RLock()
        self._steps: dict[str, _Step] = {}
        self._training = _Training()
        self._log: TextIO | None = None
        self._held: list[str] = []  # Metaflow's lines until the job's folder is known
        self._unseen: list[str] = []  # the last lines that Metaflow printed outside of its log
        self.task_failed = False
        self._done = threading.Event()
        self._incident: Event | None = None  # failure from which the job has not recovered yet
        self._failed = set[int]()  # generations whose failure was shown
        self._outcome = ""  # of training, as soon as it is recorded
        self._follower: LogFollower | None = None  # of the job's event log
        self._looking = threading.Lock()
        self.is_observed = False  # whether the run's observer sends the progress
        self._since = time.time()
        if fancy:
            self._live: _Bar | None = _Bar(self)
        else:
            self._live = None
        self._tail: threading.Thread | None = None

    # What Metaflow calls.

    def logged(self, body: str = "", system_msg: bool = False, head: str = "", **_: object) -> None:
        """Process a line of Metaflow's log.

        `head` names the task that printed the line; "" for the scheduler.
        """
        text = strip_colours(str(body))
        with self._lock:
            self._write_log(f"{time.strftime('%H:%M:%S')} {head}{text}")
            try:
                if task := _TASK.match(head):
                    self._task_line(task["step"], text, system=system_msg)
                elif found := _RUN_ID.search(text):
                    self._began(found[1])
            except Exception as error:  # what is shown must not end what is shown
                self._write_log(f"not shown on the terminal: {type(error).__name__}: {error}")

    def echoed(self, line: str = "", **options: Any) -> None:
        """Process a line that Metaflow prints outside of its log, such as a refusal to start."""
        text = strip_colours(str(line))
        with self._lock:
            self._write_log(text)
            self._unseen.append(text.replace("*", "") + ("\n" if options.get("nl", True) else ""))
            del self._unseen[:-_MOST_UNSEEN]

    def observed(self, line: str) -> None:
        """Show a line of the run's observer process. Its progress lines have the live page's
        figures.
        """
        found = _PROGRESS.match(line)
        if found is None:
            self.say(line)
            return
        with self._lock:
            self._progressed(found, line)

    # Steps of the flow.

    def _began(self, run: str) -> None:
        self.job = self.job or run
        if self._config is None or self._tail is not None:
            return
        from ebbflow.flows.job import RUNS

        folder = make_local_folder(RUNS, self.job, self._config.store)
        with contextlib.suppress(OSError):
            file = folder / "metaflow.log"
            # Open until `close`.
            self._log = file.open("a", encoding="utf-8", errors="backslashreplace")
        self._unseen.clear()
        steps = self._config.training.max_steps
        self._training.max_steps = steps
        if self._config.script:
            work = f"script {self._config.script}"
        else:
            work = f"{steps:,} steps"
        self.say(f"ebbflow: job {self.job}, {work}, store {self._config.store}")
        where = os.path.relpath(folder / "metaflow.log")
        self.say(f"Metaflow's log: {where} (--verbose shows it here)")
        self._tail = threading.Thread(
            target=self._follow_events, name="events to the terminal", daemon=True
        )
        self._tail.start()
        if self._question is SpendQuestion.AT_START:
            self._show_plan()

    def _task_line(self, name: str, text: str, *, system: bool) -> None:
        step = self._steps.get(name)
        if system and text.startswith("Task is starting"):
            if step is None:
                self._steps[name] = _Step(time.monotonic())
            if "retry" in text:
                self.say(f"! {name}: tried again")
        elif system and text.startswith(("Task finished", "Cloned", "Task failed")):
            self._end_step(name, failed="failed" in text)
        elif step is not None and not system:
            self._output(name, step, text)

    def _end_step(self, name: str, *, failed: bool) -> None:
        step = self._steps.pop(name, None)
        if step is None or (name in _QUIET_STEPS and not failed):
            return
        if name in ("train", "train_node"):
            self._show_events()  # the task of a job that stopped has succeeded
            if self._outcome not in ("", Outcome.COMPLETED):
                failed = True
                step.note = self._outcome.replace("_", " ")
        if step.note:
            note = f": {step.note}"
        else:
            note = ""
        seconds = f"{time.monotonic() - step.started:.1f} s"
        self.task_failed = self.task_failed or failed
        self.say(f"{'✗' if failed else '✓'} {name} {seconds}{note}")
        if name == "plan":
            self._show_plan()

    def _output(self, name: str, step: _Step, text: str) -> None:
        """Show a line of a task's output, unless the view shows the same content in another form."""
        text = text.strip()
        if found := _PROGRESS.match(text):
            if not self.is_observed:
                self._progressed(found, text)
        elif name == "preflight":
            if found := _CHECK.match(text):
                step.show = found[1] in ("warn", "FAIL")
            elif text.startswith("preflight: "):
                step.note = text.removeprefix("preflight: ")
                step.show = False
            if step.show:
                self.say(f"  {text}")
        elif _HEADLINE.match(text):
            return
        elif name == "prepare" and not step.note:
            step.note = text.partition(", unigram")[0]
        elif (
            text
            and not (name == "plan" and text[0] in _PLAN_MARKS)
            and not (name == "start" and step.lines == 0)
        ):
            if step.lines < _LINES_OF_A_TASK:
                self.say(f"  {text}")
            elif step.lines == _LINES_OF_A_TASK:
                self.say("  … (more lines are in Metaflow's log)")
        step.lines += 1

    def _progressed(self, found: re.Match[str], text: str) -> None:
        now = self._training
        now.step = int(found["step"])
        now.max_steps = int(found["steps"] or 0)
        (_, *figures) = re.split(r" [·|] ", text)
        share = ""
        if now.max_steps:
            share = f" {figures.pop(0)}"
        now.eta = next((part for part in figures if part.startswith("ETA ")), "")
        now.figures = [_short(part) for part in figures if part != now.eta]
        if self._live is None:
            steps = f"  {now.step:,}"
            if now.max_steps:
                steps = f"  {now.step:,}/{now.max_steps:,}{share}"
            self.say(" · ".join(filter(None, [steps, *now.figures, now.eta])))

    def _show_plan(self) -> None:
        from ebbflow.cost.plan.plan import Plan
        from ebbflow.cost.plan.plan_text import render_brief

        store = self._store()
        try:
            if store is None:
                plan = None
            else:
                plan = Plan.from_json(json.loads(store.get(PLAN_KEY)))
        except (InfraError, ValueError, KeyError, TypeError):
            plan = None  # the plan is in Metaflow's log
        if plan is None:
            if self._question is not SpendQuestion.NONE:
                self.say("! the plan could not be read; it is in Metaflow's log")
                self._question = SpendQuestion.NONE
                self.require_yes()
            return
        for line in render_brief(plan, width=self.width - 2):
            self.say(f"  {line}")
        asks = self._question is not SpendQuestion.NONE
        if asks and plan.costs_money and plan.refusal is None:
            self._question = SpendQuestion.NONE
            self.require_yes()

    def require_yes(self, question: str = "start and pay for it?") -> None:
        """Ask the user for permission to spend money, while Metaflow's scheduler waits.

        Any answer but yes ends the run.
        """
        with self._live.paused() if self._live is not None else contextlib.nullcontext():
            try:
                answer = input(f"{question} [y/N] ")
            except EOFError:
                answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            self.say(
                "not started: no machine for training was paid for (--yes starts without the "
                "question)"
            )
            raise KeyboardInterrupt

    # Events of the job.

    def _store(self) -> Store | None:
        if self._config is None or not self.job:
            return None
        try:
            return Store.open(self._config.store, request_timeout_seconds=10.0).sub(
                job_prefix(self.job)
            )
        except InfraError:
            return None

    def _follow_events(self) -> None:
        store = self._store()
        if store is None:
            return
        pause = shortest = _LOOK_SECONDS[store.local_path("events") is not None]
        while not self._done.wait(pause):
            looked = time.monotonic()
            self._show_events()
            pause = max(shortest, 20 * (time.monotonic() - looked))  # a long job has many segments

    def _show_events(self) -> None:
        found: list[Event] = []
        # The next look may read what this one cannot
        with contextlib.suppress(InfraError), self._looking:
            if self._follower is None:
                store = self._store()
                if store is None:
                    return
                self._follower = LogFollower(store, wanted=_is_shown)
            for new in self._follower.read_new():
                found += new
        for event in sorted(found, key=lambda event: event.t_wall):
            # Of another version
            with self._lock, contextlib.suppress(InfraError, KeyError, TypeError, ValueError):
                if event.t_wall >= self._since:
                    self._happened(event)

    # One branch for each kind of event.
    def _happened(self, event: Event) -> None:  # noqa: C901, PLR0912
        payload = event.payload
        if event.step is None:
            at = ""
        else:
            at = f" at step {event.step:,}"
        if isinstance(payload, StepPayload):
            self._stepped(event)
        elif isinstance(payload, CommitPayload):
            self._training.commit = event.step
        elif isinstance(payload, CommitFailedPayload):
            self.say(f"! commit of step {event.step} failed: {payload.message}")
        elif isinstance(payload, NoticePayload):
            if payload.source is None:  # a rank's remark, which the rank has printed
                return
            if payload.seconds_left is None:
                within = ""
            else:
                within = f", {payload.seconds_left:.0f} s left"
            self.say(
                f"! notice to node {event.node}: {payload.source} "
                f"{payload.action}{within}: {payload.does}"
            )
        elif isinstance(payload, FaultInjectedPayload):
            self.say(f"! rehearsal{at}: {payload.kind} of {payload.target}")
        elif isinstance(payload, FaultDetectedPayload | GenerationEndedPayload) and payload.culprit:
            if event.generation not in self._failed:
                self.say(f"✗ {payload.culprit}: {str(payload.reason).replace('_', ' ')}")
                self._failed.add(event.generation)
                self._incident = event
        elif isinstance(payload, OutcomePayload):
            self._outcome = str(payload.outcome)
        elif isinstance(payload, GenerationStartedPayload) and event.generation > 1:
            self.say(
                f"› generation {event.generation} starts from step {payload.parent_step or 0:,}"
            )
        elif isinstance(payload, GuardPayload):
            self.say(f"! guard{at}: {payload.action}: {payload.reason}")
        elif isinstance(payload, BudgetPayload) and payload.budget_usd is not None:
            self.say(f"! budget: {payload.threshold:.0%} of ${payload.budget_usd:.2f} is spent")
        elif isinstance(payload, PlacedPayload):
            self.say(f"› attempt {payload.attempt}: {payload.why}")

    def _stepped(self, event: Event) -> None:
        self._training.step = event.step or 0
        before = self._incident
        if before is not None and event.generation > before.generation:
            seconds = event.t_wall - before.t_wall
            self.say(f"✓ training again after {seconds:.1f} s, from step {event.step:,}")
            self._incident = None

    # Output.

    @property
    def width(self) -> int:
        return min(shutil.get_terminal_size((WIDTH, 24)).columns, 120)

    @property
    def closing_width(self) -> int:
        if self.fancy:
            return self.width
        # Log viewers wrap lines themselves, and a search needs whole lines
        return 10_000

    def say(self, text: str) -> None:
        """Print one message. On a terminal, wrap it and indent its continuation lines."""
        with self._lock:
            if self._live is None:
                print(text[: len(text) - len(text.lstrip(" "))] + one_line(text), flush=True)
                return
            for line in wrap_line(text, self.width, indent="    "):
                self._live.print(line)

    def close(self, *, explained: bool) -> None:
        """Close the view and remove the progress bar.

        If neither a report nor a task explains the run's end, print the end of Metaflow's log.
        """
        self._done.set()
        if self._tail is not None:
            self._tail.join(5.0)
        if self._live is not None:
            self._live.stop()
        with self._lock:
            if not (explained or self.task_failed) and self._unseen:
                print("".join(self._unseen), end="", file=sys.stderr, flush=True)
            if self._log is not None:
                self._log.close()
                self._log = None

    def state(self) -> tuple[list[str], _Training, float]:
        """Return the running steps' names, the training progress, and the seconds since the newest
        step began.
        """
        # Without the lock: rich calls this while it holds its own, and `say` takes them in the
        # other order.
        steps = [(name, step) for name, step in list(self._steps.items()) if name != "_parameters"]
        began = max((step.started for _, step in steps), default=time.monotonic())
        return [name for name, _ in steps], self._training, time.monotonic() - began

    def _write_log(self, line: str) -> None:
        self._held.append(line)
        if self._log is not None:
            with contextlib.suppress(OSError, ValueError):  # a full disk must not end the run
                self._log.write("\n".join([*self._held, ""]))
                self._log.flush()
            self._held.clear()


def open_view(
    flow_class: type,
    job: str,
    config: RunConfig | None,
    flags: Collection[str],
    line: CommandLine,
) -> RunView | None:
    """Return the view that replaces Metaflow's log on the terminal, or None with --verbose.

    On a terminal, the user is asked once before cloud money is spent: after the plan if the steps
    up to it run on this machine, otherwise before the first step. Raises KeyboardInterrupt if the
    answer is not yes.
    """
    verbose = "--verbose" in flags
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    backend = requested_backend(line.argv)
    places = option_values(line.argv, "--with")
    # A supervisor's runs have its terminal, and nobody may be there.
    ask = backend is not None and on_terminal and "--yes" not in flags and claim_of_parent() is None
    resumes = line.command == "resume"  # its plan is known
    first = ask and (verbose or not (resumes or "cloud" in places))
    if not ask or first:
        question = SpendQuestion.NONE
    elif resumes:
        question = SpendQuestion.AT_START
    else:
        question = SpendQuestion.AFTER_PLAN
    view = RunView(job, config, fancy=not verbose and is_terminal(), question=question)
    shown = False
    try:
        shown = not verbose and show_run(view, flow_class)
        if first or (ask and not shown):
            if config is None:
                budget = None
            else:
                budget = config.cost.budget_usd
            if budget is None:
                limit = "without a limit (cost.budget_usd)"
            else:
                limit = f"for at most ${budget:.2f}"
            view.require_yes(
                f"start on {backend} and pay for it, {limit}? `ebbflow plan` shows the estimate."
            )
    finally:
        if not shown:
            view.close(explained=True)
    if shown:
        return view
    return None


def is_terminal() -> bool:
    """Return whether the launcher's output is a terminal on which the cursor can be moved."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def show_run(view: RunView, flow_class: type) -> bool:
    """Send Metaflow's own log lines to the terminal view.

    Return False if this Metaflow release has no way to do it.
    """
    from metaflow.parameters import flow_context

    # Else the command line lacks the options of its decorators, such as --branch
    with flow_context(flow_class):
        from metaflow import cli

    if not (callable(getattr(cli, "logger", None)) and callable(getattr(cli, "echo_always", None))):
        return False
    cli.logger = view.logged
    cli.echo_always = view.echoed
    return True


@dataclass
class _Step:
    started: float
    note: str = ""
    lines: int = 0
    show: bool = False  # whether the next indented line continues one that is shown


@dataclass
class _Training:
    """Progress for the bar: step and commit from events, all other figures from rank 0's newest
    progress line.
    """

    step: int = 0
    max_steps: int = 0
    figures: list[str] = field(default_factory=list)
    eta: str = ""
    commit: int | None = None


class _Bar:
    """Live display at the bottom of a terminal, drawn by rich: the running step, the progress bar,
    and rank 0's figures.
    """

    def __init__(self, view: RunView) -> None:
        from rich.console import Console
        from rich.live import Live

        # The guard would escape the codes that move the cursor. `say` escapes all text itself.
        if isinstance(sys.stdout, GuardedStream):
            file = sys.stdout.unguarded
        else:
            file = sys.stdout
        self._console = Console(
            file=file, markup=False, highlight=False, emoji=False, soft_wrap=False
        )
        self._view = view
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._streams = sys.stdout, sys.stderr
        self.start()

    def start(self) -> None:
        lines = _Lines(self._view)  # prints of this process would move the bar
        sys.stdout = lines
        if self._streams[1].isatty():
            sys.stderr = lines
        else:
            sys.stderr = self._streams[1]
        self._live.start()

    def print(self, line: str) -> None:
        from rich.text import Text

        styles = {"✓": "green", "✗": "bold red", "!": "yellow", "›": "cyan"}
        text = Text(line, styles.get(line.lstrip()[:1], ""), no_wrap=True, overflow="ignore")
        self._console.print(text, crop=False)

    def stop(self) -> None:
        self._live.stop()
        sys.stdout, sys.stderr = self._streams

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        names, training, seconds = self._view.state()
        if not names:
            return Text("")
        head = Table.grid(padding=(0, 1))
        spinner = Spinner("line", style="cyan")
        clock = f"{seconds // 60:.0f}:{seconds % 60:02.0f}"
        if ("train" not in names and "train_node" not in names) or not training.step:
            head.add_row(spinner, Text(f"{', '.join(names)} {clock}"))
            return head
        share = training.step / max(training.max_steps, 1)
        width = max(self._view.width - 48, 10)
        bar = ProgressBar(
            training.max_steps,
            training.step,
            width=width,
            complete_style="cyan",
            finished_style="green",
        )
        count = f"{training.step:,}/{training.max_steps:,} {share:.0%} {training.eta}"
        head.add_row(spinner, Text(f"{names[-1]} {clock}"), bar, Text(count))
        if training.commit is None:
            newest = ""
        else:
            newest = f"commit {training.commit}"
        figures = [newest if newest and "commit" in part else part for part in training.figures]
        lines = wrap_line(f"  {' · '.join(figures)}", self._view.width)
        return Group(head, Text("\n".join(lines), style="dim"))


class _Lines(io.TextIOBase):
    """Text stream whose lines appear above the bar."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._rest = ""

    def write(self, text: str) -> int:
        # Click tries bytes to find out whether a stream is one of text
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        *lines, self._rest = f"{self._rest}{text}".split("\n")
        for line in lines:
            self._view.say(line)
        return len(text)


def _short(figure: str) -> str:
    return (
        figure.replace(" of measured peak", "")
        .replace(" price)", ")")
        .replace("unknown (faster than the peak measured on a busy machine)", "unknown")
    )


def _is_shown(key: str) -> bool:
    """Return whether the view reads a segment of the event log, which must be from rank 0, an agent
    or a submitter.
    """
    name = key.rpartition("/")[2]
    return name.startswith("0-0-") or "-agent-" in name or "-submit" in name
