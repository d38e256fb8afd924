"""Take the pictures of the pages: `make pictures` writes docs/images/*.png (needs chromium).

Each answers a question, and is of a real run. report.png: what did an interruption cost? live.png:
is a stop safe? forecast.png: when does the job end, and for how much? slow-rank.png: which rank is
slow? failure.png: why did it fail?
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
# The example job, in which rank 1 sleeps 60 ms in each step, or meets a drawing that it cannot
# read.
_TROUBLED = (
    "--config",
    "examples/shapes.yaml",
    "--set",
    "workload=tests.support.troubled_shapes:TroubledShapes",
)
_HALF = re.compile(r"Running: [0-9,]+ of [0-9,]+ steps \((4[5-9]|5[0-9]) %\)")


def main() -> None:
    from tests.support.browser import Browser

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = {
            "EBBFLOW_RUNS": f"{folder}/runs",
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": f"{folder}/metaflow",
        }
        words = [
            sys.executable,
            "flows/train_flow.py",
            "run",
            "--set",
            f"store={folder}/store",
            *sys.argv[1:],
        ]

        def start(job: str, *more: str) -> subprocess.Popen[bytes]:
            with open(folder / f"{job}.txt", "wb") as log:
                return subprocess.Popen(
                    [*words, "--job", job, *more],
                    env={**os.environ, **own},
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                )

        def take(
            job: str, picture: str, *, page: str = "report.html", part: str = "", height: int = 1040
        ) -> None:
            """Take the page from its top, or from its element `part`."""
            browser.open((folder / "runs" / job / page).as_uri(), width=_WIDTH)
            if part:
                top = browser.evaluate(
                    f"document.querySelector('{part}').getBoundingClientRect().top - 12"
                )
            else:
                top = 0
            (_IMAGES / f"{picture}.png").write_bytes(browser.picture(top=int(top), height=height))

        with Browser(folder) as browser:
            slow = start("slow-rank", *_TROUBLED, "--set", "workload_options.slow=forward")
            assert slow.wait() == 0, (folder / "slow-rank.txt").read_text()
            take("slow-rank", "slow-rank", part="#ranks", height=300)
            assert start("failing", *_TROUBLED, "--set", "workload_options.bad=5000").wait() != 0
            take("failing", "failure", height=1400)
            run = start("first-run", "--rehearse", "node-loss@60%")
            live = folder / "runs" / "first-run" / "live.html"
            while run.poll() is None and not (live.exists() and _HALF.search(live.read_text())):
                time.sleep(0.5)
            take("first-run", "live", page="live.html", height=820)
            take("first-run", "forecast", page="live.html", part="#figure-usd", height=280)
            assert run.wait() == 0, (folder / "first-run.txt").read_text()
            take("first-run", "report")
        print((folder / "first-run.txt").read_text())


if __name__ == "__main__":
    main()
