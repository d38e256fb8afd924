"""The command `ebbflow certify CONFIG`, which proves that a job resumes exactly.

On this machine, it runs a small copy of the job once uninterrupted and once per kind of
interruption, and compares losses, batches and weights. Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import RESTORE, STEP, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.process import die_with_parent
from ebbflow.core.program import PROJECT_ROOT, python_path
from ebbflow.core.store import Store
from ebbflow.infra.instance import describe_machine
from ebbflow.training.checkpoint.verified_io import sha256_text
from ebbflow.training.errors import GangError, TrainingError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.messages import GangOutcome, GangSpec

if TYPE_CHECKING:
    from torch import nn

    from ebbflow.training.workload import Batch, Cursor, WorkloadContext

RECORDED = "ebbflow.tryout.certify:RecordedWorkload"
WORKLOAD_OPTION = "certified_workload"
FOLDER_OPTION = "certified_records"
DEFAULT_STEPS = 24
_SAVES = 6
_SECONDS = 900.0  # for one start of the gang
_MOST_STARTS = 4
_NUMBERS = ("loss", "gradient_norm", "tokens", "learning_rate")
UNINTERRUPTED = "none"
NODE_LOST = "a node is lost"
# The rehearsed fault of each interruption. It occurs between commits, so that work is lost or must
# be saved in time.
INTERRUPTIONS = {
    "a rank is killed": "rank-kill@55%",
    NODE_LOST: "node-loss@70%",
    "a notice": "notice@40%",
}
VERSION = 1
_FEWEST_STEPS = 12  # so that there is a commit before each interruption
_CHILD_SECONDS = 3600.0


def small_config(config: RunConfig, *, store: Path, steps: int) -> RunConfig:
    """Return the configuration of a small copy of a job: fewer steps, six commits, one or two
    nodes, fewer ranks.

    There is at most one rank per core. The copy never continues with fewer nodes: fewer ranks would
    add up gradients in another order, and the sums would differ in their last bits.
    """
    nodes, processes = gang_size(config)
    sections = {
        "training": {"max_steps": steps, "evaluation_interval_steps": max(1, steps // 2)},
        "checkpoint": {
            "interval": "steps",
            "interval_steps": max(1, steps // _SAVES),
            "when_busy": "wait",
            "upload_mib_per_second": None,
        },
        "cluster": {"nodes": nodes, "processes_per_node": processes, "min_nodes": None},
        "metrics": {"port": None, "push_url": None},
    }
    changed = {
        name: getattr(config, name).model_copy(update=values) for name, values in sections.items()
    }
    return config.model_copy(update={**changed, "store": str(store)})


def record_batches(config: RunConfig, folder: Path) -> RunConfig:
    """Return a configuration whose workload wraps that of `config` and records its batches in
    `folder`.
    """
    options = {
        **config.workload_options,
        WORKLOAD_OPTION: config.workload or "",
        FOLDER_OPTION: str(folder),
    }
    return config.model_copy(update={"workload": RECORDED, "workload_options": options})


def gang_size(config: RunConfig) -> tuple[int, int]:
    nodes = config.cluster.nodes
    processes = config.cluster.processes_per_node
    if nodes == "auto":
        nodes = 2
    else:
        nodes = min(nodes, 2)
    if processes == "auto":
        processes = 1
    return nodes, max(1, min(processes, len(os.sched_getaffinity(0)) // nodes))


class RecordedWorkload:
    """A workload that wraps another one and records its batches.

    Its options name the wrapped workload and the folder for the records.
    """

    def __init__(self, context: WorkloadContext) -> None:
        from ebbflow.training.workload_loader import make_workload

        self._workload: Any = make_workload(wrapped_config(context.config), _own_context(context))
        self._path = Path(str(context.options[FOLDER_OPTION])) / f"rank-{context.rank}.jsonl"

    @classmethod
    def prepare(cls, context: WorkloadContext) -> dict:
        from ebbflow.training.workload_loader import prepare_data

        return prepare_data(wrapped_config(context.config), _own_context(context))

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Batch:
        batch = self._workload.next_batch(model, cursor)
        record = {"first": cursor.first, "count": cursor.count, "sha256": content_sha256(batch)}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._workload, name)


def wrapped_config(config: RunConfig) -> RunConfig:
    assert config.workload == RECORDED
    options = dict(config.workload_options)
    options.pop(FOLDER_OPTION)
    return config.model_copy(
        update={"workload": options.pop(WORKLOAD_OPTION) or None, "workload_options": options}
    )


def _own_context(context: WorkloadContext) -> WorkloadContext:
    return dataclasses.replace(context, config=wrapped_config(context.config))


def content_sha256(batch: Any) -> str:
    """Return the SHA-256 over all tensors and numbers of a batch, in the order of the batch's
    fields.
    """
    digest = hashlib.sha256()
    for part in _parts(batch):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        yield f"{array.dtype}{tuple(array.shape)}".encode()
        yield array.flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    elif isinstance(value, dict):
        for key in value:
            yield str(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _parts(vars(value))
    else:
        yield repr(value).encode()


@dataclass(frozen=True, kw_only=True)
class CertifiedRun:
    interruption: str  # key of INTERRUPTIONS, or UNINTERRUPTED
    outcome: GangOutcome
    # Number and figures of each step; a repeated step occurs again
    steps: list[tuple[int, dict[str, Any]]]
    samples: list[tuple[int, int, str]]  # (rank, first sample, SHA-256 of the batch) of each batch
    starts: int  # number of times that the gang was started
    generations: int  # number of generations that took steps
    resumed: list[int]  # the step from which each restore continued


def certified_run(
    config: RunConfig, prepared: dict, folder: Path, interruption: str
) -> CertifiedRun:
    """Run the job to its end in at most four starts.

    `interruption` is a key of INTERRUPTIONS, or UNINTERRUPTED.
    """
    job = interruption.replace(" ", "-")
    records = folder / job / "records"
    logs = folder / job / "logs"
    records.mkdir(parents=True)
    config = record_batches(config, records)
    spec = local_spec(config, prepared, job=job, logs=logs)
    outcome, starts = run_to_end(
        replace(spec, rehearse=INTERRUPTIONS.get(interruption)), folder / job
    )
    events = read_events(Store.open(config.store).sub(job_prefix(job)))
    steps = [event for event in events if event.name == STEP]
    first = [event for event in steps if event.rank == 0]
    return CertifiedRun(
        interruption=interruption,
        outcome=outcome,
        steps=[
            (event.step or 0, {name: event.data.get(name) for name in _NUMBERS}) for event in first
        ],
        samples=_samples(records),
        starts=starts,
        generations=len({event.generation for event in steps}),
        resumed=[event.step or 0 for event in events if event.name == RESTORE],
    )


def local_spec(config: RunConfig, prepared: dict, *, job: str, logs: Path) -> GangSpec:
    """Return the specification of a gang on this machine. `config` comes from `small_config`."""
    nodes = config.cluster.nodes
    processes = config.cluster.processes_per_node
    assert isinstance(nodes, int) and isinstance(processes, int)
    return GangSpec(
        job=job,
        run=job,
        attempt=0,
        node=0,
        nodes=nodes,
        processes_per_node=processes,
        main_address="127.0.0.1",
        config=config,
        store_uri=config.store,
        prepared=prepared,
        log_folder=str(logs),
    )


def run_to_end(spec: GangSpec, folder: Path) -> tuple[GangOutcome, int]:
    """Start a gang repeatedly, at most four times, until its job ends.

    Return its outcome and the number of starts.

    Raises TrainingError.
    """
    last = ""
    for attempt in range(_MOST_STARTS):
        gang = LocalGang(
            replace(spec, attempt=attempt), folder / f"start-{attempt}", folder / "output.log"
        )
        try:
            outcome = gang.wait(_SECONDS)
            if outcome.outcome != Outcome.INTERRUPTED:
                return outcome, attempt + 1
            last = outcome.message
        except GangError as error:
            if not error.curable:
                raise
            last = str(error)
    raise TrainingError(
        f"certify: {spec.job}: the job did not end within {_MOST_STARTS} starts; last error: {last}"
    )


def _samples(folder: Path) -> list[tuple[int, int, str]]:
    """Return (rank, first sample, SHA-256) of each recorded batch.

    Skip a last line that a kill has cut off.
    """
    found = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            found.append((rank, record["first"], record["sha256"]))
    return found


def build_certificate(
    config: RunConfig, small: RunConfig, runs: Sequence[CertifiedRun], machine: dict[str, object]
) -> dict[str, Any]:
    uninterrupted, *interrupted = runs
    compared = [_compare(uninterrupted, run) for run in interrupted]
    return {
        "version": VERSION,
        "kind": "measured",
        "holds": all(not one["differences"] for one in compared),
        "issued_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config_sha256": config_sha256(config),
        "workload": config.workload or "text",
        "steps": uninterrupted.outcome.step,
        "nodes": small.cluster.nodes,
        "processes_per_node": small.cluster.processes_per_node,
        "mode": small.parallel.mode,
        "weights_sha256": uninterrupted.outcome.weights_sha256,
        "samples_sha256": sha256_text(repr(sorted(set(uninterrupted.samples))).encode()),
        "losses_sha256": sha256_text(repr(dict(uninterrupted.steps)).encode()),
        "interruptions": compared,
        "machine": machine,
    }


def config_sha256(config: RunConfig) -> str:
    return sha256_text(config.model_dump_json().encode())


def format_certificate(found: dict[str, Any]) -> str:
    if found["holds"]:
        verdict = "holds"
    else:
        verdict = "DOES NOT HOLD"
    ranks = f"{found['nodes']} × {found['processes_per_node']} ranks, {found['mode']}"
    lines = [
        f"resume certificate {verdict}: {found['workload']}, {found['steps']} steps on {ranks}"
    ]
    for one in found["interruptions"]:
        resumed = ", ".join(map(str, one["resumed_from"])) or "nowhere"
        what = "; ".join(one["differences"]) or "losses, samples and weights equal, bit for bit"
        lines.append(
            f"  {one['interruption']}: resumed at {resumed}, {one['redone_steps']} steps redone: "
            f"{what}"
        )
    return "\n".join(lines)


def _compare(uninterrupted: CertifiedRun, run: CertifiedRun) -> dict[str, Any]:
    """Compare a run with the uninterrupted one, and return its entry in the certificate.

    A step that ran several times must have had the same `_NUMBERS` (such as the loss) and batches
    each time.
    """
    figures = dict(uninterrupted.steps)
    batches = {sample[:2]: sample[2] for sample in uninterrupted.samples}
    seen = {step for step, _ in run.steps}
    read = {sample[:2] for sample in run.samples}
    wrong = [
        f"step {step}: {figures.get(step)} uninterrupted, {numbers} interrupted"
        for step, numbers in run.steps
        if figures.get(step) != numbers
    ]
    if missing := sorted(set(figures) - seen):
        wrong.append(f"{len(missing)} steps have no record, the first is {missing[0]}")
    differ = [
        f"rank {rank}: the batch from sample {first} on differs"
        for rank, first, sha256 in run.samples
        if batches.get((rank, first)) != sha256
    ]
    if unread := sorted(set(batches) - read):
        differ.append(f"rank {unread[0][0]} never read sample {unread[0][1]}")
    found = wrong[:3] + differ[:3]
    for name in ("outcome", "step", "weights_sha256"):
        was = getattr(uninterrupted.outcome, name)
        now = getattr(run.outcome, name)
        if was != now or was is None:
            found.append(f"{name}: {was} uninterrupted, {now} interrupted")
    if run.generations < 2 or not any(run.resumed):
        found.append("it was never interrupted after a commit, so this run proves nothing")
    return {
        "interruption": run.interruption,
        "starts": run.starts,
        "generations": run.generations,
        "resumed_from": run.resumed,
        "redone_steps": len(run.steps) - len(seen),
        "differences": found,
    }


def main(arguments: list[str]) -> int:
    """Run the command. Return 0 if the certificate holds, 1 if it does not."""
    parser = argparse.ArgumentParser(
        prog="ebbflow certify",
        description=(
            "Run a job small, with and without interruptions, and compare losses, samples and "
            "weights."
        ),
    )
    parser.add_argument("config", nargs="?", help="YAML file, such as configs/laptop.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override, model.num_layers=2",
    )
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help=f"of each run (default {DEFAULT_STEPS})"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=INTERRUPTIONS,
        help="one of the interruptions, as often as wanted (all)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the certificate there as well"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the runs are made (default: the temporary folder)"
    )
    parser.add_argument("--resolved", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.steps < _FEWEST_STEPS:
        parser.error(
            f"--steps {given.steps}: at least {_FEWEST_STEPS}, so that a commit precedes each "
            "interruption"
        )
    if given.config is None and given.resolved is None:
        parser.error("CONFIG is missing")
    if given.resolved is not None:
        die_with_parent()
        config = RunConfig.model_validate_json(given.resolved.read_text())
    else:
        config = load_config(str(given.config), given.set, project_root=PROJECT_ROOT).config
    only = given.only or tuple(INTERRUPTIONS)
    found = certify(config, steps=given.steps, parent=given.folder, interruptions=only)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(format_certificate(found), flush=True)
    if found["holds"]:
        return 0
    return 1


def certify(
    config: RunConfig,
    *,
    steps: int = DEFAULT_STEPS,
    parent: Path | None = None,
    interruptions: Sequence[str] = tuple(INTERRUPTIONS),
) -> dict[str, Any]:
    """Run the job once uninterrupted and once per interruption, and return the certificate.

    Takes minutes.
    """
    from ebbflow.training.gang import Gang
    from ebbflow.training.workload_loader import prepare_data, workload_context

    with tempfile.TemporaryDirectory(prefix="ebbflow-certify-", dir=parent) as name:
        folder = Path(name)
        small = small_config(config, store=folder / "store", steps=steps)
        witnessed = record_batches(small, folder)
        prepared = prepare_data(
            witnessed, workload_context(witnessed, Gang(), store=Store.open(small.store))
        )
        runs = []
        for interruption in (UNINTERRUPTED, *interruptions):
            if interruption == NODE_LOST and small.cluster.nodes == 1:
                continue  # one node is the whole gang
            runs.append(certified_run(small, prepared, folder, interruption))
            print(
                f"{interruption}: step {runs[-1].outcome.step}, {runs[-1].starts} starts",
                flush=True,
            )
        return build_certificate(config, small, runs, describe_machine())


def certify_in_child(
    config: RunConfig,
    *,
    steps: int = DEFAULT_STEPS,
    interruptions: Sequence[str] = tuple(INTERRUPTIONS),
) -> dict[str, Any]:
    """Run `certify` in a child process, because this process must not import torch.

    Raises TrainingError.
    """
    with tempfile.TemporaryDirectory(prefix="ebbflow-certify-") as folder:
        given = Path(folder, "config.json")
        found = Path(folder, "certificate.json")
        given.write_text(config.model_dump_json())
        environment = dict(os.environ, PYTHONPATH=python_path())
        command = [
            sys.executable,
            "-m",
            "ebbflow.training",
            "certify",
            "--resolved",
            str(given),
            "--json",
            str(found),
        ]
        command += [
            "--steps",
            str(steps),
            *(f"--only={interruption}" for interruption in interruptions),
        ]
        command += ["--folder", folder]  # deleted here even if the child is killed
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, timeout=_CHILD_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise TrainingError(f"certify: no certificate within {_CHILD_SECONDS:g} s") from None
        if not found.exists():
            raise TrainingError(
                f"certify: ended with exit code {done.returncode}; see its output above"
            )
        return json.loads(found.read_text())
