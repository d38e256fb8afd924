"""Typed facts in log lines, such as memory sizes, error numbers and exit codes.

A rule tests them in its field `facts`, with an expression over the fields of one kind of fact. Such
an expression can combine lines and ranks, and calculate, which a regular expression for one line
cannot.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import CodeType
from typing import ClassVar, Protocol

from ebbflow.diagnose.reading import LogText

_UNITS = {"": 1.0, "b": 1.0, "bytes": 1.0, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_UNITS |= {"tib": 2.0**40, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "eb": 1e18}
_NAMES = {
    "no space left on device": 28,
    "cannot allocate memory": 12,
    "too many open files": 24,
    "disk quota exceeded": 122,
    "permission denied": 13,
    "input/output error": 5,
    "stale file handle": 116,
    "read-only file system": 30,
    "address already in use": 98,
}
_SIGNALS = {"sigkill": 9, "sigsegv": 11, "sigabrt": 6, "sigterm": 15, "sigbus": 7, "sigill": 4}
_TOP_LEVEL = {"epoch", "step", "global_step", "state_dict", "model", "optimizer", "scheduler"}
_TOP_LEVEL |= {"iteration", "args", "config", "scaler", "ema", "best_metric", "hyper_parameters"}
_SIZE = r"(\d+(?:\.\d+)?) ?([KMGTE]i?B|bytes)\b"
_MEMORY = {
    "requested": re.compile(rf"Tried to allocate {_SIZE}", re.IGNORECASE),
    "capacity": re.compile(rf"total capac\w*(?: of)? {_SIZE}|{_SIZE} total capac", re.IGNORECASE),
    "free": re.compile(rf"{_SIZE} (?:is )?free", re.IGNORECASE),
    "allocated": re.compile(
        rf"{_SIZE} (?:already allocated|is allocated by PyTorch)", re.IGNORECASE
    ),
    "reserved": re.compile(rf"{_SIZE} reserved in total", re.IGNORECASE),
    "unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated", re.IGNORECASE),
}
_ERRNO = re.compile(rf"\[Errno (\d+)\]|errno: (\d+)|({'|'.join(_NAMES)})", re.IGNORECASE)
_PATH = re.compile(r"[\"']((?:/|\./|\.\./|~/|[A-Za-z]:\\)[^\"']+)[\"']|: (/[^\s:'\"]+)\s*$")
# What a package needs, and what is installed: by pip, transformers, and builds of CUDA extensions
_VERSIONS = (
    re.compile(
        r"requires (?P<package>[\w.-]+?)(?P<required>(?:[<>=!~]=?[\w.*]+,?)+), but you have [\w.-]+ "
        r"(?P<found>\d[\w.]*)"
    ),
    re.compile(
        r"(?P<package>[\w.-]+?)(?P<required>(?:[<>=!~]=?[\w.*]+,?)+) is required .{0,80}but found "
        r"[\w.-]+==(?P<found>\d[\w.]*)"
    ),
    re.compile(
        r"detected (?P<package>CUDA) version \((?P<found>[\d.]+)\) mismatches the version that was used "
        r"to compile\s+PyTorch \((?P<required>[\d.]+)\)"
    ),
)
_CONDITION = re.compile(r"([<>=!~]=?)([\w.*]+)")
_END = re.compile(
    r"exit ?code\s*[:=]?\s*(-?\d+)|terminated with (?:exit )?code (-?\d+)|exited with (?:exit )?code "
    r"(-?\d+)|(?:terminated|killed|died) (?:with|by) (?:signal )?(?:<Signals\.)?(SIG[A-Z]+)",
    re.IGNORECASE,
)
_KEYS = re.compile(r"(Missing|Unexpected) key\(s\) in state_dict: (.*)")
_KEY = re.compile(r"[\"']([\w.\[\]-]+)[\"']")
_RANK_KEY = re.compile(r"(?:^|[._])(?:dp_|tp_|pp_|mp_)?rank_?\d+(?:$|[._])")
_SIZES = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
_TIMEOUT = re.compile(
    r"\[(?:PG(?: ID)? (?P<group>\d+)[^]]*?)?Rank (?P<rank>\d+)\] Watchdog caught collective operation "
    r"timeout: WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<operation>\w+)"
)
_NCCL = re.compile(r"NCCL error in: |\bnccl(?:Internal|System|Remote|UnhandledCuda)Error\b")
_LAST_ERROR = re.compile(r"Last error:\s*(.*)")
_ADDRESS = re.compile(r"remote=\[|connect to \(?\[?(?:127\.|localhost|::1)", re.IGNORECASE)
_LOOPBACK = re.compile(r"(?:remote=\[|connect to \(?\[?)(?:127\.|localhost|::1|::ffff:127\.)")
_WORLD = re.compile(
    r"(?:world[_ ]?size|nranks|MEMBER: \d+/|num_processes)\W{0,3}(\d+)", re.IGNORECASE
)
_UNRESOLVED = re.compile(r"network addresses of \(([^,]+), \d+\) cannot be retrieved \(gai error")
_NO_ADDRESS = re.compile(r"connect to any network address of \(([^,]+), \d+\)")
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_SCALE = re.compile(
    rf"reducing loss scale to {_NUMBER}|loss scale reached \({_NUMBER}", re.IGNORECASE
)
_MAY_TELL = re.compile(
    r"tried to allocate|is free|reserved in total|errno|last error|nccl|net|connect|exit|terminated"
    r"|killed|died|requires |is required|mismatches the version|key\(s\) in|size of tensor|seqnum=|remote=|world|nranks|member|loss scale|bootstrap"
    rf"|{'|'.join(_NAMES)}"
)
_NEXT_LINES = 3  # that may continue a message which a terminal has wrapped
_MOST_FACTS = 2000
_ALLOWED = (
    ast.Expression,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.Compare,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.Eq,
    ast.NotEq,
    ast.In,
    ast.NotIn,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.Call,
)
_FUNCTIONS = {"abs": abs, "round": round}


@dataclass(frozen=True)
class Fact:
    """A typed fact that a log line states, such as a size or an exit code."""

    kind: ClassVar[str] = ""
    line: LogText
    order: int  # position of the line among all lines read
    frame: str  # path and function of the innermost frame of the traceback before the line
    place: str  # the same of all its inner frames

    @property
    def text(self) -> str:
        """The line, in lower case."""
        return self.line.text.lower()

    def fits(self, expression: str) -> bool:
        """Return whether an expression over the fact's fields is true."""
        names = {name: getattr(self, name) for name in _names_of(type(self))}
        return bool(eval(compile_expression(expression, self.kind), _FUNCTIONS.copy(), names))


