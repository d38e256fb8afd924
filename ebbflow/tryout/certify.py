"""`ebbflow certify CONFIG`: prove that a job resumes exactly.

On this machine, it runs a small copy of the job once uninterrupted and once per kind of
interruption, and compares losses, batches and weights. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import RESTORE, STEP
from ebbflow.core.json_values import JsonObject
from ebbflow.infra.instance import describe_machine
from ebbflow.training.checkpoint.verified_io import sha256_text
from ebbflow.training.errors import TrainingError
from ebbflow.training.launch.messages import GangOutcome
from ebbflow.tryout.harness import (
    ask_tool,
    config_parser,
    given_config,
    job_events,
    local_spec,
    prepare,
    run_to_end,
    small_config,
    write_answer,
)

if TYPE_CHECKING:
    from torch import nn

    from ebbflow.training.workload import Batch, Cursor, Workload, WorkloadContext

RECORDED = "ebbflow.tryout.certify:RecordedWorkload"
WORKLOAD_OPTION = "certified_workload"
FOLDER_OPTION = "certified_records"
DEFAULT_STEPS = 24
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
_NUMBERS = ("loss", "gradient_norm", "tokens", "learning_rate")
_FEWEST_STEPS = 12  # so that there is a commit before each interruption
_CHILD_SECONDS = 3600.0
_MOST_NAMED = 3  # differences of one kind that a certificate names


class RecordedWorkload:
    """Workload that wraps another one and records the batches that it reads.

    Its options name the wrapped workload and the folder for the records.
    """

    def __init__(self, context: WorkloadContext) -> None:
        from ebbflow.training.workload_loader import make_workload

        self._workload: Workload = make_workload(
            wrapped_config(context.config), _wrapped_context(context)
        )
        self._path = Path(str(context.options[FOLDER_OPTION])) / f"rank-{context.rank}.jsonl"

    @classmethod
    def prepare(cls, context: WorkloadContext) -> dict:
        from ebbflow.training.workload_loader import prepare_data

        return prepare_data(wrapped_config(context.config), _wrapped_context(context))

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


class InterruptedRun(TypedDict):
    """Entry of a certificate: how one interrupted run differs from the uninterrupted one."""

    interruption: str
    starts: int
    generations: int
    resumed_from: list[int]
    redone_steps: int
    differences: list[str]


class Certificate(TypedDict):
    """Resume certificate of a job: whether interrupted runs equal the uninterrupted one."""

    version: int
    kind: str
    holds: bool
    issued_at: str
    config_sha256: str
    workload: str
    steps: int
    nodes: int | str
    processes_per_node: int | str
    mode: str
    weights_sha256: str | None
    samples_sha256: str
    losses_sha256: str
    interruptions: list[InterruptedRun]
    machine: JsonObject


@dataclass(frozen=True, kw_only=True)
class CertifiedRun:
    interruption: str  # key of INTERRUPTIONS, or UNINTERRUPTED
    outcome: GangOutcome
    # Number and figures of each step; a repeated step occurs again
    steps: list[tuple[int, JsonObject]]
    samples: list[tuple[int, int, str]]  # (rank, first sample, SHA-256 of the batch) of each batch
    starts: int  # number of times that the gang was started
    generations: int  # number of generations that took steps
    resumed: list[int]  # the step from which each restore continued


def record_batches(config: RunConfig, folder: Path) -> RunConfig:
    """Return a configuration in which the workload of `config` is wrapped to record its batches in
    `folder`.
    """
    options = {
        **config.workload_options,
        WORKLOAD_OPTION: config.workload or "",
        FOLDER_OPTION: str(folder),
    }
    return config.model_copy(update={"workload": RECORDED, "workload_options": options})


def wrapped_config(config: RunConfig) -> RunConfig:
    assert config.workload == RECORDED
    options = dict(config.workload_options)
    options.pop(FOLDER_OPTION)
    return config.model_copy(
        update={"workload": options.pop(WORKLOAD_OPTION) or None, "workload_options": options}
    )


def content_sha256(batch: Any) -> str:
    """Return the SHA-256 of all tensors and numbers in a batch, in the order of its fields."""
    digest = hashlib.sha256()
    for part in _parts(batch):
        digest.update(part)
    return digest.hexdigest()


def certified_run(
    config: RunConfig, prepared: JsonObject, folder: Path, interruption: str
) -> CertifiedRun:
    """Run the job to its end in at most four starts.

    `interruption` is a key of INTERRUPTIONS, or UNINTERRUPTED.
    """
    job = interruption.replace(" ", "-")
    records = folder / job / "records"
    records.mkdir(parents=True)
    recorded = record_batches(config, records)
    spec = local_spec(recorded, prepared, job=job, logs=folder / job / "logs")
    spec = replace(spec, rehearse=INTERRUPTIONS.get(interruption))
    outcome, starts = run_to_end(spec, folder / job)
    events = job_events(recorded, job)
    steps = [event for event in events if event.name == STEP]
    figures = []
    for event in steps:
        if event.rank == 0:
            numbers = {name: event.data.get(name) for name in _NUMBERS}
            figures.append((event.step or 0, numbers))
    return CertifiedRun(
        interruption=interruption,
        outcome=outcome,
        steps=figures,
        samples=_samples(records),
        starts=starts,
        generations=len({event.generation for event in steps}),
        resumed=[event.step or 0 for event in events if event.name == RESTORE],
    )


def build_certificate(
    config: RunConfig, small: RunConfig, runs: Sequence[CertifiedRun], machine: JsonObject
) -> Certificate:
    uninterrupted, *interrupted = runs
    compared = [_compare(uninterrupted, run) for run in interrupted]
    return {
        "version": VERSION,
        "kind": "measured",
        "holds": not any(comparison["differences"] for comparison in compared),
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


def format_certificate(certificate: Certificate) -> str:
    verdict = "holds" if certificate["holds"] else "DOES NOT HOLD"
    ranks = f"{certificate['nodes']} × {certificate['processes_per_node']} ranks"
    lines = [
        f"resume certificate {verdict}: {certificate['workload']}, {certificate['steps']} steps on "
        f"{ranks}, {certificate['mode']}"
    ]
    for comparison in certificate["interruptions"]:
        resumed = ", ".join(map(str, comparison["resumed_from"])) or "nowhere"
        differences = "; ".join(comparison["differences"])
        lines.append(
            f"  {comparison['interruption']}: resumed at {resumed}, "
            f"{comparison['redone_steps']} steps redone: "
            f"{differences or 'losses, samples and weights equal, bit for bit'}"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run `ebbflow certify`. Return 0 if the certificate holds, 1 if it does not."""
    parser = config_parser(
        "certify",
        "Run a job small, with and without interruptions, and compare losses, samples and weights.",
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
    given = parser.parse_args(arguments)
    if given.steps < _FEWEST_STEPS:
        parser.error(
            f"--steps {given.steps}: at least {_FEWEST_STEPS}, so that a commit precedes each "
            "interruption"
        )
    config = given_config(parser, given)
    only = given.only or tuple(INTERRUPTIONS)
    certificate = certify(config, steps=given.steps, parent=given.folder, interruptions=only)
    answer = cast(JsonObject, certificate)
    write_answer(given.json, answer)
    write_answer(given.output, answer)
    print(format_certificate(certificate), flush=True)
    return 0 if certificate["holds"] else 1


def certify(
    config: RunConfig,
    *,
    steps: int = DEFAULT_STEPS,
    parent: Path | None = None,
    interruptions: Sequence[str] = tuple(INTERRUPTIONS),
) -> Certificate:
    """Run the job once uninterrupted and once per interruption, and return the certificate.

    Takes minutes.
    """
    with tempfile.TemporaryDirectory(prefix="ebbflow-certify-", dir=parent) as name:
        folder = Path(name)
        small = small_config(config, store=folder / "store", steps=steps)
        prepared = prepare(record_batches(small, folder))
        runs = []
        for interruption in (UNINTERRUPTED, *interruptions):
            if interruption == NODE_LOST and small.cluster.nodes == 1:
                continue  # one node is the whole gang
            run = certified_run(small, prepared, folder, interruption)
            runs.append(run)
            print(f"{interruption}: step {run.outcome.step}, {run.starts} starts", flush=True)
        return build_certificate(config, small, runs, describe_machine())


def certify_in_child(
    config: RunConfig,
    *,
    steps: int = DEFAULT_STEPS,
    interruptions: Sequence[str] = tuple(INTERRUPTIONS),
) -> Certificate:
    """Run `certify` in a child process, because this process must not import torch.

    Raises TrainingError.
    """
    # The folder of the runs is deleted here even if the child is killed
    with tempfile.TemporaryDirectory(prefix="ebbflow-certify-") as folder:
        words = ["--steps", str(steps), "--folder", folder]
        words += [f"--only={interruption}" for interruption in interruptions]
        try:
            child = ask_tool(
                "certify", config, words, seconds=_CHILD_SECONDS, shown=True, environment={}
            )
        except TimeoutError:
            raise TrainingError(f"certify: no certificate within {_CHILD_SECONDS:g} s") from None
    if child.answer is None:
        raise TrainingError(
            f"certify: ended with exit code {child.exit_code}; see its output above"
        )
    return cast(Certificate, child.answer)


def _wrapped_context(context: WorkloadContext) -> WorkloadContext:
    return dataclasses.replace(context, config=wrapped_config(context.config))


def _parts(value: Any) -> Iterator[bytes]:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        yield f"{array.dtype}{tuple(array.shape)}".encode()
        if array.numel():
            yield array.flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    elif isinstance(value, dict):
        for key in value:
            yield str(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _parts(element)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _parts(vars(value))
    else:
        yield repr(value).encode()


def _samples(folder: Path) -> list[tuple[int, int, str]]:
    """Read the recorded batches, each as (rank, first sample, SHA-256).

    A last line that a kill has cut off is skipped.
    """
    samples = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            samples.append((rank, record["first"], record["sha256"]))
    return samples


def _compare(uninterrupted: CertifiedRun, run: CertifiedRun) -> InterruptedRun:
    """Compare an interrupted run with the uninterrupted one, and return the certificate's entry."""
    differences = [
        *_different_steps(uninterrupted, run)[:_MOST_NAMED],
        *_different_batches(uninterrupted, run)[:_MOST_NAMED],
    ]
    for name in ("outcome", "step", "weights_sha256"):
        was = getattr(uninterrupted.outcome, name)
        now = getattr(run.outcome, name)
        if was != now or was is None:
            differences.append(f"{name}: {was} uninterrupted, {now} interrupted")
    if run.generations < 2 or not any(run.resumed):
        differences.append("it was never interrupted after a commit, so this run proves nothing")
    return {
        "interruption": run.interruption,
        "starts": run.starts,
        "generations": run.generations,
        "resumed_from": run.resumed,
        "redone_steps": len(run.steps) - len(dict(run.steps)),
        "differences": differences,
    }


def _different_steps(uninterrupted: CertifiedRun, run: CertifiedRun) -> list[str]:
    """Describe each step whose numbers (`_NUMBERS`) differ from those of the uninterrupted run.

    A step that ran several times is compared each time.
    """
    expected = dict(uninterrupted.steps)
    differences = [
        f"step {step}: {expected.get(step)} uninterrupted, {numbers} interrupted"
        for step, numbers in run.steps
        if expected.get(step) != numbers
    ]
    missing = sorted(expected.keys() - dict(run.steps).keys())
    if missing:
        differences.append(f"{len(missing)} steps have no record, the first is {missing[0]}")
    return differences


def _different_batches(uninterrupted: CertifiedRun, run: CertifiedRun) -> list[str]:
    """Describe each batch whose content differs from that in the uninterrupted run.

    A batch that was read several times is compared each time.
    """
    expected = {(rank, first): sha256 for rank, first, sha256 in uninterrupted.samples}
    differences = [
        f"rank {rank}: the batch from sample {first} on differs"
        for rank, first, sha256 in run.samples
        if expected.get((rank, first)) != sha256
    ]
    unread = sorted(expected.keys() - {(rank, first) for rank, first, _ in run.samples})
    if unread:
        rank, first = unread[0]
        differences.append(f"rank {rank} never read sample {first}")
    return differences
