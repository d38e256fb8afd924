"""Each check is seen to fail and to pass, by the condition itself wherever that can be brought
about.
"""

from __future__ import annotations

import configparser
import glob
import json
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbflow.core.config import RunConfig
from ebbflow.core.footprint import causal_lm_shape, commit_bytes, size_text, staging_bytes
from ebbflow.core.preflight import TROUBLES, failed_results
from ebbflow.core.requirements import REQUIREMENTS
from ebbflow.training.checkpoint.retention import WholeCommit, choose_commits
from ebbflow.training.checks import commits_room
from ebbflow.training.session import retention_policy
from tests.support.checks import ALL_CHECKS, CHECKS, ROOT, failed, passed, skipped

HUGE = {"hidden_size": 65536, "num_layers": 100, "num_heads": 64}


def fake_distribution(folder: Path, name: str, version: str) -> None:
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


def test_every_check_names_itself_and_a_symptom() -> None:
    assert len(CHECKS) == len(ALL_CHECKS)
    for check in CHECKS.values():
        assert check.title
        assert check.symptoms
        assert check.deadline_seconds > 0


def test_configuration() -> None:
    assert (
        "770 = 12 × 64 + 2"
        in failed("configuration", model={"hidden_size": 770, "num_heads": 12}).detail
    )
    passed("configuration")


def test_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed("interpreter")
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert "the flow puts" in passed("interpreter").detail
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3.11"))
    assert "there is no `python`" in failed("interpreter").detail
    passed("interpreter", cluster={"nodes": 1})
    (tmp_path / "elsewhere").mkdir()
    other = shutil.copy(
        shutil.which("true", path="/usr/bin:/bin") or "", tmp_path / "elsewhere" / "python"
    )
    assert f"`python` is {other}, another interpreter" in failed("interpreter").detail


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed("packages")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT)])
        assert "torch>=2.7,<3 is not installed" in failed("packages").detail
    fake_distribution(tmp_path, "torch", "2.6.0+cpu")
    monkeypatch.syspath_prepend(tmp_path)
    assert failed("packages").detail == "torch 2.6.0+cpu is installed, torch>=2.7,<3 is needed"


def test_a_supported_torch_that_is_not_the_tested_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_distribution(tmp_path, "torch", "2.7.0+cpu")
    monkeypatch.syspath_prepend(tmp_path)
    passed("packages")
    assert "torch 2.7.0+cpu (supported, 2.13 is tested)" in failed("versions").detail


def test_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_distribution(tmp_path, "numpy", "1.25.4")
    monkeypatch.syspath_prepend(tmp_path)
    assert "numpy 1.25.4 (supported: numpy>=1.26,<3)" in failed("versions").detail


def test_the_required_versions_are_those_of_setup_cfg() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    declared = {
        "": setup["options"]["install_requires"].split(),
        "flow": setup["options.extras_require"]["flow"].split(),
    }
    for extra, requirements in declared.items():
        assert requirements == [str(found) for found in REQUIREMENTS if found.extra == extra]


@pytest.mark.slow
def test_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed("imports")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libtorch.so: cannot open shared object file')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "libtorch.so: cannot open shared object file" in failed("imports").detail


@pytest.mark.slow
def test_ports_without_a_network() -> None:
    passed("ports")
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode != 0
    ):
        pytest.skip("skipped, because this system gives tests no network namespace")
    command = [unshare, "-rn", sys.executable, "-m", "infra", "preflight", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    results = {result["id"]: result for result in json.loads(done.stdout)["results"]}
    assert done.returncode == 3
    assert "no connection over 127.0.0.1" in results["ports"]["detail"]


def test_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    passed("host-name")
    monkeypatch.setattr(socket, "gethostname", lambda: "ebbflow-test.invalid")
    failed("host-name")  # a name server that does not answer is cut off by the deadline
    # Reserved for documentation: nobody's address
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.1")
    assert "no address of this host" in failed("host-name").detail
    skipped("host-name", cluster={"nodes": 1})


def test_store_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert passed("store-folder", store=str(tmp_path / "new" / "store"))
    detail = failed("store-folder", store=str(tmp_path / "file" / "store")).detail
    assert detail == f"{tmp_path / 'file'} is in the way: it is not a folder"
    skipped("store-folder", store="s3://bucket/prefix")
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        failed("store-folder", store=str(tmp_path / "closed" / "store"))
    assert sorted(path.name for path in tmp_path.iterdir()) in (["file"], ["closed", "file"])


def test_records_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert passed("records-folder")
    monkeypatch.setenv("EBBFLOW_RUNS", str(tmp_path / "file" / "runs"))
    result = failed("records-folder")
    assert "file/runs cannot be written to" in result.detail and "EBBFLOW_RUNS" in result.fix


def test_store_probe_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "store" / "jobs" / "mine").mkdir(parents=True)
    for folder in ("store", "new/and/deep"):
        passed("store-probe", store=str(tmp_path / folder))
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "store",
        "store/jobs",
        "store/jobs/mine",
    ]
    (tmp_path / "file").write_text("")
    failed("store-probe", store=str(tmp_path / "file"))


