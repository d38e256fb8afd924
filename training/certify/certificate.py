"""Compare interrupted runs with the uninterrupted one, number by number and batch by batch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from ebbflow.infra.config.schema import RunConfig
from ebbflow.training.certify.runs import Run

VERSION = 1


def certificate(config: RunConfig, small: RunConfig, runs: Sequence[Run], machine: dict[str, object]) -> dict[str, Any]:
    """As JSON. runs: the quiet one first. config: the job's; small: what was run of it."""
    quiet, *interrupted = runs
    compared = [_compare(quiet, run) for run in interrupted]
    nodes, processes = small.cluster.nodes, small.cluster.processes_per_node
    return {
        "version": VERSION,
        "kind": "measured",
        "holds": all(not one["differences"] for one in compared),
        "issued_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config_sha256": config_sha256(config),
        "workload": config.workload or "text",
        "steps": quiet.outcome.step,
        "nodes": nodes,
        "processes_per_node": processes,
        "mode": small.parallel.mode,
        "weights_sha256": quiet.outcome.weights_sha256,
        "samples_sha256": _sha256(sorted(set(quiet.samples))),
        "losses_sha256": _sha256(_by_step(quiet)),
        "interruptions": compared,
        "machine": machine,
    }


def config_sha256(config: RunConfig) -> str:
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()


def told(found: dict[str, Any]) -> str:
    """The certificate in lines of text."""
    verdict = "holds" if found["holds"] else "DOES NOT HOLD"
    ranks = f"{found['nodes']} × {found['processes_per_node']} ranks, {found['mode']}"
    lines = [f"resume certificate {verdict}: {found['workload']}, {found['steps']} steps on {ranks}"]
    for one in found["interruptions"]:
        resumed = ", ".join(map(str, one["resumed_from"])) or "nowhere"
        what = "; ".join(one["differences"]) or "losses, samples and weights equal, bit for bit"
        lines.append(f"  {one['interruption']}: resumed at {resumed}, {one['redone_steps']} steps redone: {what}")
    return "\n".join(lines)


def _compare(quiet: Run, run: Run) -> dict[str, Any]:
    """differences: in words, empty where there is none. Redone steps count too: each time they must be the same."""
    found = [*_losses(quiet, run), *_batches(quiet, run)]
    for name in ("outcome", "step", "weights_sha256"):
        was, now = getattr(quiet.outcome, name), getattr(run.outcome, name)
        if was != now or was is None:
            found.append(f"{name}: {was} in peace, {now} here")
    if run.generations < 2 or not any(run.resumed):
        found.append("it was never interrupted after a commit, so that this proves nothing")
    return {
        "interruption": run.interruption,
        "starts": run.starts,
        "generations": run.generations,
        "resumed_from": run.resumed,
        "redone_steps": len(run.steps) - len({step for step, _ in run.steps}),
        "differences": found,
    }


def _losses(quiet: Run, run: Run) -> list[str]:
    expected, seen = _by_step(quiet), {step for step, _ in run.steps}
    found = [f"step {step}: {expected.get(step)} in peace, {numbers} here" for step, numbers in run.steps
             if expected.get(step) != numbers]  # fmt: skip
    if missing := sorted(set(expected) - seen):
        found.append(f"{len(missing)} steps have no record, the first is {missing[0]}")
    return found[:3]


def _batches(quiet: Run, run: Run) -> list[str]:
    expected = {(rank, first): sha256 for rank, first, sha256 in quiet.samples}
    found = [
        f"rank {rank}: the batch from sample {first} on held something else"
        for rank, first, sha256 in run.samples
        if expected.get((rank, first)) != sha256
    ]
    seen = {(rank, first) for rank, first, _ in run.samples}
    if missing := sorted(set(expected) - seen):
        found.append(f"rank {missing[0][0]} never read sample {missing[0][1]}")
    return found[:3]


def _by_step(run: Run) -> dict[int, dict[str, Any]]:
    return dict(run.steps)


def _sha256(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
