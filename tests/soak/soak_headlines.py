"""The guides' headline troubles in real processes of two ranks: family, rank, seconds to the
verdict, starts.

    python -m tests.soak.soak_headlines [CASE …] [--seeds N] [--json FILE]

The faulty rank and the step, from the first on, are drawn from the seed. A verdict is the first
event that names the rank: an end, or a stall that is not ended yet. The command fails if a family,
a rank, or the number of starts is wrong anywhere, or if a verdict took longer than 10 s. As a test,
`SOAK_SEEDS` (default 10) sets the number of seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.events import Event, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.rank_logs import read_logs
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.diagnose.job import diagnose_job
from ebbflow.diagnose.judging import Diagnosis, diagnose_files
from ebbflow.training.errors import GangError
from ebbflow.training.gang import Gang
from ebbflow.training.workload_loader import prepare_data, workload_context
from tests.support.gangs import endless_gang
from tests.support.guard_jobs import Job
from tests.support.headline import LASTING, SCRIPTS, SLOW_SECONDS, start_nodes
from tests.support.injected import INJECTIONS, inject

LIMIT_SECONDS = 10.0
_USD_PER_RANK_SECOND = 0.01

_SYNC = ("synchronization",)
# In plain torch, without a job: the symptom in the logs. seconds: to the first failure.
PLAIN = (
    "stale_port",
    "wrong_master_address",
    "master_without_name",
    "master_unknown_to_one_rank",
    "wrong_interface",
    "wrong_interface_of_one_rank",
    "rank_never_starts",
    "parameter_unused_on_one_rank",
    "uneven_batches",
    "collective_of_one_rank",
    "collectives_of_other_shape",
    "rank_killed",
    "error_on_one_rank",
    "loader_worker_killed",
    "loader_worker_bus_error",
    "no_rollouts",
    "optimizer_of_another_model",
    "nan_in_a_layer",
)
SYMPTOMS = [f"plain:{name}" for name in INJECTIONS if name not in PLAIN]  # the others that are made


@dataclass(frozen=True)
class Case:
    """families: any of them is right. says: texts of the verdict.

    Without a rank, all ranks have the trouble alike.
    """

    families: Sequence[str]
    says: Sequence[str] = ()
    rank: bool = True
    outcome: str = "failed"
    sections: dict[str, Any] = field(default_factory=dict)


JOBS = {
    "leave_out_a_branch": Case(
        _SYNC, ("branch.weight", "branch (Overflowing)", "guard_jobs.py:", "find_unused_param")
    ),
    "call_a_collective": Case(_SYNC, ("headline.py:",)),
    "save_alone": Case(_SYNC, ("headline.py:", "same collectives")),
    # A first batch without progress is told at once, but ended at the deadline of a step only.
    "work_alone": Case(
        _SYNC,
        ("headline.py:",),
        outcome="completed",
        sections={"cluster": {"nodes": 1, "processes_per_node": 2, "step_deadline_seconds": 60}},
    ),
    "raise_error": Case(("program", "data"), outcome="completed"),
    "ask_for_no_rollouts": Case(("startup",), ("headline.py:",)),
    "load_another_optimizer": Case(("storage",), ("headline.py:",)),
    "overflow_in_a_layer": Case(("quality",), ("branch",), outcome="non_finite"),
    "die": Case(("synchronization", "hardware"), outcome="completed"),
    "freeze": Case(_SYNC, outcome="completed"),
    "lose_a_loader_worker": Case(("data",), outcome="completed"),
    "slow_down": Case(
        ("throughput",), outcome="completed", sections={"training": {"max_steps": 60}}
    ),
}
ATTACHED = {
    "uneven_batches": Case(_SYNC, ("equally many steps",)),
    "unequal_steps": Case(_SYNC, ("equally many steps",)),
    "unused_in_a_script": Case(_SYNC, ("branch.weight",)),
}
# One of two nodes differs. Node 0 is the reference for software and settings, so that node 1 has
# the trouble there.
OF_NODES = {
    "other_torch": Case(
        ("startup",), ("node 1 differs from node 0 in torch 2.12.1",), outcome="config"
    ),
    "other_setting": Case(_SYNC, ("training.seed 5 (node 0: ",), outcome="config"),
    "fewer_files": Case(("data",), ("15 samples instead of 16",), outcome="config"),
    "cut_file": Case(("data",), ("other names or sizes",), outcome="config"),
}
CASES = [*JOBS, *ATTACHED, *OF_NODES, *(f"plain:{name}" for name in PLAIN)]


def run_case(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run one case, and return its row. `wrong` lists what is not as it should be."""
    if name.startswith("plain:"):
        return _run_plain(name.removeprefix("plain:"), seed, folder)
    draw = random.Random(f"{name} {seed}")
    guilty = draw.randrange(2)
    step = draw.choice([1, 1, 2, 3, 5, 8])
    mark = folder / "mark"
    began = time.monotonic()
    if name in OF_NODES:
        if not name.endswith(("files", "file")):
            guilty = 1
        case = OF_NODES[name]
        (events, lines) = _run_nodes(name, folder, guilty, mark)
    elif name in ATTACHED:
        case = ATTACHED[name]
        (events, lines) = _run_script(name, folder, guilty, step, mark)
    else:
        case = JOBS[name]
        (events, lines) = _run_job(name, folder, guilty, step, mark)
    return _judge(
        name, case, events, diagnose_job(events, lines), guilty, float(mark.read_text())
    ) | {"seed": seed, "step": step, "took": round(time.monotonic() - began, 1)}


