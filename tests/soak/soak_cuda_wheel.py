"""The product on torch's CUDA build, with a CUDA driver that has no GPU and writes down its calls.

    CUDA_WHEEL=FOLDER python -m pytest -n 0 -s tests/soak/soak_cuda_wheel.py

It makes an environment in FOLDER (2.7 GB of wheels, 5 GB on disk; default: a temporary one)
and uses one that is there. Ranks train on the CPU: nothing here shows what a GPU does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ebbflow.training.launch.evidence import fetch_records, parse_records, recorder_variables
from ebbflow.training.launch.heartbeat import RECORDER
from tests.compat import PAIRS, make_environment
from tests.support.attached_scripts import attached
from tests.support.flow import ROOT, FlowRunner, train_alone, wait_until

pytestmark = [pytest.mark.flow, pytest.mark.timeout(5400)]

_TIMEOUT_SECONDS = 900.0
_NO_DEVICE = 100
_STEPS = 40
_PYTHON = PAIRS[0][0]
_TORCH = PAIRS[1][1]

# A rank's end of the attached script: what it has, and whether it can ask for a GPU after its fork
_SCRIPT_END = """
import json, os, pathlib, torch
found = {"variables": dict(os.environ), "cuda": torch.version.cuda, "gpu": torch.cuda.is_available()}
found["allocator"] = torch._C._accelerator_getAllocatorSettings()
pathlib.Path(__file__).with_name(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
"""

# NCCL's process group can be made without a GPU if there seems to be one; it takes no collective.
_ONE_DEVICE = """
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return device; }
"""
_RECORDER = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from ebbflow.training.compat import set_group_timeout
from ebbflow.training.launch.evidence import _HANDLERS, _UnixConnection, fetch_records
from ebbflow.training.launch.heartbeat import RECORDER, RECORDS, WatchHooks
from ebbflow.training.torch_names import describe_release, find_missing_names
heartbeat = Path(sys.argv[1])
hooks = WatchHooks(heartbeat, None)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
set_group_timeout(dist.group.WORLD, 5.0)
answers = {}
for handler in _HANDLERS:
    connection = _UnixConnection(heartbeat.with_suffix(RECORDER))
    connection.request("POST", f"/handler/{handler}")
    answer = connection.getresponse()
    answers[handler] = [answer.status, json.loads(answer.read())]
empty = fetch_records(heartbeat.with_suffix(RECORDER))
group = dist.new_group(backend="gloo")
dist.all_reduce(torch.ones(3), group=group)
hooks.save_records()
found = {
    "answers": answers, "empty": [empty[0].decode(), empty[1]], "backend": dist.get_backend(),
    "full": fetch_records(heartbeat.with_suffix(RECORDER))[0].decode(),
    "saved": heartbeat.with_suffix(RECORDS).read_text(), "missing": find_missing_names(),
    "note": describe_release("2.99.0", (2, 13)), "cuda": torch.version.cuda,
}
print(json.dumps(found), flush=True)
os._exit(0)  # NCCL's clean-up needs the device
"""
_ASK = """
import json, os, sys
from ebbflow.infra.checks.gpu import try_gpus
for folder in sys.argv[1:]:
    os.environ["LD_LIBRARY_PATH"] = folder
    os.environ["PATH"] = folder + ":" + os.environ["PATH"]
    finding, gpus = try_gpus()
    print(json.dumps([finding.status, finding.detail, finding.fix, gpus]))
"""


@dataclass(frozen=True)
class Call:
    function: str
    process: str  # its name: a forked rank's is "rank N"
    command: str

    @property
    def caller(self) -> str:
        """Return "rank", "check" (preflight's child, which computes on each GPU), or the command."""
        forked = self.process.startswith("rank ")
        program = re.search(r"-m ebbflow\.training (.*)", self.command)
        if forked or (program and "--standby" not in program[1]):
            return "rank"
        if "torch.cuda.get_arch_list()" in self.command:
            return "check"
        return self.command