def test_store_probe_of_a_bucket_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # closed again before it is asked
    for name, value in {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    result = failed("store-probe", store="s3://bucket/prefix")
    assert "put s3://bucket/prefix/jobs/.preflight-" in result.detail
    assert "AWS_" in result.fix


def test_shared_memory_warns_of_little_room_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("skipped, because this system has no /dev/shm")
    monkeypatch.setattr(glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    free = {"bytes": (1 << 30) - 1}
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_bavail=free["bytes"], f_frsize=1)
    )
    result = failed("shared-memory")
    assert "1.0 GiB advised with 2 GPUs: NCCL's segments" in result.detail
    assert not failed_results([result])
    free["bytes"] += 1
    passed("shared-memory")
    free["bytes"] = 0
    monkeypatch.setattr(glob, "glob", lambda pattern: [])
    assert "none needed" in passed("shared-memory").detail


@pytest.mark.slow
def test_a_small_dev_shm_stops_no_run_since_staging_is_memory() -> None:
    """With a /dev/shm of 1 MiB, in a mount namespace: the default model's staging fits, and nothing
    blocks.
    """
    unshare = shutil.which("unshare")
    small = "mount -t tmpfs -o size=1m none /dev/shm"
    if (
        unshare is None
        or subprocess.run([unshare, "-rm", "sh", "-c", small], capture_output=True).returncode != 0
    ):
        pytest.skip("skipped, because this system gives tests no mount namespace")
    assert staging_bytes(RunConfig()) > 4 << 20
    code = (
        "import mmap, os\nfrom ebbflow.core.config import RunConfig\nfrom "
        "ebbflow.core.footprint import staging_bytes\nbuffer = os.memfd_create('buffer'); size "
        "= staging_bytes(RunConfig()); os.ftruncate(buffer, size)\nmapping = mmap.mmap(buffer, "
        "size); mapping[:] = bytes(size)\nimport sys, ebbflow.infra.__main__ as command; "
        "sys.exit(command.main(['preflight', '--quick', '--json']))"
    )
    command = f"{small} && exec {shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["id"]: result for result in json.loads(done.stdout)["results"]}
    # The latter on a machine with GPUs
    assert results["shared-memory"]["status"] in {"passed", "warning"}
    assert results["memory"]["status"] == "passed"


def test_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        assert failed("open-files").detail.startswith("200 open files allowed, about 288 needed")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    passed("open-files")
    skipped("open-files", cluster={"processes_per_node": "auto"})


def test_memory() -> None:
    passed(
        "memory",
        model={"hidden_size": 16, "num_layers": 1},
        cluster={"nodes": 1},
        training={"batch_size": 1},
    )
    detail = failed("memory", model=HUGE).detail
    assert "needed by 2 × 1 = 2 ranks (estimated; " in detail
    staged = staging_bytes(RunConfig.model_validate({"model": HUGE}))
    assert f"{size_text(staged)} of it to stage commits" in detail
    assert "fsdp2" in failed("memory", model=HUGE, parallel={"mode": "ddp"}).fix
    skipped("memory", cluster={"nodes": "auto"})