@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "10"))))
@pytest.mark.parametrize("name", [*CASES, *SYMPTOMS])
def test_a_headline(name: str, seed: int, tmp_path: Path) -> None:
    row = run_case(name, seed, tmp_path)
    assert not row["wrong"], row


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.soak_headlines", description=__doc__
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)} (all)"
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (1)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line per run there")
    given = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for name in given.cases or CASES:
            with tempfile.TemporaryDirectory(prefix="ebbflow-headline-") as folder:
                rows.append(run_case(name, seed, Path(folder)))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if given.json is not None:
                with given.json.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    return int(any(row["wrong"] for row in rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| trouble | seeds | family right | rank right | seconds, median | worst | starts | "
        "wrong |",
        "|---" * 8 + "|",
    ]
    for name in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == name]
        known = [row["seconds"] for row in mine if row["seconds"] is not None]
        ranks = [row["rank_right"] for row in mine if row["rank_right"] is not None]
        starts = sorted({row["starts"] for row in mine})
        wrong = sorted(set(itertools.chain.from_iterable(row["wrong"] for row in mine)))
        cells = [
            name,
            len(mine),
            sum(row["right"] for row in mine),
            f"{sum(ranks)} of {len(ranks)}" if ranks else "–",
        ]
        if known:
            cells += [f"{statistics.median(known):.1f}", f"{max(known):.1f}"]
        else:
            cells += ["–", "–"]
        lines.append(
            "| "
            + " | ".join(map(str, [*cells, ", ".join(map(str, starts)), ", ".join(wrong) or "–"]))
            + " |"
        )
    return "\n".join(lines)


def _run_job(
    name: str, folder: Path, guilty: int, step: int, mark: Path
) -> tuple[list[Event], Any]:
    options = {"trouble": name, "guilty": guilty, "step": step, "mark": str(mark)}
    survival = {"hang_floor_seconds": 15.0}  # of the hang that is ended; the default is 60
    workload = "tests.support.headline:Headline"
    sections = dict(JOBS[name].sections)
    job = Job.make(
        folder / "job", workload=workload, options=options, survival=survival, **sections
    )
    job.terms = Terms(usd_per_rank_second=_USD_PER_RANK_SECOND)
    with contextlib.suppress(GangError):
        job.run()
    return read_events(job.store), read_logs([job.folder], [job.store]).lines


def _run_script(
    name: str, folder: Path, guilty: int, step: int, mark: Path
) -> tuple[list[Event], Any]:
    script = folder / f"{name}.py"
    script.write_text(SCRIPTS[name])
    store = f"{folder}/store"
    command = [sys.executable, "-m", "ebbflow", "run", str(script), "--ranks", "2", "--job", "job"]
    command += ["--set", f"store={store}", "--set", "survival.hang_floor_seconds=15"]
    command += ["--", str(guilty), str(step), str(mark)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT_ROOT), "OMP_NUM_THREADS": "1"}
    with open(folder / "output.log", "wb") as output:
        subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            timeout=240,
            check=False,
        )
    part = Store.open(store).sub(job_prefix("job"))
    return read_events(part), read_logs([folder], [part]).lines


def _run_nodes(name: str, folder: Path, guilty: int, mark: Path) -> tuple[list[Event], Any]:
    folder.joinpath("job").mkdir()
    spec = endless_gang(folder / "job", survival={"standby": False})
    config = spec.config.model_copy(update={"workload": "tests.support.headline:OfFiles"})
    sound = folder / "job" / "sound"  # of the machine that prepares the job
    sound.mkdir()
    for number in range(16):
        (sound / f"{number}.bin").write_bytes(bytes(100 + number))
    os.environ["HEADLINE_FILES"] = str(sound)
    prepared = prepare_data(
        config, workload_context(config, Gang(), store=Store.open(spec.store_uri))
    )
    spec = replace(spec, config=config, prepared=prepared)
    mark.write_text(str(time.time()))
    with contextlib.suppress(GangError):
        start_nodes(spec, name, guilty, folder).wait(120)
    part = Store.open(spec.store_uri).sub(job_prefix("job"))
    return read_events(part), read_logs([folder / "job"], [part]).lines


