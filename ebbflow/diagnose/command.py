"""Commands `ebbflow diagnose` and `ebbflow explain`."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebbflow.core.errors import Outcome
from ebbflow.core.events import read_events
from ebbflow.core.rank_logs import find_job, find_logs, read_logs, unknown_job
from ebbflow.diagnose.against import Comparison, compare_jobs
from ebbflow.diagnose.job import diagnose_job
from ebbflow.diagnose.judging import Diagnosis, Finding, PossibleCause, diagnose_files, shorten
from ebbflow.diagnose.reading import log_files
from ebbflow.diagnose.rules import load_rules


def add_diagnose_commands(commands: argparse._SubParsersAction, project_root: Path) -> None:
    """Add the commands `diagnose` and `explain`.

    They look for jobs in EBBFLOW_RUNS or else in `project_root`/runs.
    """
    command = commands.add_parser(
        "diagnose", help="name the failure in anybody's logs, with its cause and fix"
    )
    command.add_argument(
        "targets",
        nargs="*",
        metavar="RUN|FILE|FOLDER|-",
        help="a job's name, log files, or a folder",
    )
    command.add_argument("--json", action="store_true", help="print the findings for a program")
    command.add_argument("--list", action="store_true", help="list all symptoms, by family")
    command.add_argument(
        "--store", metavar="URI", help="the job's store, if this machine has no note of it"
    )
    command.add_argument(
        "--against", metavar="JOB", help="a sound job of the same configuration: show what differs"
    )
    command.set_defaults(command=lambda options: diagnose(options, project_root))
    command = commands.add_parser(
        "explain", help="print causes and fixes of a symptom, such as D07"
    )
    command.add_argument("symptom", metavar="ID", help="an id from `ebbflow diagnose --list`")
    command.set_defaults(command=explain)


def diagnose(options: argparse.Namespace, project_root: Path) -> int:
    """Diagnose the logs of a job, or the named files and folders, and print the findings.

    Returns:
        Exit code 0, even if nothing was found; 1 if no log could be read; 2 if no job or file is
        named, or if a named one does not exist.
    """
    if options.list:
        book = load_rules()
        print(
            json.dumps(book.to_json(), indent=1, ensure_ascii=False)
            if options.json
            else book.render()
        )
        return 0
    if not options.targets:
        print(
            "diagnose: name a job, log files or a folder, or - for standard input", file=sys.stderr
        )
        return Outcome.CONFIG.exit_code
    if options.against is not None and (len(options.targets) != 1 or "/" in options.targets[0]):
        print(
            "diagnose: --against compares two jobs: name one job, and the sound one",
            file=sys.stderr,
        )
        return Outcome.CONFIG.exit_code
    if options.against is None:
        comparison = None
    else:
        comparison = _compare(options, project_root)
    diagnosis = _diagnose(options.targets, options.store, project_root)
    refused = [scan for scan in diagnosis.scans if scan.refused]
    for scan in refused:
        print(f"diagnose: {scan.file}: not read: {scan.refused}", file=sys.stderr)
    for scan in diagnosis.scans:
        gaps = scan.describe_gaps()
        if gaps and not scan.refused:
            print(f"diagnose: {scan.file}: {gaps}", file=sys.stderr)
    if options.json:
        document = diagnosis.to_json() | (
            {} if comparison is None else {"against": comparison.to_json()}
        )
        print(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        print(render(diagnosis))
        if comparison is not None:
            print(f"\ncompared with {options.against}:\n{comparison.render()}")
    if refused and len(refused) == len(diagnosis.scans):
        return Outcome.FAILED.exit_code
    return 0


def explain(options: argparse.Namespace) -> int:
    """Print the causes and fixes of one symptom.

    Return exit code 0, or 2 if the symptom is unknown.
    """
    rule = load_rules().find(options.symptom)
    if rule is None:
        print(
            f"explain: no symptom {options.symptom!r}; ebbflow diagnose --list shows all",
            file=sys.stderr,
        )
        return Outcome.CONFIG.exit_code
    print(rule.render())
    return 0


def render(diagnosis: Diagnosis) -> str:
    """Render a diagnosis for a terminal."""
    parts = []
    for finding in diagnosis.findings:
        parts.extend((*_render(finding), ""))
    others = diagnosis.candidates[1:]
    if others:
        parts += ["it could also be", *map(_render_candidate, others), ""]
    if diagnosis.abstained:
        lines = sum(scan.lines for scan in diagnosis.scans)
        if diagnosis.scans:
            read = f" in {len(diagnosis.scans)} files, {lines} lines"
        else:
            read = ""
        if diagnosis.findings:
            thin = "the evidence is too thin to name a root cause"
        else:
            thin = "nothing found"
        parts.append(f"{thin}{read}")
    return "\n".join(parts).rstrip()


def _compare(options: argparse.Namespace, project_root: Path) -> Comparison:
    parts: list[Any] = []
    for job in (options.targets[0], options.against):
        place = find_job(job, options.store, project_root)
        store = place.open_store()
        if store is None:
            raise unknown_job(job, place, project_root)
        logs = read_logs(place.folders, [store])
        events = read_events(store)
        if not events:
            raise unknown_job(job, place, project_root)
        parts += [events, logs.lines]
    return compare_jobs(*parts)


def _diagnose(targets: list[str], store_uri: str | None, project_root: Path) -> Diagnosis:
    if (
        len(targets) == 1
        and targets[0] != "-"
        and not Path(targets[0]).exists()
        and "/" not in targets[0]
    ):
        logs = find_logs(targets[0], store_uri, project_root)
        for notice in logs.notices:
            print(f"diagnose: {notice}", file=sys.stderr)
        place = find_job(targets[0], store_uri, project_root)
        # Of a job whose ranks never started, Slurm's output has the reason
        output: list[Path] = []
        for folder in place.folders:
            output += sorted(folder.glob("slurm/*.log"))
        if output and not logs.lines:
            return diagnose_files(output)
        store = place.open_store()
        return diagnose_job([] if store is None else read_events(store), logs.lines)
    files: list[Path | None] = []
    for target in targets:
        if target == "-":
            files += [None]
        else:
            files += log_files([target])
    return diagnose_files(files)


def _render_candidate(candidate: PossibleCause) -> str:
    rule = candidate.rule
    return (
        f"  {rule.title}  [{rule.id}, {candidate.probability:.0%}]; to tell: {candidate.separate}"
    )


def _render(finding: Finding) -> Iterator[str]:
    rule = finding.rule
    confidence = finding.confidence if finding.probability is None else finding.probability
    yield f"{finding.role}: {rule.title}  [{rule.id}, {rule.family}, confidence {confidence:.0%}]"
    for line in finding.evidence:
        place = f"{line.file}:{line.number}"
        if line.rank is None:
            rank = ""
        else:
            rank = f" rank {line.rank}"
        if line.time is None:
            stamp = ""
        else:
            stamp = time.strftime(" %Y-%m-%dT%H:%M:%SZ", time.gmtime(line.time))
        yield f"  {place}{rank}{stamp} | {shorten(line.text)}"
    if finding.count > len(finding.evidence):
        yield f"  … {finding.count} such lines" + (
            f" on {len(finding.ranks)} ranks" if len(finding.ranks) > 1 else ""
        )
    if finding.note or finding.suspects:
        named = ", ".join(f"rank {rank}" for rank in finding.suspects[:8])
        named = named or ("a rank without these lines" if rule.suspects else "no single rank")
        yield f"  suspect: {named}{'; ' if finding.note else ''}{finding.note}"
    if finding.role not in ("cascade", "history"):
        causes = "; ".join(f"{cause} ({share:.0%})" for cause, share in rule.causes.items())
        yield from ([f"  cause: {causes}"] if causes else [])
        yield from (f"  fix: {fix}" for fix in rule.fix)
        yield f"  more: ebbflow explain {rule.id}"