@dataclass(frozen=True)
class MemoryShortage(Fact):
    """Failed request for GPU memory. All sizes are in bytes."""

    kind: ClassVar[str] = "memory"
    requested: float
    capacity: float
    free: float
    allocated: float
    unallocated: float  # reserved by torch, but not allocated


@dataclass(frozen=True)
class OsFailure(Fact):
    """Error of the operating system, with its number and the path that the line names."""

    kind: ClassVar[str] = "os"
    errno: int
    path: str  # "" if the line names none


@dataclass(frozen=True)
class ProcessEnd(Fact):
    """A process that ended with an exit code other than 0, or by a signal."""

    kind: ClassVar[str] = "end"
    code: int
    signal: int  # 0: none


@dataclass(frozen=True)
class PackageVersion(Fact):
    """Installed version of a package, and the version that another package requires."""

    kind: ClassVar[str] = "version"
    package: str
    found: str
    required: str
    met: bool


@dataclass(frozen=True)
class StateKeys(Fact):
    """Numbers of unexpected and missing keys when a model loads a state dict."""

    kind: ClassVar[str] = "keys"
    unexpected: int
    missing: int
    top_level: int  # unexpected keys of a whole checkpoint, such as "epoch"
    of_ranks: int  # keys that name a rank


@dataclass(frozen=True)
class SizeMismatch(Fact):
    """Two sizes that should be equal."""

    kind: ClassVar[str] = "sizes"
    larger: int
    smaller: int


@dataclass(frozen=True)
class NcclError(Fact):
    """NCCL's own message, in lower case, which follows a torch exception as "Last error:"."""

    kind: ClassVar[str] = "nccl"
    detail: str


@dataclass(frozen=True)
class Address(Fact):
    """An address to which a rank connects."""

    kind: ClassVar[str] = "address"
    loopback: bool
    resolved: bool  # whether its name has an address
    world: int  # number of ranks that the logs name


@dataclass(frozen=True)
class ReducedScale(Fact):
    """Value to which mixed-precision training reduced its loss scale."""

    kind: ClassVar[str] = "scale"
    value: float


@dataclass(frozen=True)
class Timeouts(Fact):
    """Summary of the first timed-out collective of each rank in one process group."""

    kind: ClassVar[str] = "timeouts"
    ranks: int
    operations: int  # different ones
    spread: int  # between the sequence numbers


KINDS: dict[str, type[Fact]] = {
    kind.kind: kind
    for kind in (
        MemoryShortage,
        OsFailure,
        ProcessEnd,
        PackageVersion,
        StateKeys,
        SizeMismatch,
        Address,
        ReducedScale,
        Timeouts,
    )
}


