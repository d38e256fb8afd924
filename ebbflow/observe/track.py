"""`ebbflow track`: send an ended job's metrics to trackers that do not have all of them yet.

While a job runs, its observer (`ebbflow.observe.observer`) sends them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import NotificationsConfig, RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.process import run_command
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import guard_terminal
from ebbflow.cost.errors import ReportError
from ebbflow.cost.jobs import find_job_uri, find_running_launcher
from ebbflow.observe.feeds import JobFeeds
from ebbflow.observe.observer import JobObserver, observe, print_line
from ebbflow.observe.watch import LiveReport

_REQUEST_SECONDS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    guard_terminal()
    parser = argparse.ArgumentParser(
        prog="ebbflow track",
        description="Send a job's metrics to trackers, as far as they lack them.",
    )
    parser.add_argument(
        "job", nargs="?", default="latest", metavar="RUN", help="name, folder or s3:// URI"
    )
    parser.add_argument(
        "--store", default=None, metavar="URI", help="the job's store, if not known to this machine"
    )
    parser.add_argument(
        "--config", default=None, metavar="FILE", help="take trackers from this file, not the job's"
    )
    options = parser.parse_args(list(sys.argv[1:] if arguments is None else arguments)[1:])
    return run_command(lambda: _track(options))


def _track(arguments: argparse.Namespace) -> int:
    place = find_job_uri(arguments.job, arguments.store)
    store = Store.open(place, request_timeout_seconds=_REQUEST_SECONDS)
    config = _own_config(arguments, store)
    feeds = JobFeeds(store, Path(place).name, config, print_line, wait_seconds=0.0)
    feeds.start()
    observer = JobObserver(LiveReport(arguments.job, arguments.store), [feeds])
    ending = threading.Event()
    ending.set()  # the job has ended
    done = observe(observer, ending, parent=0)
    sys.stdout.flush()
    # Libraries wait for their servers as the interpreter ends
    os._exit(Outcome.COMPLETED.exit_code if done else Outcome.FAILED.exit_code)


def _own_config(arguments: argparse.Namespace, store: Store) -> RunConfig:
    """Return the job's configuration, without notifications.

    Raises ReportError if the job is running or has no trackers.
    """
    if find_running_launcher(arguments.job, (), arguments.store) is not None:
        raise ReportError(f"job {arguments.job} is running; fix: wait until it has ended")
    if arguments.config is not None:
        config = load_config(arguments.config, project_root=PROJECT_ROOT).config
    else:
        config = RunConfig.model_validate(json.loads(store.get("config.json"))["config"])
    if not config.trackers:
        raise ReportError(
            f"job {arguments.job} has no trackers; fix: --config with a file that has trackers"
        )
    return config.model_copy(update={"notifications": NotificationsConfig()})


if __name__ == "__main__":
    sys.exit(main())
