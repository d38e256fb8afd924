"""A user's own script, attached: killed, told to leave, resumed, and equal bit for bit to an
undisturbed run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ebbflow.core.event_payloads import StepPayload
from ebbflow.core.events import read_log, select_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.cost.report.figure_text import format_key_figures
from ebbflow.cost.report.report import build_report
from tests.support.attached_scripts import (
    ROOT,
    SCRIPTS,
    attached,
    commits,
    events_of,
    final_state,
    finish,
    interrupt,
    output,
    start,
)
from tests.support.long_tests import mark_long
from tests.support.planted_resume_bugs import OTHERS, plant
from tests.support.swift import Swift
from tests.support.warm import WarmProcess

PAUSE = "0.02"  # per step, so that a signal comes in mid-job
# script: (ranks, steps, lines that a user may change)
CORPUS = {
    "ddp": (2, 30, 3),
    "fsdp2": (2, 24, 3),
    "fsdp1": (2, 30, 3),
    "nano_gpt": (1, 24, 4),
    "resnet": (1, 24, 3),
    "accelerated": (1, 36, 3),
}

# Those whose loops another test resumes too: the guides' DDP and torchtitan, and `accelerated`
_VARIANTS = ("ddp", "fsdp1", "nano_gpt", "resnet")

# script: (libraries, steps, lines that a user may change)
LIBRARIES = {
    "hugging_face": (("accelerate", "peft", "transformers.trainer"), 24, 4),
    "lightning_mlp": (("lightning.pytorch",), 30, 4),
}

# page: (ranks, steps, libraries)
PAGES = {
    "ddp": (2, 20, ()),
    "transformers": (1, 20, ("accelerate", "peft", "transformers.trainer")),
    "peft": (1, 20, ("accelerate", "peft", "transformers.trainer")),
    "lightning": (1, 20, ("lightning.pytorch",)),
    "accelerate": (1, 24, ("accelerate",)),
    "torchtitan": (2, 20, ()),
}

MODELS = "import torch, ebbflow\na, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)\n"
SGD = "torch.optim.SGD({}.parameters(), lr=0.1)"


@pytest.mark.parametrize("name", CORPUS | LIBRARIES)
def test_the_patch_of_a_script_is_as_small_as_promised(name: str) -> None:
    lines = [
        line
        for line in (SCRIPTS / f"{name}.patch").read_text().splitlines()
        if line[:3] not in ("---", "+++")
    ]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    assert 0 < max(added, removed) <= (CORPUS | LIBRARIES)[name][2]


@pytest.mark.parametrize("name", mark_long(CORPUS, _VARIANTS))
def test_a_script_that_is_killed_and_preempted_ends_bit_equal(tmp_path: Path, name: str) -> None:
    ranks, steps, _ = CORPUS[name]
    if name == "accelerated":
        libraries = ("accelerate",)
    else:
        libraries = ()
    if libraries and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (requirements-dev.txt)")
    whole = attached(tmp_path / "whole", name)
    stopped = attached(tmp_path / "stopped", name)
    undisturbed = start(whole, ranks=ranks, libraries=libraries)
    processes = start(stopped, PAUSE, ranks=ranks, libraries=libraries)
    interrupt(processes, stopped, 5, signal.SIGKILL)
    finish(processes, stopped, -signal.SIGKILL)
    processes = start(stopped, PAUSE, ranks=ranks, libraries=libraries)
    # The other ranks leave with rank 0
    interrupt(processes, stopped, 10, signal.SIGTERM, ranks=[0])
    finish(processes, stopped, 75)
    finish(start(stopped, ranks=ranks, libraries=libraries), stopped)
    finish(undisturbed, whole)
    assert final_state(stopped, steps) == final_state(whole, steps)
    events = events_of(stopped)
    assert [event.data["outcome"] for event in events if event.name == "outcome"] == [
        "interrupted",
        "completed",
    ]
    assert {event.step for event in events if event.name == "step"} == set(range(1, steps + 1))
    assert output(stopped).count("goes on from step") == 2
    steps_of = [
        (event.generation, event.step)
        for event in events
        if event.name == "step" and event.rank == 0
    ]
    last = max(step for generation, step in steps_of if generation == 2 and step)
    assert (3, last + 1) in steps_of and (3, last) not in steps_of, (
        "a script that was told to leave saves its last step"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hugging_face", []),
        pytest.param("hugging_face", ["--lora"], marks=pytest.mark.long),
        ("lightning_mlp", []),
    ],
)
def test_a_script_of_a_library_resumes_on_an_empty_disk(
    tmp_path: Path, name: str, words: list[str]
) -> None:
    libraries, steps, _ = LIBRARIES[name]
    for package in (library.partition(".")[0] for library in libraries):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (requirements-dev.txt)")
    whole = attached(tmp_path / "whole", name)
    stopped = attached(tmp_path / "stopped", name)
    undisturbed = start(whole, "0", *words, libraries=libraries)
    for step, number, code in ((5, signal.SIGKILL, -signal.SIGKILL), (10, signal.SIGTERM, 75)):
        processes = start(stopped, "0.05", *words, libraries=libraries)
        interrupt(processes, stopped, step, number)
        finish(processes, stopped, code)
        for folder in ("output", "ebbflow-checkpoints"):
            shutil.rmtree(stopped.parent / folder, ignore_errors=True)
    finish(start(stopped, "0", *words, libraries=libraries), stopped)
    finish(undisturbed, whole)
    ours, expected = (torch.load(script.parent / "final.pt") for script in (stopped, whole))
    assert ours.keys() == expected.keys() and all(
        torch.equal(ours[key], expected[key]) for key in ours
    )
    events = events_of(stopped)
    assert [event.data["outcome"] for event in events if event.name == "outcome"] == [
        "interrupted",
        "completed",
    ]
    assert {event.step for event in events if event.name == "step"} == set(range(1, steps + 1))
    assert commits(stopped)[-1] == steps and output(stopped).count("goes on from step") == 2


def test_ebbflow_run_starts_a_script_again_after_a_rank_was_killed(tmp_path: Path) -> None:
    whole = attached(tmp_path / "whole", "ddp")
    killed = attached(tmp_path / "killed", "ddp")
    undisturbed = start(whole, ranks=2)
    fault = (
        "import os; rank and loss < 0.45 and not os.path.exists('hit') and (open('hit', 'w'), "
        "os.kill(os.getpid(), 9))"
    )
    fault = f"rank or open('steps', 'a').write('x'); {fault}"
    killed.write_text(
        killed.read_text().replace("            time.sleep(PAUSE)\n", f"            {fault}\n")
    )
    (killed.parent / "training.py").write_text(
        "raise RuntimeError('a module of the user was imported')\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "5",
    }
    tell = killed.parent / "tell.sh"
    tell.write_text('#!/bin/sh\necho "$1" >> told\n')
    tell.chmod(0o755)
    environment["EBBFLOW__TRACKERS"] = f"[{{type: jsonl, folder: {killed.parent}/sent}}]"
    environment["EBBFLOW__NOTIFICATIONS__COMMAND"] = f"[{tell}]"
    command = [sys.executable, "-m", "ebbflow", "run", "--ranks", "2"]
    command += ["--profile", "3:4", "--memory-snapshot", "31", "ddp.py"]
    done = subprocess.run(
        command, cwd=killed.parent, env=environment, capture_output=True, text=True, timeout=150
    )
    finish(undisturbed, whole)
    assert done.returncode == 0 and "completed at step 30" in done.stdout, done.stdout + done.stderr
    assert (killed.parent / "hit").exists()
    assert final_state(killed, 30) == final_state(whole, 30)
    ended = [
        event.data["reason"] for event in events_of(killed) if event.name == "generation_ended"
    ]
    assert ended == ["rank_killed", "completed"]
    redone = len((killed.parent / "steps").read_text()) - 30
    assert build_report(events_of(killed)).redone_steps == redone > 0, (
        "also the steps that the killed rank lost"
    )
    found = [event for event in events_of(killed) if event.name == "profile"]
    assert {(event.rank, event.data["first"], event.data["last"]) for event in found} == {
        (0, 3, 4),
        (1, 3, 4),
    }
    assert len(found) == len({(event.generation, event.rank) for event in found})
    missed = [
        event.data["message"]
        for event in events_of(killed)
        if event.name == "notice" and "memory_snapshot_step" in event.data["message"]
    ]
    assert missed == [
        "training.memory_snapshot_step 31: no snapshot, because training reached step 30 only; fix: "
        "an earlier step"
    ], "once, from the job, when it is completed"
    assert ("allreduce", 2) in {(row["name"], row["ranks"]) for row in found[0].data["collectives"]}
    sent = [
        json.loads(line)["step"]
        for line in (killed.parent / "sent" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sent == list(range(1, 31)), "a tracker has each step once, in order"
    told = (killed.parent / "told").read_text().splitlines()
    assert [line.split()[2].rstrip(":") for line in told] == [
        "starts",
        "interruption",
        "Completed",
    ], told
    assert (
        killed.parent / "runs" / "ddp" / "report.html"
    ).exists() and "report: ebbflow report ddp" in done.stdout
    command = [sys.executable, "-m", "ebbflow", "watch", "ddp", "--once"]
    shown = subprocess.run(
        command, cwd=killed.parent, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (
        shown.stdout.startswith("ddp: script ddp.py\n")
        and "completed  (30 of 30 steps" in shown.stdout
    ), shown.stdout


def test_a_non_finite_loss_of_a_script_is_rewound_and_the_report_has_its_promise(
    tmp_path: Path,
) -> None:
    script = attached(tmp_path, "ddp")
    script.write_text(
        script.read_text().replace(
            "            total += loss", "            job.log(loss=loss); total += loss"
        )
    )
    command = [
        sys.executable,
        "-m",
        "ebbflow",
        "run",
        "ddp.py",
        "--ranks",
        "2",
        "--rehearse",
        "non-finite@step:12",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "5",
    }
    command += ["--set", "guards.non_finite=skip"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0 and "loss is not finite on rank 1; back to" in done.stdout, (
        done.stdout + done.stderr
    )
    events = events_of(script)
    assert [event.data["reason"] for event in events if event.name == "generation_ended"] == [
        "rewind",
        "completed",
    ]
    last = max(event.step for event in events if event.name == "step" and event.step)
    assert last < 30, "the samples of the bad steps are left out"
    said = format_key_figures(build_report(events))["resume"]
    assert said.startswith(
        "bit for bit, not proven; same data by sampler; every commit verified; "
    ), said


def test_a_script_with_its_commits_in_a_bucket_resumes_on_an_empty_disk(
    tmp_path: Path, swift: Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = attached(tmp_path / "whole", "nano_gpt")
    killed = attached(tmp_path / "killed", "nano_gpt")
    finish(start(whole), whole)
    sha256 = [event.data["weights_sha256"] for event in events_of(whole) if event.name == "outcome"]
    for name, value in {
        **swift.environment(),
        "EBBFLOW__STORE": f"s3://{swift.new_bucket()}/p",
    }.items():
        monkeypatch.setenv(name, value)
    processes = start(killed, "0.1")
    interrupt(processes, killed, 5, signal.SIGKILL)
    finish(processes, killed, -signal.SIGKILL)
    finish(start(killed), killed)
    assert [
        event.data["weights_sha256"] for event in events_of(killed) if event.name == "outcome"
    ] == sha256
    assert "goes on from step" in output(killed) and not (killed.parent / "runs").exists()


def test_the_doctor_names_what_the_resume_of_a_script_loses(tmp_path: Path) -> None:
    code = {"sound": 0, "DDP random states": 1}
    for name in code:
        script = tmp_path / name / "train.py"
        script.parent.mkdir()
        text = (SCRIPTS / ("resumable.py" if name == "sound" else "resumable_ddp.py")).read_text()
        script.write_text(text if name == "sound" else plant(text, name))
        command = [
            sys.executable,
            "-m",
            "ebbflow",
            "doctor",
            "train.py",
            "--kills",
            "1",
            "--steps",
            "14",
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=200
        )
        if name == "sound":
            says = "resumes exactly, bit for bit"
        else:
            says = OTHERS[name][-1]
        assert done.returncode == code[name] and says in done.stdout, done.stdout + done.stderr


def test_importing_attach_imports_none_of_the_clouds_libraries() -> None:
    code = (
        "import ebbflow, sys; ebbflow.attach; print({'metaflow', 'boto3', 'pandas'} & "
        "set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "set()\n", done.stderr


def test_the_example_of_the_guide_runs(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "attach.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(guide.partition("```python\n")[2].partition("```")[0])
    finish(start(script), script)
    assert commits(script)[-1] == 64 and "epoch 3: loss" in output(script)


def test_the_scripts_of_the_guides_run_and_those_of_two_ranks_resume_bit_equal(
    tmp_path: Path,
) -> None:
    leave = (  # after step 13, once there is a commit
        "import glob, os, time\nfrom ebbflow.training.attach.loop import AttachedLoop as "
        "Job\nafter = Job._after_step\ndef leave(job):\n    after(job)\n    while job.step == "
        "13:\n        time.sleep(0.02)\n        glob.glob('runs/jobs/train/commits/*') and "
        "os.kill(os.getpid(), 9)\nJob._after_step = leave\n"
    )

    def begin(name: str, folder: str, first: str = "") -> tuple[Path, list[WarmProcess]]:
        ranks, _, libraries = PAGES[name]
        script = tmp_path / f"{name}-{folder}" / "train.py"
        script.parent.mkdir(exist_ok=True)
        code = (
            (ROOT / "docs" / f"script-{name}.md")
            .read_text()
            .partition("```python\n")[2]
            .partition("```")[0]
        )
        script.write_text(first + code)
        return script, start(script, ranks=ranks, libraries=libraries)

    known = [name for name, (*_, libraries) in PAGES.items() if all(map(_is_installed, libraries))]
    left = {name: begin(name, "left", leave) for name in known if PAGES[name][0] == 2}
    whole = {}
    for name in known:
        whole[name] = begin(name, "whole")
        finish(whole[name][1], whole[name][0])
    for name, (script, processes) in left.items():
        finish(processes, script, -signal.SIGKILL)
        left[name] = begin(name, "left")
        finish(left[name][1], script)
    for name, (script, _) in [*whole.items(), *left.items()]:
        assert commits(script)[-1] == PAGES[name][1], name
    for name, (script, _) in left.items():
        ended = []
        for run in (script, whole[name][0]):
            ended.append([event.data for event in events_of(run) if event.name == "outcome"])
        assert ended[0][0]["weights_sha256"] == ended[1][0]["weights_sha256"], name
        assert "goes on from step" in output(script), name
    assert "tokens seen: 1280" in output(left["torchtitan"][0])


def test_a_rank_that_leaves_its_loop_alone_is_named_within_seconds(tmp_path: Path) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(
        "import torch, torch.distributed as dist, ebbflow\nfrom ebbflow.training.attach import "
        "guards\nguards._UNEQUAL_SECONDS = 1.0  # the test need not wait for a "
        "rank that is about to end by a break\ndist.init_process_group('gloo')\nmodel = "
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\noptimizer = "
        "torch.optim.SGD(model.parameters(), lr=0.1)\nfor step in ebbflow.attach(model, "
        "optimizer).steps(5 + 5 * dist.get_rank()):\n    optimizer.zero_grad(); "
        "model(torch.ones(1, 2)).sum().backward(); optimizer.step()\n"
    )
    begun = time.monotonic()
    finish(start(script, ranks=2), script, 2)
    assert (
        "rank 0 left its loop after step 5, and rank 1 is in step 6; fix: equally many steps"
        in output(script)
    )
    # And not the 120 s after which the last commit is given up
    assert time.monotonic() - begun < 60


def test_a_save_that_is_due_while_gradients_accumulate_is_made_after_the_next_step(
    tmp_path: Path,
) -> None:
    script = tmp_path / "accumulating.py"
    script.write_text(
        "import torch, ebbflow\nmodels = {'body': torch.nn.Linear(2, 4), 'head': "
        "torch.nn.Linear(4, 1)}\noptimizer = torch.optim.SGD([one for model in models.values() "
        "for one in model.parameters()], lr=0.1)\nbatches = "
        "iter(torch.utils.data.DataLoader(torch.ones(12, 2)))\nfor step in "
        "ebbflow.attach(models, optimizer).steps(12):\n    "
        "models['head'](models['body'](next(batches))).sum().backward()\n    if step % 4 == 3: "
        "optimizer.step(); optimizer.zero_grad()\n"
    )
    finish(start(script, EBBFLOW__CHECKPOINT__INTERVAL_STEPS="3"), script)
    assert commits(script) == [4, 8, 12]
    assert "accumulating.py:6 draws batches whose position is not saved" in output(script)
    assert "not exact" in format_key_figures(build_report(events_of(script)))["resume"]


@pytest.mark.parametrize(
    ("code", "message", "environment"),
    [
        (
            f"ebbflow.attach(a, {SGD.format('b')})",
            "not a parameter of the model; fix: make the optimizer from",
            {},
        ),
        (
            "ebbflow.attach(a, average=3)",
            "average has type int, which cannot be restored in place; fix: ",
            {},
        ),
        (
            "ebbflow.attach(a)",
            "2 ranks and no process group; fix: call torch.distributed",
            {"WORLD_SIZE": "2"},
        ),
        ("ebbflow.attach(a); ebbflow.attach(b)", "already runs job bad; fix: call attach once", {}),
        (
            "a.__class__ = type('FullyShardedDataParallel', (torch.nn.Linear,), {}); "
            "ebbflow.attach(a)",
            "FSDP1 needs its outermost model and its optimizer; fix: attach(model, optimizer)",
            {},
        ),
        (
            "a.__class__ = type('DeepSpeedEngine', (torch.nn.Linear,), {}); ebbflow.attach(a)",
            "the engine has no torch optimizer; fix: deepspeed.initialize(optimizer=",
            {},
        ),
        (
            "list(ebbflow.attach(a).epochs(2, [1]))",
            "cannot follow a loop over a list; fix: loop over job.batches",
            {},
        ),
        ("list(ebbflow.attach(a).batches([1]))", "without epochs; fix: give it epochs", {}),
    ],
)
def test_bad_input_is_one_line_with_the_fix(
    tmp_path: Path, code: str, message: str, environment: dict[str, str]
) -> None:
    script = tmp_path / "bad.py"
    script.write_text(MODELS + code)
    finish(start(script, **environment), script, 2)
    lines = [
        line for line in output(script).splitlines() if not line.startswith("ebbflow: job bad, ")
    ]
    assert len(lines) == 1 and lines[0].startswith("ebbflow: ") and message in lines[0], lines


def test_the_number_of_steps_follows_from_the_epochs_and_their_batches(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"{MODELS}optimizer = {SGD.format('a')}\n"
        "rows = torch.arange(10.0).repeat(2, 1).T\n"
        "loader = torch.utils.data.DataLoader(rows, batch_size=2)\n"
        "read = []\njob = ebbflow.attach(a, optimizer)\nfor epoch in job.epochs(4):\n"
        # A variable, such as one of a progress bar, holds the batches until the next epoch
        "    batches = enumerate(job.batches(loader))\n"
        "    for number, batch in batches:\n"
        "        a(batch).sum().backward(); optimizer.step()\n"
        "        read.append(int(batch[0, 0]))\n"
        "        if number == 2: break\n"
        "print('read', read)\n"
    )
    finish(start(script), script)
    assert f"read {[0, 2, 4] * 4}" in output(script)
    told = [event.payload.max_steps for event in select_events(events_of(script), StepPayload)]
    # All five batches of an epoch, then as many as the script took of the one before
    assert [steps for steps in told if steps is not None] == [20, 12]
    assert len(told) == 12


def test_ranks_exit_with_0_while_the_watch_of_their_loops_reads_the_store(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist, ebbflow\n"
        "from ebbflow.training.attach import guards\n"
        "guards._WATCH_SECONDS = 0.0\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in ebbflow.attach(model, optimizer).steps(3):\n"
        "    optimizer.zero_grad()\n    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    for _ in range(3):
        finish(start(script, ranks=2), script)


def test_a_script_without_attach_is_completed_and_its_time_is_booked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(0.5)\nprint('trained')\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ebbflow", "run", "--ranks", "2", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ebbflow: job train, script train.py on 2 ranks, store ")
    assert done.stdout.splitlines()[1] == (
        "ebbflow: train.py does not call ebbflow.attach: watched and billed, nothing is saved"
    )
    assert "job train: completed" in done.stdout and "at step" not in done.stdout
    log = read_log(Store.open(str(tmp_path / "runs")).sub(job_prefix("train")))
    assert not log.damage
    report = build_report(log.events)
    assert report.outcome == "completed"
    seconds = {str(line.ledger_class): line.rank_seconds for line in report.ledger}
    assert seconds["script"] >= 1.0
    assert seconds.get("unattributed", 0.0) < 0.01 * sum(seconds.values())


def test_the_crash_of_a_script_is_shown_once_and_begins_in_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\n\ndef end():\n    sys.exit(3)\nend()\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ebbflow", "run", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    shown = done.stdout + done.stderr
    assert done.returncode != 0 and shown.count("| Traceback") == 1, shown
    frames = shown.partition("| Traceback (most recent call last):\n")[2]
    assert frames.startswith(f'|   File "{tmp_path / "train.py"}", line 5'), shown
    assert "as in generation" in shown, shown


def _is_installed(library: str) -> bool:
    return importlib.util.find_spec(library.partition(".")[0]) is not None
