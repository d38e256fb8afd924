"""`ebbflow observe`: run Prometheus with Ebbflow's alert rules for the jobs on this machine.

The command needs no root rights.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ebbflow.core.errors import Outcome
from ebbflow.core.layout import runs_folder
from ebbflow.core.metrics import PORTS_TRIED, MetricsServer
from ebbflow.core.process import die_with_parent

RULES = Path(__file__).with_name("rules.yaml")
_NAME = re.compile(r"# (?:HELP|TYPE) (\S+) ")


def merge_pages(pages: Sequence[str]) -> bytes:
    """Merge several pages in Prometheus' text format into one.

    Each family's help and type appear once, before all of its samples.
    """
    heads: dict[str, dict[str, None]] = {}
    samples: dict[str, list[str]] = {}
    for page in pages:
        family = ""
        for line in page.splitlines():
            name = _NAME.match(line)
            if name is not None:
                family = name[1]
                heads.setdefault(family, {})[line] = None
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(line)
    lines: list[str] = []
    for family, head in heads.items():
        lines += head
        lines += samples.get(family, [])
    return "".join(f"{line}\n" for line in lines).encode()


def read_job_pages(runs: Path) -> bytes:
    """Read the metrics.prom files of all ended jobs in runs/, and return them as one page."""
    pages = []
    for path in sorted(runs.glob("*/metrics.prom")):
        if path.parent.name != "latest":
            with contextlib.suppress(OSError, UnicodeDecodeError):  # being replaced, or damaged
                pages.append(path.read_text())
    return merge_pages(pages)


def prometheus_config(
    nodes: Sequence[str], jobs: str, *, interval_seconds: float
) -> dict[str, object]:
    """Build Prometheus' configuration as an object that is valid YAML once it is written as JSON.

    Args:
        nodes: Addresses at which nodes may serve /metrics (`metrics.port`).
        jobs: Address of the page with all ended jobs.
    """
    scrapes = [
        {"job_name": name, "honor_labels": True, "static_configs": [{"targets": list(targets)}]}
        for name, targets in (("ebbflow", nodes), ("ebbflow-jobs", [jobs]))
    ]
    every = f"{round(1000 * interval_seconds)}ms"
    timing = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    return {"global": timing, "rule_files": [str(RULES)], "scrape_configs": scrapes}


def add_observe_command(commands: argparse._SubParsersAction, project_root: Path) -> None:
    parser = commands.add_parser(
        "observe", help="watch this machine's jobs with Prometheus, alert rules included"
    )
    parser.add_argument(
        "--port", type=int, default=9090, help="of Prometheus, on 127.0.0.1 (%(default)s)"
    )
    parser.add_argument(
        "--metrics-port", type=int, default=9400, help="metrics.port of the jobs (%(default)s)"
    )
    parser.add_argument(
        "--interval", type=float, default=5.0, help="seconds between two scrapes (%(default)s)"
    )
    parser.set_defaults(command=lambda options: observe(options, runs_folder(project_root)))


def observe(options: argparse.Namespace, runs: Path) -> int:
    """Run Prometheus until it ends or Ctrl-C is pressed, and return its exit code.

    The exit code is 3 if Prometheus is not installed, and 2 if a port is unusable.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        print(
            "prometheus is not installed; fix: apt-get install prometheus (Debian, Ubuntu)",
            file=sys.stderr,
        )
        return Outcome.PREFLIGHT.exit_code
    folder = runs / ".observe"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        socket.create_server(("127.0.0.1", options.port)).close()
        server = MetricsServer(options.port + 1, lambda: read_job_pages(runs), address="127.0.0.1")
    except (OSError, OverflowError) as error:  # the latter for a number above 65535
        print(
            f"port {options.port} and the next one cannot be used: {error}; fix: --port",
            file=sys.stderr,
        )
        return Outcome.CONFIG.exit_code
    nodes = [
        f"127.0.0.1:{port}"
        for port in range(options.metrics_port, options.metrics_port + PORTS_TRIED)
    ]
    config = folder / "prometheus.json"
    found = prometheus_config(nodes, f"127.0.0.1:{server.port}", interval_seconds=options.interval)
    config.write_text(json.dumps(found, indent=1))
    print(
        f"Prometheus: http://127.0.0.1:{options.port} (alerts: /alerts); data and configuration "
        f"in {folder}"
    )
    print(
        f"it scrapes running jobs with --set metrics.port={options.metrics_port}, and "
        f"{runs}/*/metrics.prom",
        flush=True,
    )
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{options.port}", "--log.level=warn"]
    parent = os.getpid()
    with subprocess.Popen(
        command, preexec_fn=lambda: die_with_parent(parent, by=signal.SIGTERM)
    ) as process:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: process.terminate())
        code = process.wait()
    server.close()
    return code
