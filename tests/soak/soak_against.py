"""`diagnose --against`: one of two nodes slows down in a real job, and is compared with a sound
job.

    python -m tests.soak.soak_against [CASE …] [--seeds N]

The node that becomes slow and the step from which it is are drawn from the seed. Computation and
data are slowed by pauses, collectives by a delay of each send to a socket (needs a C compiler). The
command fails if a comparison blames another part or node, or another step than the first slow ones.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import Event, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.rank_logs import LogLine, read_logs
from ebbflow.core.store import Store
from ebbflow.diagnose.against import Comparison, compare_jobs
from ebbflow.training.launch.agent import LocalGang
from tests.support.gangs import endless_gang

STEPS = 50
CASES = {
    "slow_down": "compute",
    "read_slowly": "data_wait",
    "slow_network": "waiting for other ranks",
}
_LATE_STEPS = 3


# Loaded into the ranks of a node: each send to a socket takes 10 ms more, as soon as the file
# exists.
_SLOW_SENDS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
static void delay(int fd) {
    struct stat about;
    const char *mark = getenv("SLOW_SENDS");
    if (mark && !fstat(fd, &about) && S_ISSOCK(about.st_mode) && !access(mark, F_OK)) usleep(10000);
}
#define SLOW(name, rest, given) \\
    ssize_t name rest { \\
        static ssize_t(*next) rest; \\
        if (!next) *(void **)&next = dlsym(RTLD_NEXT, #name); \\
        delay(fd); \\
        return next given; \\
    }
SLOW(writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
SLOW(sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
SLOW(send, (int fd, const void *data, size_t size, int flags), (fd, data, size, flags))
"""


def run_job(name: str, folder: Path, guilty: int, step: int) -> tuple[list[Event], list[LogLine]]:
    """Run a job of two nodes on this machine, with the trouble `name` from `step` on."""
    folder.mkdir()
    spec = endless_gang(folder, survival={"hang_floor_seconds": 30.0})
    mark = folder / "mark"
    if name in ("slow_down", "read_slowly"):
        trouble = name
    else:
        trouble = "run_soundly"
    options = {"trouble": trouble, "guilty": guilty, "step": step, "mark": str(mark)}
    settings = {"workload": "tests.support.headline:Headline", "workload_options": options}
    training = {
        "batch_size": 8,
        "max_steps": STEPS,
        "scheduler": {"type": "constant", "warmup_steps": 0},
    }
    config = RunConfig.model_validate(
        {
            **spec.config.model_dump(mode="json"),
            **settings,
            "training": training,
            "parallel": {"mode": "ddp"},
        }
    )
    prepared = {"fingerprint": "points", "weight_unit": "points"}
    spec = replace(spec, config=config, prepared=prepared, job=folder.name)
    library = folder / "slow_sends.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"],
        input=_SLOW_SENDS,
        text=True,
        check=True,
    )

    def command(node: int) -> list[str]:
        slow = name == "slow_network" and node == guilty
        if slow:
            return ["env", f"LD_PRELOAD={library}", f"SLOW_SENDS={mark}"]
        return []

    LocalGang(spec, folder / "gang", folder / "output.log", command=command).wait(120)
    store = Store.open(spec.store_uri).sub(job_prefix(spec.job))
    return read_events(store), read_logs([folder], [store]).lines


def judge(name: str, guilty: int, step: int, found: Comparison) -> list[str]:
    """Return what is wrong with a comparison."""
    # A start or an end may be slow by the machine
    parts = [part for part in found.slower if part.since_step is not None]
    if name == "run_soundly":
        if parts or found.straggler:
            return [found.render()]
        return []
    first = next(iter(parts), None)
    if first is None:
        return ["nothing is slower"]
    if name == "slow_network":
        rank = None
    else:
        rank = guilty
    late = first.since_step is None or not step <= first.since_step <= step + _LATE_STEPS
    if first.part != CASES[name]:
        wrong = [f"blames {first.part}"]
    else:
        wrong = []
    if first.rank != rank:
        wrong += [f"blames rank {first.rank} of node {first.node}"]
    if late:
        wrong += [f"since step {first.since_step}"]
    if name == "slow_down" and (found.straggler is None or found.straggler.rank != guilty):
        wrong.append("no straggler")
    return wrong + ([f"and {parts[1].part}"] if len(parts) > 1 else [])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.soak_against", description=__doc__)
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)} (all)"
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (1)")
    given = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory(prefix="ebbflow-against-") as folder:
            sound = run_job("run_soundly", Path(folder, "sound"), 0, 1)
            for name in given.cases or ["run_soundly", *CASES]:
                draw = random.Random(f"{name} {seed}")
                guilty = draw.randrange(2)
                step = draw.randrange(8, 30)
                found = compare_jobs(*run_job(name, Path(folder, name), guilty, step), *sound)
                wrong = judge(name, guilty, step, found)
                rows.append(
                    {"case": name, "seed": seed, "guilty": guilty, "step": step, "wrong": wrong}
                )
                print(json.dumps(rows[-1] | {"text": found.render().splitlines()[:4]}), flush=True)
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
