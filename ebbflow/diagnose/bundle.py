"""The command `ebbflow bundle`: everything that a colleague needs to understand a job, in one
archive without secrets.

The archive is a zip file of at most 20 MB. It holds the configuration, plan, report, events, stack
traces, the last lines of each rank, a diagnosis, and the versions and devices of this machine. It
holds no weights and no data.
"""

import argparse
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import yaml

from ebbflow import __version__
from ebbflow.core.errors import InfraError, Outcome, StoreError
from ebbflow.core.events import Event, read_events
from ebbflow.core.rank_logs import JobPlace, LogLine, find_job, read_logs, unknown_job
from ebbflow.core.store import Store
from ebbflow.diagnose.command import render
from ebbflow.diagnose.job import diagnose_job

LARGEST_BYTES = 20_000_000
# Of a larger file, such as the events of a long job, the end is read
_LARGEST_FILE_BYTES = 64 * 1024 * 1024
_LINES_OF_A_RANK = 2000
_PROBE_SECONDS = 20.0
_STORE_PREFIXES = ("generations", "launchers", "overrides", "permits", "quarantine", "events")
_STORE_FILES = ("config.json", "plan.json", "report.json", "report.html", "metrics.prom")
# Logs of ranks are left out: their last lines are added as text, from which keys that span lines
# can be removed.
_LOCAL_FILES = re.compile(r"logs/([^/]+\.log|\d+-\w+/(?!rank-\d+\.(log|jsonl)$).+)")
_SAFE_VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH|PYTORCH|CUDA|OMP|MKL|EBBFLOW|METAFLOW|FI|SLURM|NVIDIA)_\w+|AWS_(DEFAULT_)?REGION|PYTHON\w+|LANG"
)
_PROGRAMS = {
    "nvidia-smi.txt": ("nvidia-smi", "-q"),
    "nvidia-topology.txt": ("nvidia-smi", "topo", "-m"),
    "efa.txt": ("fi_info", "-p", "efa"),
    "interfaces.txt": ("ip", "-brief", "address"),
}

_PATTERNS = yaml.safe_load(Path(__file__).with_name("secrets.yaml").read_bytes())
_SECRET_WORD = _PATTERNS["word"]
_SECRETS = {
    kind: re.compile(text.replace("<word>", _SECRET_WORD))
    for kind, text in _PATTERNS["kinds"].items()
}
_ENDS, _FLAT = (_PATTERNS["manifest"].pop(name) for name in ("ends", "flat"))
_MANIFEST = {name: re.compile(text) for name, text in _PATTERNS["manifest"].items()}
_MANIFEST_VALUE = "[redacted: Kubernetes secret]"
_SECRET_NAME = re.compile(rf"(?i){_SECRET_WORD}")


class BundleError(InfraError, outcome=Outcome.CONFIG):
    """Error: the archive cannot be written."""


@dataclass(frozen=True)
class BundleFile:
    """One file of the archive, with its secrets removed."""

    name: str  # path in the archive
    data: bytes
    redacted: int  # number of secrets that were removed
    cut: int = 0  # number of bytes left out at the beginning


def redact(text: str, own: tuple[str, ...] = ()) -> tuple[str, int]:
    """Replace each secret in a text with its kind, such as ``[redacted: JWT]``.

    The number of lines stays the same.

    Args:
        own: secret values of this machine's environment, from `secret_values`. Every occurrence is
            replaced.

    Returns:
        The redacted text, and the number of secrets that were replaced.
    """
    text, count = _redact_manifests(text)
    for value in own:
        count += text.count(value)
        text = text.replace(value, "[redacted: environment]")
    for kind, pattern in _SECRETS.items():

        def replace(match: re.Match[str], kind: str = kind) -> str:
            kept = match.groupdict().get("keep") or ""
            return f"{kept}[redacted: {kind}]" + "\n" * match[0][len(kept) :].count("\n")

        text, found = pattern.subn(replace, text)
        count += found
    return text, count


def secret_values(environment: dict[str, str]) -> tuple[str, ...]:
    """Return the values of variables whose names suggest a secret, longest first.

    Paths and values shorter than 6 characters are not treated as secrets.
    """
    found = {
        value
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and len(value) >= 6
    }
    return tuple(
        sorted((value for value in found if not value.startswith("/")), key=len, reverse=True)
    )