@dataclass
class Driver:
    """The driver's library in a folder, and what it was asked for."""

    folder: Path
    version: int = 13000
    init: int = _NO_DEVICE
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.log = self.folder / "calls"
        settings = {"LOG": f'"{self.log}"', "VERSION": self.version, "INIT": self.init}
        defined = [f"-D{name}={value}" for name, value in settings.items()]
        source = ROOT / "tests/support/cuda_driver.c"
        library = self.folder / "libcuda.so.1"
        subprocess.run(
            ["cc", "-Wall", "-Werror", "-shared", "-fPIC", *defined, "-o", library, source, "-ldl"],
            check=True,
        )
        self.environment = {"LD_LIBRARY_PATH": str(self.folder), "PYTHONPATH": str(ROOT)}

    def tool(self, version: str) -> Driver:
        """Put an nvidia-smi beside the library, which shows the kernel module's version."""
        tool = self.folder / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho '{version}, NVIDIA H100'\n")
        tool.chmod(0o755)
        return self

    def calls(self) -> list[Call]:
        if not self.log.exists():
            return []
        rows = [line.split("\t") for line in self.log.read_text().splitlines()]
        return [Call(function, process.strip(), command) for function, _, process, command in rows]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch's CUDA build."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: the driver cannot be built")
    folder = Path(os.environ.get("CUDA_WHEEL") or tmp_path_factory.mktemp("cuda-wheel"))
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        # "===" takes the index's own build, "==" would take 2.13.0+cpu as well
        problem = make_environment(folder, _PYTHON, f"={_TORCH}")
        if problem:
            pytest.skip(f"torch's CUDA build cannot be had: {problem}")
    built_for = subprocess.run(
        [python, "-c", "import torch; print(torch.version.cuda)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=_TIMEOUT_SECONDS,
    ).stdout.strip()
    if built_for == "None":
        pytest.skip(f"{python}: its torch is built without CUDA")
    return python


@pytest.fixture(autouse=True)
def see_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what hides GPUs from all other tests."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def run_program(
    python: Path, program: str, *words: object, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", program, *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )


def test_a_job_with_a_killed_rank_ends_like_one_of_the_cpu_build(
    python: Path, tmp_path: Path
) -> None:
    """Only ranks ask for a GPU: the standby process must fork, and no other process needs one."""
    driver = Driver(tmp_path / "driver")
    runner = FlowRunner(tmp_path / "cuda", environment=driver.environment)
    runner.python = str(python)
    text = ROOT / "ebbflow"
    options = runner.options(data__path=text, training__max_steps=_STEPS)
    run = runner.run("run", *options, "--rehearse", "rank-kill@60%", timeout=_TIMEOUT_SECONDS)
    assert run.exit_code == 0, run.output[-3000:]
    assert run.report["outcome"] == "completed" and run.report["interruptions"] == 1
    asked = [call.caller for call in driver.calls() if call.function == "cuInit"]
    # Two ranks of the first start, and two of the second
    assert asked == ["rank"] * 4, driver.calls()
    assert {call.caller for call in driver.calls()} == {"rank"}
    names = {call.process for call in driver.calls()}
    assert names == {"rank 0", "rank 1"}, "no rank was forked from the standby process"

    whole = train_alone(
        FlowRunner(tmp_path / "cpu"), ranks=2, data__path=text, training__max_steps=_STEPS
    )
    assert run.report["weights_sha256"] == whole["weights_sha256"]
    print(f"weights of both builds: {whole['weights_sha256']}")


def test_an_attached_script_and_the_flight_recorders_of_its_ranks(
    python: Path, tmp_path: Path
) -> None:
    driver = Driver(tmp_path / "driver")
    script = attached(tmp_path / "script", "ddp")
    script.write_text(script.read_text() + _SCRIPT_END)
    runner = FlowRunner(tmp_path / "flow", environment=driver.environment)
    runner.python = str(python)
    words = ["run", str(script), "--ranks", "2", "--rehearse", "rank-kill@step:12"]
    words += ["--set", f"store={runner.store}", "--set", "checkpoint.interval=steps"]
    words += ["--set", "checkpoint.interval_steps=5"]
    launcher = runner.start(*words, "--", "0.2", program=("-m", "ebbflow"))

    recorded: dict[str, Any] = {}  # collectives, by the socket's name

    def read_recorders() -> bool:
        assert launcher.poll() is None, runner.log.read_text()[-3000:]
        for path in tmp_path.rglob(f"rank-*{RECORDER}"):
            records = parse_records(fetch_records(path)[0])
            if records:
                recorded[path.name] = records
        return len(recorded) == 2

    wait_until("both flight recorders have collectives", read_recorders, _TIMEOUT_SECONDS)
    done = runner.finish(launcher, timeout=_TIMEOUT_SECONDS)
    assert done.exit_code == 0, done.output[-3000:]
    assert {call.caller for call in driver.calls()} == {"rank"}, driver.calls()
    for rank in range(2):
        found = json.loads((script.parent / f"rank-{rank}.json").read_text())
        assert found["cuda"] and not found["gpu"]
        assert recorder_variables(_TORCH).items() <= found["variables"].items()
        # torch reads the variable once in a process: the standby must not have done it
        assert found["allocator"] == "expandable_segments:True"


def test_both_recorders_answer_beside_an_nccl_group(python: Path, tmp_path: Path) -> None:
    driver = Driver(tmp_path / "driver")
    library = tmp_path / "one_device.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library],
        input=_ONE_DEVICE,
        text=True,
        check=True,
    )
    variables = driver.environment | recorder_variables(_TORCH) | {"LD_PRELOAD": str(library)}
    done = run_program(python, _RECORDER, tmp_path / "rank-0.heartbeat", environment=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["backend"] == "nccl" and found["missing"] == []
    assert found["note"].endswith("and has the names that Ebbflow uses")
    assert [status for status, _ in found["answers"].values()] == [200, 200]
    assert not any(answer.get("entries") for _, answer in found["answers"].values())
    raw, is_silent = found["empty"]
    assert parse_records(raw.encode()) == [] and not is_silent
    assert [call[2] for call in parse_records(found["full"].encode())] == ["all_reduce [[3]]"]
    assert parse_records(found["saved"].encode()) == parse_records(found["full"].encode())


def test_preflight_compares_the_driver_with_the_wheel(python: Path, tmp_path: Path) -> None:
    cases = {
        "old": (12080, _NO_DEVICE, "570.86.15", "needs driver 580 or newer: 570 < 580", "upgrade"),
        "none": (13000, _NO_DEVICE, "580.95.05", "No CUDA GPUs are available", "container"),
        "fabric": (13000, 802, "580.95.05", "system not yet initialized", "nvidia-fabricmanager"),
        "other": (13000, 803, "580.95.05", "unsupported display driver", "cuda-compat"),
        "stub": (13000, 34, "580.95.05", "CUDA driver is a stub library", "folder stubs"),
        "module": (13000, 999, "580.95.05", "CUDA unknown error", "nvidia-modprobe"),
    }
    drivers = {
        name: Driver(tmp_path / name, version, init).tool(shown)
        for name, (version, init, shown, _, _) in cases.items()
    }
    folders = [driver.folder for driver in drivers.values()]
    done = run_program(python, _ASK, *folders, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    for name, line in zip(cases, done.stdout.splitlines(), strict=True):
        status, detail, fix, gpus = json.loads(line)
        cause, advice = cases[name][3:]
        assert status == "failed" and gpus == 0, name
        assert cause in detail and advice in fix and "\n" not in detail, detail
        assert {call.caller for call in drivers[name].calls()} == {"check"}

    old = drivers["old"]
    old.log.unlink()
    variables = old.environment | {"PATH": f"{old.folder}:{os.environ['PATH']}"}
    variables |= {"EBBFLOW_RUNS": str(tmp_path / "runs")}
    began = time.monotonic()
    for command, code in (("plan", 0), ("preflight", 3)):
        answer = subprocess.run(
            [python, "-m", "ebbflow", command, "--set", f"store={tmp_path / 'runs'}"],
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
        assert answer.returncode == code, answer.stdout + answer.stderr
        if command == "plan":
            assert old.calls() == []
    assert "570 < 580" in answer.stdout and {call.caller for call in old.calls()} == {"check"}
    print(f"plan and preflight took {time.monotonic() - began:.0f} s")
