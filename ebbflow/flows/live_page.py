"""The live page of a run, runs/<job>/live.html: the process that keeps it current, and its copy as a
card.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.layout import KnownJob, remember_job
from ebbflow.core.observer_process import LIVE_PAGE, shows_live_page, start_observer
from ebbflow.core.store.marker import expected_marker_id
from ebbflow.flows.job import RUNS

_WAIT_SECONDS = 0.1
_CARD_SECONDS = 10.0


class RunObserver:
    """Manager of the process that observes a run, and of the card with the run's live page.

    A thread starts the process as soon as the job has a name, and stores a copy of the live page as
    a card every few seconds.
    """

    def __init__(
        self, flow: str, job: str, config: RunConfig, run_id_file: Path, tell: Callable[[str], None]
    ) -> None:
        self._tell = tell  # prints a line for the user
        self._flow = flow
        self._job = job
        self._store = config.store
        self._run_id_file = run_id_file
        self._config = config.model_dump(mode="json")
        self._run = ""  # Metaflow's id, once it is known
        self._page: Path | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="observer of the run", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """End the observer process, so that it does not overwrite the report."""
        self._run_id()  # the launcher deletes the file
        self._ending.set()
        self._thread.join()

    def save_card(self) -> None:
        """Store a copy of the page as a card of the run.

        After an unexpected error, later calls store no card.
        """
        from ebbflow.flows.cards import save_live_card

        if self._page is None or not self._run_id():
            return
        try:
            save_live_card(self._flow, self._run, self._page.read_text())
        except Exception as error:  # Metaflow's client and its storages raise many kinds of errors
            if self._ending.is_set() or not isinstance(error, LookupError | OSError):
                self._tell(f"no live card: {type(error).__name__}: {error}")
                self._page = None

    def _run_id(self) -> str:
        if not self._run:
            with contextlib.suppress(OSError):
                self._run = self._run_id_file.read_text().strip()
        return self._run

    def _keep(self) -> None:
        while not self._run_id() and not self._ending.wait(_WAIT_SECONDS):
            # Until Metaflow has accepted the options: before, there is no run whose page `latest`
            # could be
            pass
        if self._ending.is_set():
            return
        job = self._job or self._run_id()
        if shows_live_page():
            try:
                known = KnownJob(job, self._store, expected_marker_id(self._store))
                self._page = remember_job(RUNS, known) / LIVE_PAGE
            except OSError as error:
                self._tell(f"no live page: {error}")
        observer = start_observer(
            job,
            self._store,
            self._config,
            page=self._page,
            tell=self._tell,
            shows_progress=self._page is not None,
        )
        if self._page is not None:
            self._tell(f"live page: {_shown_path(RUNS / 'latest' / LIVE_PAGE)}")
        while not self._ending.wait(_CARD_SECONDS):
            self.save_card()
        if observer is not None:
            observer.end()


def task_with_card(word: str, records: Path) -> str:
    """Return the pathspec `word`, with `report` replaced by `start` if the run ended before its
    step `report`.

    Such a run has only the card of its step `start`.
    """
    run, _, step = word.rpartition("/")
    if word.startswith(("/", ".")):
        return word  # a file
    with contextlib.suppress(OSError, StopIteration):
        steps = next(records.glob("*/latest_run")).parent / (
            run or next(records.glob("*/latest_run")).read_text()
        )
        if step == "report" and steps.is_dir() and not (steps / step).is_dir():
            return f"{run}/start".removeprefix("/")
    return word


def _shown_path(path: Path) -> Path:
    if path.is_relative_to(Path.cwd()):
        return path.relative_to(Path.cwd())
    return path