def add_bundle_command(commands: argparse._SubParsersAction, project_root: Path) -> None:
    """Add the command `bundle`.

    It looks for jobs in EBBFLOW_RUNS or, if that is not set, in `project_root`/runs.
    """
    command = commands.add_parser(
        "bundle", help="pack what a colleague needs to understand a job, without secrets"
    )
    command.add_argument("job", metavar="JOB", help="a job's name, or latest")
    command.add_argument(
        "--output", type=Path, metavar="FILE", help="the archive to write (ebbflow-JOB.zip)"
    )
    command.add_argument(
        "--list", action="store_true", help="only show what the archive would hold"
    )
    command.add_argument("--yes", action="store_true", help="do not ask before writing")
    command.add_argument(
        "--store", metavar="URI", help="the job's store, if this machine has no note of it"
    )
    command.set_defaults(command=lambda options: bundle(options, project_root))


def bundle(options: argparse.Namespace, project_root: Path) -> int:
    """List the contents of the archive, ask for confirmation, and write the archive.

    The exit code is 0 on success, 1 if the user declines or the archive cannot be written, and 2 if
    the job is unknown or the archive already exists.
    """
    place = find_job(options.job, options.store, project_root)
    output = options.output or Path(f"ebbflow-{place.name}.zip")
    if output.exists() and not options.list:
        raise BundleError(f"{output} exists; fix: remove it, or name another file with --output")
    files, notes = collect_files(place)
    if len(files) <= len(_machine_files()[0]):
        raise unknown_job(options.job, place, project_root)
    archive, files = pack(files, LARGEST_BYTES)
    for note in notes:
        print(f"bundle: {note}", file=sys.stderr)
    print(_listing(files, len(archive)))
    if options.list:
        return 0
    if (
        not options.yes
        and sys.stdin.isatty()
        and input(f"write {output}? [y/N] ").strip().lower() not in ("y", "yes")
    ):
        return Outcome.FAILED.exit_code
    try:
        with open(output, "xb") as file:
            file.write(archive)
    except OSError as error:
        print(
            f"bundle: {output}: {error.strerror}; fix: name another file with --output",
            file=sys.stderr,
        )
        return Outcome.FAILED.exit_code
    print(
        f"wrote {output}; it may still hold names of files, hosts and people: look through it "
        "before you send it"
    )
    return 0


def collect_files(place: JobPlace) -> tuple[list[BundleFile], list[str]]:  # noqa: C901 - one branch for each kind of file
    """Collect the files for the archive, most important first.

    Return the files, and warnings about missing parts.
    """
    own = secret_values(dict(os.environ))
    notes = []
    files = []

    def add(name: str, data: bytes, cut: int = 0) -> None:
        text, redacted = redact(data.decode(errors="replace"), own)
        files.append(BundleFile(name, text.encode(), redacted, cut))

    machine, problems = _machine_files()
    for name, text in machine.items():
        add(f"machine/{name}", text.encode())
    stored: dict[str, tuple[bytes, int]] = {}
    lines: list[LogLine] = []
    events: list[Event] = []
    try:
        store = place.open_store()
        if store is not None:
            stored_files = _stored_files(store)
            stored_events = read_events(store)
            stored = stored_files
            events = stored_events
        logs = read_logs(place.folders, [] if store is None else [store])
        lines = logs.lines
        problems = [*problems, *logs.notices]
    except StoreError as error:
        problems.append(f"what the store holds is missing, it does not answer: {error}")
        logs = read_logs(place.folders, [])
        lines = logs.lines
    for folder in place.folders:
        for path in sorted(folder.glob("logs/**/*")) + [folder / name for name in _STORE_FILES]:
            name = path.relative_to(folder).as_posix()
            if (
                name in stored
                or not (_LOCAL_FILES.fullmatch(name) or name in _STORE_FILES)
                or not path.is_file()
            ):
                continue
            try:
                with open(path, "rb") as file:
                    start = max(0, os.fstat(file.fileno()).st_size - _LARGEST_FILE_BYTES)
                    file.seek(start)
                    stored[name] = file.read(), start
            except OSError as error:
                problems.append(f"{path}: {error.strerror}")
    if lines:
        diagnosis = diagnose_job(events, lines)
        add("diagnosis.txt", render(diagnosis).encode())
        add("diagnosis.json", json.dumps(diagnosis.to_json(), indent=1).encode())
    segments = [stored.pop(name) for name in sorted(stored) if name.startswith("events/")]
    if segments:
        stored["events.jsonl"] = (
            b"".join(data for data, _ in segments),
            sum(cut for _, cut in segments),
        )
    order = (
        "config.json",
        "report.json",
        "plan.json",
        "generations/",
        "logs/",
        "metrics.prom",
        "events.jsonl",
    )
    names = sorted(name for name in stored if stored[name][0])
    for name in sorted(
        names, key=lambda name: [name.startswith(prefix) for prefix in order], reverse=True
    ):
        add(name, *stored[name])
    files += _log_tails(lines, own)
    notes += problems
    if notes:
        add("notes.txt", "\n".join(notes).encode())
    return files, notes