@functools.cache
def compile_expression(expression: str, kind: str) -> CodeType:
    """Compile an expression over the fields of one kind of fact.

    Raises ValueError if the kind or the expression is invalid.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of fact: {', '.join(KINDS)}")
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{expression!r}: {error.msg}") from error
    known = {*_names_of(KINDS[kind]), *_FUNCTIONS}
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError(f"{expression!r}: {type(node).__name__} is not allowed")
        if isinstance(node, ast.Name) and node.id not in known:
            raise ValueError(f"{expression!r}: {node.id} is none of {', '.join(sorted(known))}")
    return compile(tree, "<rule>", "eval")


def has_fact(lower: str) -> bool:
    """Return whether a lower-case line may contain a fact, or continue the fact of the line before."""
    return _MAY_TELL.search(lower) is not None


class FrameSource(Protocol):
    """Source of traceback frames, such as `Series`."""

    def frames_before(self, line: LogText) -> list[str]:
        """Return path and function of the inner traceback frames before a line, innermost last."""
        ...


class FactReader:
    """Reader that collects facts from log lines in one pass."""

    def __init__(self) -> None:
        self._facts: list[Fact] = []
        self._timeouts: dict[tuple[str, int], tuple[int, str, Fact]] = {}  # by group and rank
        self._wrapped: tuple[LogText, str] | None = None
        self._nccl: dict[tuple[str, int | None], int] = {}  # line of the last NCCL error
        self._awaited: tuple[LogText, int] | None = None
        self._world = 0
        self._unresolved: set[str] = set()  # names without an address

    @property
    def awaits_next(self) -> bool:
        """Whether the next line continues a fact."""
        return self._awaited is not None or self._wrapped is not None

    def read(self, line: LogText, order: int, places: FrameSource) -> None:
        """Collect the facts in one line. `places` provides the traceback frames before the line."""
        lower = line.text.lower()
        if line.rank is not None:
            self._world = max(self._world, line.rank + 1)
        for fact in self._read(line, lower):
            if len(self._facts) < _MOST_FACTS:
                frames = places.frames_before(line)
                frame = frames[-1] if frames else ""
                self._facts.append(replace(fact, order=order, frame=frame, place=" ".join(frames)))

    def facts(self) -> list[Fact]:
        """Return all facts, including those that combine lines of several ranks."""
        known = []
        for fact in self._facts:
            known.append(replace(fact, world=self._world) if isinstance(fact, Address) else fact)
        groups: dict[str, list[tuple[int, str, Fact]]] = {}
        for (group, _), entry in self._timeouts.items():
            groups.setdefault(group, []).append(entry)
        for entries in groups.values():
            sequences = [sequence for sequence, _, _ in entries]
            first = entries[0][2]
            operations = len({operation for _, operation, _ in entries})
            spread = max(sequences) - min(sequences)
            known.append(
                Timeouts(first.line, first.order, "", "", len(entries), operations, spread)
            )
        return known

    def forget(self, file: str) -> None:
        """Drop the facts of a file, because its job starts again."""
        self._facts = [fact for fact in self._facts if fact.line.file != file]
        for key, (_, _, fact) in list(self._timeouts.items()):
            if fact.line.file == file:
                del self._timeouts[key]

    def _read(self, line: LogText, lower: str) -> Iterator[Fact]:
        yield from self._read_memory(line)
        yield from self._read_nccl(line)
        if "errno" in lower or any(name in lower for name in _NAMES):
            yield from _read_os_failure(line)
        if "exit" in lower or "terminated" in lower or "killed" in lower or "died" in lower:
            yield from _read_end(line)
        if "key(s) in state_dict" in line.text:
            yield from _read_keys(line)
        if "requires " in lower or "is required" in lower or "mismatches the version" in lower:
            yield from _read_version(line)
        match = _SIZES.search(line.text)
        if match is not None:
            sizes = sorted((int(match[1]), int(match[2])))
            yield SizeMismatch(line, 0, "", "", sizes[1], sizes[0])
        match = _TIMEOUT.search(line.text)
        if match is not None:
            key = (match["group"] or "", int(match["rank"]))
            fact = Fact(line, 0, "", "")
            self._timeouts.setdefault(key, (int(match["sequence"]), match["operation"], fact))
        if _ADDRESS.search(line.text):
            yield Address(line, 0, "", "", _LOOPBACK.search(line.text) is not None, True, 0)
        if match := _UNRESOLVED.search(line.text):
            self._unresolved.add(match[1])
        match = _NO_ADDRESS.search(line.text)
        if match is not None and match[1] in self._unresolved:
            yield Address(line, 0, "", "", False, False, 0)
        match = _SCALE.search(line.text)
        if match is not None:
            yield ReducedScale(line, 0, "", "", float(match[1] or match[2]))
        if match := _WORLD.search(line.text):
            self._world = max(self._world, int(match[1]))

    def _read_memory(self, line: LogText) -> Iterator[Fact]:
        text = line.text
        at = line
        if self._wrapped is not None:
            at, before = self._wrapped
            if line.file == at.file and line.number - at.number <= _NEXT_LINES:
                text = f"{before} {text.strip()}"
            else:
                self._wrapped = None
                at = line
        if "tried to allocate" not in text.lower():
            return
        sizes = {name: _size(pattern.search(text)) for name, pattern in _MEMORY.items()}
        if sizes["reserved"] is not None and sizes["allocated"] is not None:
            sizes["unallocated"] = sizes["reserved"] - sizes["allocated"]
        if sizes["unallocated"] is None or sizes["free"] is None:
            self._wrapped = (at, text)
            return
        self._wrapped = None
        yield MemoryShortage(
            at,
            0,
            "",
            "",
            sizes["requested"] or 0.0,
            sizes["capacity"] or 0.0,
            sizes["free"],
            sizes["allocated"] or 0.0,
            sizes["unallocated"],
        )

    def _read_nccl(self, line: LogText) -> Iterator[Fact]:
        writer = (line.file, line.rank)
        if _NCCL.search(line.text):
            self._nccl[writer] = line.number
        if self._awaited is not None:
            before, number = self._awaited
            self._awaited = None
            if before.file == line.file and line.number - number <= 2:
                yield NcclError(line, 0, "", "", line.text.lower())
        match = _LAST_ERROR.search(line.text)
        if match is None or line.number - self._nccl.get(writer, -99) > 6:
            return
        if match[1].strip():
            yield NcclError(line, 0, "", "", match[1].lower())
        else:
            self._awaited = (line, line.number)


def _names_of(kind: type[Fact]) -> list[str]:
    names = [field.name for field in fields(kind) if field.name not in ("line", "order")]
    return [*names, "text"]


def _size(match: re.Match[str] | None) -> float | None:
    """Return the bytes in a size such as "2.00 GiB"."""
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None][:2]
    return float(number) * _UNITS[unit.lower()]


def _read_os_failure(line: LogText) -> Iterator[Fact]:
    match = _ERRNO.search(line.text)
    if match:
        number = int(match[1] or match[2] or _NAMES[match[3].lower()])
        yield OsFailure(line, 0, "", "", number, _read_path(line.text))


def _read_path(text: str) -> str:
    """Return the path that a line names, or "" if it names none."""
    match = _PATH.search(text)
    if match is None:
        return ""
    return match[1] or match[2]


def _read_version(line: LogText) -> Iterator[Fact]:
    for pattern in _VERSIONS:
        match = pattern.search(line.text)
        if match is not None:
            package, found, required = (match[name] for name in ("package", "found", "required"))
            required = required.rstrip(",")
            met = _are_met(found, required)
            yield PackageVersion(line, 0, "", "", package.lower(), found, required, met)
            return


def _are_met(found: str, required: str) -> bool:
    """Return whether a version meets all conditions, such as ">=2.0,<3"."""
    conditions = _CONDITION.findall(required) or [("==", required)]
    return all(_meets(found, sign, version) for sign, version in conditions)


def _meets(found: str, sign: str, version: str) -> bool:
    wanted = _numbers_of(version)
    have = _numbers_of(found)
    length = max(len(wanted), len(have))
    if version.endswith("*") or sign == "~=":
        stem = wanted if version.endswith("*") else wanted[:-1]
        begins = have[: len(stem)] == stem
        return begins != (sign == "!=") and (sign != "~=" or have >= wanted)
    have += [0] * (length - len(have))
    wanted += [0] * (length - len(wanted))
    holds = {
        "==": have == wanted,
        "=": have == wanted,
        "!=": have != wanted,
        ">=": have >= wanted,
        "<=": have <= wanted,
        ">": have > wanted,
        "<": have < wanted,
    }
    return holds.get(sign, True)


def _numbers_of(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def _read_end(line: LogText) -> Iterator[Fact]:
    match = _END.search(line.text)
    if match is None:
        return
    if match[4]:
        signal = _SIGNALS.get(match[4].lower(), 0)
        code = -signal
    else:
        code = int(match[1] or match[2] or match[3])
        signal = -code if code < 0 else max(code - 128, 0)
    if code:
        yield ProcessEnd(line, 0, "", "", code, signal)


def _read_keys(line: LogText) -> Iterator[Fact]:
    for word, listed in _KEYS.findall(line.text):
        keys = _KEY.findall(listed)
        top_level = 0
        for key in keys:
            top_level += key in _TOP_LEVEL or ("." not in key and key.endswith("state_dict"))
        of_ranks = sum(_RANK_KEY.search(key) is not None for key in keys)
        if word == "Unexpected":
            yield StateKeys(line, 0, "", "", len(keys), 0, top_level, of_ranks)
        else:
            yield StateKeys(line, 0, "", "", 0, len(keys), 0, of_ranks)