def _judge(
    name: str, case: Case, events: list[Event], diagnosis: Diagnosis, guilty: int, struck: float
) -> dict[str, Any]:
    told = [
        event
        for event in events
        if event.name in ("stall", "fault_detected", "guard", "outcome") and event.t_wall >= struck
    ]
    texts = [(event.t_wall, json.dumps(event.data)) for event in told]
    named = [(event.t_wall, json.dumps(event.data)) for event in told if _blamed(event) == guilty]
    accused = {_blamed(event) for event in told if event.name == "fault_detected"} - {None}
    roots = [finding for finding in diagnosis.findings if finding.role in ("root", "advice")]
    first = (named or [(None, "")])[0]
    if roots:
        root = roots[0]
    else:
        root = None
    if first[0] is None:
        seconds = None
    else:
        seconds = round(first[0] - struck, 2)
    starts = sum(event.name == "generation_ended" for event in events)
    outcome = next(
        (str(event.data.get("outcome")) for event in reversed(events) if event.name == "outcome"),
        "",
    )
    if name == "slow_down":
        price = _price_error(events, diagnosis)
    else:
        price = None
    # A slow rank is told after 20 steps in a row. Of nodes, the time counts from the start of all
    # processes.
    if name == "slow_down":
        limit = 60.0
    elif name in OF_NODES:
        limit = 2 * LIMIT_SECONDS
    else:
        limit = LIMIT_SECONDS
    if name in LASTING or name in SCRIPTS or name in OF_NODES:
        allowed = 1
    else:
        allowed = 2
    checks = {
        "family": root is not None and root.rule.family in case.families,
        "rank": bool(named) and accused <= {guilty},
        "seconds": seconds is not None and seconds <= limit,
        "starts": starts == allowed,
        "outcome": not outcome
        or outcome == case.outcome
        or (case.outcome == "failed" and outcome == "config"),
        "price": price is None or abs(price) <= 0.1,
        **{f"text {words!r}": any(words in text for _, text in texts) for words in case.says},
    }
    return {
        "case": name,
        "family": root.rule.family if root else None,
        "symptom": root.rule.id if root else None,
        "right": checks["family"],
        "rank_right": checks["rank"],
        "seconds": seconds,
        "starts": starts,
        "outcome": outcome,
        "price_error": price,
        "wrong": [what for what, right in checks.items() if not right],
    }


def _blamed(event: Event) -> int | None:
    """Return the rank that an event blames: its field, else the first that its message names."""
    if "rank" in event.data:
        return int(event.data["rank"])
    found = re.search(r"\branks? (\d+)", json.dumps(event.data))
    if found:
        return int(found[1])
    return None


def _price_error(events: list[Event], diagnosis: Diagnosis) -> float:
    """Return the relative error of the dollars that `diagnose` names, against those of the injected
    pauses.
    """
    lines = itertools.chain.from_iterable(finding.evidence for finding in diagnosis.findings)
    text = " ".join([line.text for line in lines])
    found = re.search(r"in all .* s and \$([0-9.]+)", text)
    # The first has no history
    steps = sum(event.name == "step" and event.rank == 0 for event in events) - 1
    slowed = min(steps, 60) * SLOW_SECONDS * 2 * _USD_PER_RANK_SECOND
    if found:
        return round(float(found[1]) / slowed - 1, 3)
    return float("nan")


def _run_plain(name: str, seed: int, folder: Path) -> dict[str, Any]:
    made = INJECTIONS[name]
    logs, guilty, seconds = inject(name, folder, seed)
    findings = diagnose_files(logs).findings
    root = next((finding for finding in findings if finding.role == "root"), None)
    right = root is not None and root.rule.id in (made.symptom, *made.answers)
    if name == "stale_port":
        guilty = 0  # the rank that binds the port
    # There is no other rank, or the finding says that the lines do not tell which is faulty.
    unknown = (
        made.ranks == 1
        or made.gone
        or root is None
        or not root.ranks
        or "no line tells" in root.note
    )
    if unknown or root is None:
        rank_right = None
    else:
        rank_right = (root.suspects or root.ranks[:1]) == (guilty,)
    if made.alike:  # where all ranks have the trouble, none may be named
        rank_right = root is not None and not root.suspects and root.note.startswith("every rank")
    return {
        "case": f"plain:{name}",
        "seed": seed,
        "family": root.rule.family if root else None,
        "symptom": root.rule.id if root else None,
        "right": right,
        "seconds": round(seconds, 2),
        "rank_right": rank_right,
        "suspects": None if root is None else root.suspects,
        "note": "" if root is None else root.note,
        "starts": 1,
        "wrong": [*([] if right else ["family"]), *(["rank"] if rank_right is False else [])],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
