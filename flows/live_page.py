"""The live page of a run: a process beside the launcher keeps runs/<job>/live.html current until the run ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from ebbflow.flows.job import RUNS, KnownJob, local_folder, mark_latest, write_atomically
from ebbflow.infra.layout import NOTE
from ebbflow.infra.program import python_path

LIVE_PAGE = "live.html"
SWITCH = "EBBFLOW_LIVE_PAGE"  # 0: no live page
_WAIT_SECONDS = 0.1
_END_SECONDS = 3.0


class LivePageWriter:
    """Starts the process that writes the page, once the job has a name, and ends it.

    The thread that starts the process lives as long as it: the launcher waits only for children of its main thread, so
    that a signal to the run does not wait for the page.
    """

    def __init__(self, job: str, store: str, run_id_file: Path) -> None:
        self._job, self._store, self._run_id_file = job, store, run_id_file
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live page", daemon=True)

    def start(self) -> None:
        if os.environ.get(SWITCH) != "0":
            self._thread.start()

    def end(self) -> None:
        """End the process, so that it does not overwrite the report."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(2 * _END_SECONDS)

    def _run(self) -> None:
        job = self._job
        while not job and not self._ending.wait(_WAIT_SECONDS):  # a job without a name is named after its run
            with contextlib.suppress(OSError):
                job = self._run_id_file.read_text().strip()
        if self._ending.is_set():
            return
        try:
            folder = local_folder(job, self._store)
            write_atomically(folder / NOTE, KnownJob(job, self._store).note())
            mark_latest(job)
            page = folder / LIVE_PAGE
            words = [sys.executable, "-m", "ebbflow", "watch", job, "--store", self._store]
            process = subprocess.Popen(
                [*words, "--write", str(page), "--parent", str(os.getpid())],
                env={**os.environ, "PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            print(f"no live page: {error}", file=sys.stderr)
            return
        print(f"live page: {RUNS / 'latest' / LIVE_PAGE}", flush=True)
        self._ending.wait()
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def finish_page(folder: Path) -> None:
    """Replace the live page by the report, which an open page shows within seconds."""
    with contextlib.suppress(OSError):
        write_atomically(folder / LIVE_PAGE, (folder / "report.html").read_bytes())