def pack(files: list[BundleFile], largest_bytes: int) -> tuple[bytes, list[BundleFile]]:
    """Compress files into one archive of at most `largest_bytes`.

    A file that does not fit is cut at its beginning, or left out if not even its end fits.

    Returns:
        The archive, and the files in the archive with their final (possibly cut) contents.
    """
    buffer = io.BytesIO()
    packed = []
    left = largest_bytes
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            # 300 bytes: headers of an entry, without its name, which is stored twice.
            overhead = 300 + 2 * len(file.name.encode())
            data = file.data
            cut = file.cut
            while data and len(zlib.compress(data)) + overhead > left:
                half = len(data) // 2
                data = data[half:]
                cut = cut + half
            if overhead > left or (file.data and not data):
                continue
            before = buffer.tell()
            archive.writestr(file.name, data)
            left -= max(buffer.tell() - before, 0) + overhead
            packed.append(BundleFile(file.name, data, file.redacted, cut))
    return buffer.getvalue(), packed


def _redact_manifests(text: str, ends: str = _ENDS[0]) -> tuple[str, int]:
    """Redact the values in Kubernetes manifests of the kind Secret.

    Manifests may be in YAML or JSON, also behind prefixes of the lines. Return the new text, and
    the number of redacted values.
    """
    count = 0
    if "Secret" in text:
        parts = re.split(ends, text)
    else:
        parts = [text]
    lines = parts[::2]
    for at, line in enumerate(lines):
        kinds = []
        if "Secret" in line and "kind" in line:
            kinds = list(_MANIFEST["kind"].finditer(line))
        if kinds:
            count += _redact_object(lines, at, kinds[0].start())
            if ends == _ENDS[0]:
                count += _redact_flat(lines, at, {kind["quote"] for kind in kinds})
                lines[at], found = _redact_manifests(lines[at], _ENDS[1])  # a text in JSON
                count += found
    parts[::2] = lines
    return "".join(parts), count


def _redact_flat(lines: list[str], at: int, quotes: set[str]) -> int:
    """Redact manifests that are one line of JSON, in and around line `at`.

    A program may have wrapped the JSON. Return the number of redacted values.
    """
    near = slice(max(at - 2, 0), at + 3)
    count = 0
    for quote in quotes - {""}:
        text, found = re.subn(
            _FLAT.replace("<quote>", re.escape(quote)),
            lambda hit: (
                f"{hit['keep']}{_MANIFEST_VALUE}" + "\n" * hit[0][len(hit["keep"]) :].count("\n")
            ),
            "\n".join(lines[near]),
        )
        lines[near] = text.split("\n")
        count = count + found
    return count


