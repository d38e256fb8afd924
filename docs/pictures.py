"""Take the pictures of the pages: `make pictures` writes docs/images/*.png (needs chromium).

Each answers a question. report.png: what did an interruption cost? live.png: is a stop safe? forecast.png: when does
the job end, and for how much? They are of a real run. slow-rank.png (which rank is slow?) and failure.png (why did it
fail?) are of event logs that the tests make.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_IMAGES = ROOT / "docs" / "images"
_WIDTH = 1000
_HALF = re.compile(r"Running: [0-9,]+ of [0-9,]+ steps \((4[5-9]|5[0-9]) %\)")


def render_made_jobs(folder: Path) -> None:
    """Write the pages of a job with a slow rank and of a failed job where those of real jobs are."""
    from ebbflow.cost.report.render_html import render
    from ebbflow.cost.report.report import build_report
    from ebbflow.infra.events import STEP
    from tests.support.timelines import GangLog, plan_event
    from tests.unit.test_report import interrupted_job

    gang = GangLog(1, 1.0, [[0, 1], [2, 3]])
    gang.phase("startup", 5.0)
    gang.steps(1, 40, useful_step=1.0)
    for one in gang.events:
        if one.name == STEP:
            one.data.update(slowest_rank=2 if (one.step or 0) % 8 else 1, slowest_ratio=1.62)
    gang.outcome("completed")
    gang.ended("completed", 46.0)
    jobs = {"slow-rank": [plan_event(), *gang.events], "failing": interrupted_job(completed=False)}
    for job, events in jobs.items():
        (folder / "runs" / job).mkdir(parents=True)
        (folder / "runs" / job / "report.html").write_text(render(build_report(events)))


def main() -> None:
    from tests.support.browser import Browser

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = {"EBBFLOW_RUNS": f"{folder}/runs", "METAFLOW_DATASTORE_SYSROOT_LOCAL": f"{folder}/metaflow"}
        words = [sys.executable, "flows/train_flow.py", "run", "--set", f"store={folder}/store", *sys.argv[1:]]

        def start(job: str, *more: str) -> subprocess.Popen[bytes]:
            with open(folder / f"{job}.txt", "wb") as log:
                return subprocess.Popen(
                    [*words, "--job", job, *more], env={**os.environ, **own}, cwd=ROOT, stdout=log, stderr=log
                )

        def take(job: str, picture: str, *, page: str = "report.html", part: str = "", height: int = 1040) -> None:
            """Take the page from its top, or from its element `part`."""
            browser.open((folder / "runs" / job / page).as_uri(), width=_WIDTH)
            if part == "#figure-usd":
                browser.evaluate("document.querySelector('#axis input[value=seconds]').click()")
            top = browser.evaluate(f"document.querySelector('{part}').getBoundingClientRect().top - 12") if part else 0
            (_IMAGES / f"{picture}.png").write_bytes(browser.picture(top=int(top), height=height))

        with Browser(folder) as browser:
            render_made_jobs(folder)
            take("slow-rank", "slow-rank", part="#ranks", height=330)
            take("failing", "failure", height=660)
            run = start("first-run", "--rehearse", "node-loss@60%")
            live = folder / "runs" / "first-run" / "live.html"
            while run.poll() is None and not (live.exists() and _HALF.search(live.read_text())):
                time.sleep(0.5)
            take("first-run", "live", page="live.html", height=820)
            take("first-run", "forecast", page="live.html", part="#figure-usd", height=300)
            assert run.wait() == 0, (folder / "first-run.txt").read_text()
            take("first-run", "report")
        print((folder / "first-run.txt").read_text())


if __name__ == "__main__":
    main()