def test_dataset(tmp_path: Path) -> None:
    passed("dataset")
    assert (
        "is no folder, no file"
        in failed("dataset", data={"path": str(tmp_path / "nowhere")}).detail
    )
    for number in range(3):
        (tmp_path / f"{number}.md").write_text("ebb and flow " * 10)
    missing = failed("dataset", data={"path": str(tmp_path)})
    assert ".py; it holds 3 × .md" in missing.detail
    text = {"path": str(tmp_path), "suffixes": [".md"]}
    small = failed("dataset", data=text)
    assert "one batch takes 32 (16 for each of 2 ranks)" in small.detail
    passed("dataset", data=text, training={"batch_size": 2}, model={"sequence_length": 16})
    small = {"training": {"batch_size": 2}, "model": {"sequence_length": 16}}
    passed("dataset", data={"path": str(tmp_path / "0.md"), "held_out_fraction": 0.3}, **small)
    assert "held-out" in failed("dataset", data={"path": str(tmp_path / "0.md")}, **small).detail
    (tmp_path / "image.md").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    assert (
        "image.md has a NUL byte at offset 8 (it is a PNG image)"
        in failed("dataset", data=text, **small).detail
    )


def test_disk(tmp_path: Path) -> None:
    passed("disk", store=str(tmp_path / "new"))
    assert (
        "(3 kept + 1 not yet deleted + 1 under way) ×"
        in failed("disk", store=str(tmp_path), model=HUGE).detail
    )
    skipped("disk", store="s3://bucket")


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ({"interval_steps": 7}, "3 kept"),
        (
            {"interval_steps": 7, "keep_every_steps": 50},
            "7 kept (3 last + 4 every 50 steps, of 29 made)",
        ),
        (
            {"interval_steps": 7, "keep_every_steps": 25, "keep_best": 2},
            "13 kept (3 last + 8 every 25 steps + 2 best",
        ),
        (
            {"interval_steps": 50, "keep_every_steps": 10},
            "4 kept (3 last + 20 every 10 steps, of 4 made)",
        ),
        (
            {"interval_steps": 7, "keep_every_steps": 25, "max_total_gib": 0.08},
            "8 kept by max_total_gib 0.08",
        ),
        ({"interval_steps": 7, "max_total_gib": 0.001}, "1 kept by max_total_gib 0.001"),
    ],
)
def test_the_disk_has_room_for_whatever_retention_keeps(checkpoint: dict, words: str) -> None:
    """Against retention itself, after every commit of a job whose every commit is better than all
    before it.
    """
    config = RunConfig.model_validate({"training": {"max_steps": 200}, "checkpoint": checkpoint})
    room, arithmetic = commits_room(config)
    assert words in arithmetic
    one = commit_bytes(config, causal_lm_shape(config.model))
    policy = retention_policy(config.checkpoint)
    there: list[WholeCommit] = []
    every = config.checkpoint.interval_steps
    most = 0
    for step in [*range(every, 200, every), 200]:
        there.insert(0, WholeCommit(sha256=str(step), step=step, size=one, metric=-step))
        most = max(most, len(there) + 1)  # the next save may begin before any of these is deleted
        kept = choose_commits(there, policy)
        there = [commit for commit in there if commit.sha256 in kept]
    assert most * one <= room <= (most + 3) * one, (
        "enough, and not for much more: two rules may keep one commit"
    )


def test_planned_memory() -> None:
    assert "per GPU (estimated)" in passed("planned-memory").detail
    assert "GiB" in failed("planned-memory", model=HUGE).detail
    passed("planned-memory", cluster={"nodes": "auto", "processes_per_node": "auto"})


def test_team_budget(tmp_path: Path) -> None:
    (tmp_path / "team.yaml").write_text(
        "budgets:\n  - {project: unit tests, month: every, usd: 9}\n"
    )
    team = {"project": "unit tests", "team_file": str(tmp_path / "team.yaml")}
    passed("team-budget", cost={**team, "budget_usd": 9.0, "deadline_hours": 2.0})
    assert "may spend $10.00" in failed("team-budget", cost={**team, "budget_usd": 10.0}).detail
    assert "set cost.budget_usd" in failed("team-budget", cost=team).detail
    assert "cannot be read" in failed("team-budget", cost={**team, "team_file": "none.yaml"}).detail
    skipped("team-budget")


def test_budget_and_deadline() -> None:
    passed("budget-deadline", cost={"budget_usd": 5.0, "deadline_hours": 2.0})
    assert "cost.budget_usd" in failed("budget-deadline", cost={"budget_usd": 0.0001}).detail
    assert "deadline" in failed("budget-deadline", cost={"deadline_hours": 0.0001}).detail
    skipped("budget-deadline", model=HUGE)


def test_every_trouble_of_a_check_has_its_text_and_no_other_has() -> None:
    symptoms = set()
    for check in ALL_CHECKS:
        symptoms |= set(check.symptoms)
    assert list(TROUBLES) == sorted(symptoms)