def _redact_object(lines: list[str], at: int, column: int) -> int:  # noqa: C901 - one branch for each kind of value
    """Redact the object whose `kind` is in line `at`. Return the number of redacted values.

    The keys of the object begin at `column`, behind equal prefixes.
    """

    def level(line: str) -> str:
        return re.sub(r"\d", "0", line[:column].replace("-", " "))

    def is_part(line: str) -> bool:
        same = level(line) == level(lines[at]) or not line.strip()
        return same and _MANIFEST["part"].match(line[column:]) is not None

    def is_first(line: str) -> bool:  # of an object in a list
        return line[max(column - 2, 0) : column] == "- "

    first = at
    last = at + 1
    count = 0
    within = False
    depth = 0
    while first and not is_first(lines[first]) and is_part(lines[first - 1]):
        first -= 1
    while last < len(lines) and not is_first(lines[last]) and is_part(lines[last]):
        last += 1
    for number in range(first, last):
        new = rest = lines[number][column:]
        indent = len(rest) - len(rest.lstrip())
        data = _MANIFEST["data"].match(rest)
        if data and not indent:
            within = True
            depth = 0
            if data["value"] in ("", "{"):
                new = rest
            else:
                new = f"{data['keep']} {_MANIFEST_VALUE}"
        elif rest.strip() and not indent:
            within = False
        elif within and rest.strip(" },"):
            depth = depth or indent
            if indent == depth:
                entry = _MANIFEST["entry"].match(rest)
            else:
                entry = None
            if entry:
                kept = f"{entry['keep']}{entry['quote']}"
            else:
                kept = " " * indent
            new = f"{kept}{_MANIFEST_VALUE}{entry['end'] if entry else ''}"
        count += new != rest
        lines[number] = lines[number][:column] + new
    return count


def _log_tails(lines: list[LogLine], own: tuple[str, ...]) -> Iterator[BundleFile]:
    """Yield one file per rank and generation, with the rank's last log lines in that generation.

    Secrets are removed before the lines are cut, because a secret may span several lines.
    """
    ranks: dict[tuple[int, int], list[LogLine]] = defaultdict(list)
    for line in lines:
        ranks[line.generation, line.rank].append(line)
    for (generation, rank), found in sorted(ranks.items(), reverse=True):
        found = found[-10 * _LINES_OF_A_RANK :]
        text, redacted = redact("\n".join(line.text.replace("\n", " ") for line in found), own)
        shown = [
            f"{line.t} node {line.node} step {'?' if line.step is None else line.step} | {text}"
            for line, text in zip(found, text.split("\n"), strict=True)
        ]
        name = f"output/generation-{generation:06d}-rank-{rank}.txt"
        yield BundleFile(name, "\n".join(shown[-_LINES_OF_A_RANK:]).encode(), redacted)


def _stored_files(store: Store) -> dict[str, tuple[bytes, int]]:
    found: dict[str, tuple[bytes, int]] = {}
    metas = []
    for prefix in _STORE_PREFIXES:
        metas += store.list(prefix)
    for name in _STORE_FILES:
        meta = store.head(name)
        if meta is not None:
            metas.append(meta)
    for meta in metas:
        start = max(0, meta.size - _LARGEST_FILE_BYTES)
        found[meta.key] = (
            store.get_range(meta.key, start, meta.size - start) if start else store.get(meta.key),
            start,
        )
    return found


def _machine_files() -> tuple[dict[str, str], list[str]]:
    """Return files that describe this machine, and the problems in reading them.

    The files list versions, devices and harmless environment variables.

    The job may have run on other machines.
    """
    packages = sorted(
        {f"{each.metadata['Name']}=={each.version}" for each in distributions()}, key=str.lower
    )
    facts = {
        "ebbflow": __version__,
        "python": sys.version,
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _SAFE_VARIABLES.fullmatch(name)
        },
    }
    files = {"machine.json": json.dumps(facts, indent=1), "packages.txt": "\n".join(packages)}
    problems = []
    for name, command in _PROGRAMS.items():
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS
            )
            files[name] = done.stdout + done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            problems.append(f"{' '.join(command)}: {error}")
    return files, problems


def _listing(files: list[BundleFile], size: int) -> str:
    rows = []
    for file in files:
        if file.redacted:
            said = f", {file.redacted} secrets removed"
        else:
            said = ""
        rows.append(
            f"{len(file.data):>12,}  {file.name}{said}"
            + (f", first {file.cut:,} bytes left out" if file.cut else "")
        )
    total = sum(file.redacted for file in files)
    return "\n".join(
        [
            "       bytes  file",
            *rows,
            f"{len(files)} files, {size:,} bytes packed, {total} secrets removed",
        ]
    )
