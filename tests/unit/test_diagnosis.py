"""Diagnosis of foreign logs: rules, reader, judgement and the commands."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path

import pytest
import yaml

from benchmarks.diagnosis import Thread, evaluate, load_threads, score_threads
from ebbflow.command import COMMANDS
from ebbflow.core.errors import _SYMPTOMS
from ebbflow.core.events import GUARD, NOTICE, STEP
from ebbflow.diagnose import command
from ebbflow.diagnose.job import diagnose_job
from ebbflow.diagnose.judging import diagnose_files
from ebbflow.diagnose.matching import load_matcher
from ebbflow.diagnose.reading import LogText, rank_of, rank_of_path, time_of
from ebbflow.diagnose.rules import SymptomRule, load_rules
from ebbflow.infra.__main__ import main
from tests.support.diagnosing import diagnose_lines
from tests.support.injected import INJECTIONS, inject
from tests.support.timelines import GangLog, event

RULES = load_rules().rules
_OF_THE_GUIDES = {
    "A": 22,
    "B": 10,
    "C": 10,
    "D": 19,
    "E": 9,
    "F": 10,
    "G": 9,
    "H": 15,
    "I": 10,
    "J": 9,
}
MATCHER = load_matcher()

SUPPORT = Path(__file__).parents[1] / "support" / "diagnosis"
DEVELOPMENT = [
    entry
    for path in sorted(SUPPORT.glob("development/*.yaml"))
    for entry in yaml.safe_load(path.read_text())
]

_WRITERS = {
    "srun": lambda line: f" 3: {line}",
    "torchrun": lambda line: f"[default3]:{line}",
    "mpirun": lambda line: f"[1,3]<stderr>:{line}",
    "ray": lambda line: f"(TrainWorker pid=123, ip=10.0.0.1) {line}",
    "metaflow": lambda line: f"2026-01-01 12:00:00.123 [17/train/2 (pid 31)] {line}",
    "aws logs tail": lambda line: f"2026-01-01T12:00:00.123000+00:00 train/default/0a1b2c {line}",
    "docker": lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr"}),
    "loki": lambda line: json.dumps({"labels": {"pod": "a"}, "line": line}),
    "logs insights": lambda line: json.dumps({"@message": line, "@logStream": "a"}),
    "cloud logging": lambda line: json.dumps({"jsonPayload": {"message": line}}),
    "zap": lambda line: json.dumps({"level": "error", "msg": "step failed", "error": line}),
    "csv": lambda line: '1767225600000,"' + line.replace('"', '""') + '"',
}
_FAILURE = [
    'File "/env/torch/utils/data/_utils/collate.py", line 55, in default_collate',
    "Sizes of tensors must match except in dimension 0",
    "Killed",
]
# What schedulers and launchers write after a rank has failed.
_AFTER = """
torch/distributed/elastic/multiprocessing/api.py:897] Sending process 102 closing signal SIGTERM
  File "/opt/conda/lib/python3.10/site-packages/torch/distributed/launcher/api.py", line 269, in launch_agent
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  traceback : Signal 15 (SIGTERM) received by PID 102
srun: error: node1: task 0: Exited with exit code 1
slurmstepd: error: *** STEP 4711.0 ON node1 CANCELLED AT 2026-01-01T10:10:02 ***
srun: error: node2: tasks 8-15: Terminated
  Warning  BackOff    10s   kubelet            Back-off restarting failed container pytorch in pod worker-0
"""

_VLLM = "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput:"
_RUNNABLE = [
    f"[7/train/{task} (pid 9)] [b] Task is starting (status RUNNABLE)" for task in range(8)
]
_UNSCHEDULED = (
    "Warning FailedScheduling pod/worker-1 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
)

GONE = "Connection closed by peer [10.0.0.7]:24601"
NO_INTERFACE = (
    "RuntimeError: [enforce fail at tcp/device.cc:84] ifa != nullptr. Unable to find address "
    "for: eth77"
)
NO_NAME = "socket.gaierror: [Errno -2] Name or service not known"
NO_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
BEHIND = (
    "[PG ID 0 PG GUID 0(default_pg) Rank {0}] Got a signal of a collective timeout. Last "
    "enqueued NCCL work: {1}"
)

# The symptoms that the guides of the two workloads name: point-cloud completion, and reinforcement
# fine-tuning.
_OF_GUIDE = {
    "pcdiff": """A06 A08 A20 A21 B01 B03 B04 B05 B06 B07 B08 C01 D01 D02 D03 D04 D05 D12 E01 E02 E04 E05 E07 H03 H04 H14
        J07 J08""",
    "LightRFT": """A01 A02 A04 A06 A07 A09 A10 A11 A14 A15 A17 A18 A22 C01 C03 C06 C07 C08 D01 E06 F01 F02 F03 F04 F06
        F08 F09 F10 G01 G03 G04 G07 G08 G09 H10 H11 H12 J08""",
}
COVERAGE_PAGE = Path(__file__).parents[2] / "docs" / "symptom-coverage.md"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_diagnosis_rule_matches_only_its_examples_and_has_a_fix(rule: SymptomRule) -> None:
    assert rule.examples and rule.fix and rule.title and rule.causes
    assert set(rule.follows) <= {other.id for other in RULES} - {rule.id}
    for example in rule.examples:
        assert rule.id in {RULES[number].id for number, _, _ in MATCHER.match(example)}, example
        assert any(trigger in example.lower().encode() for trigger in MATCHER.triggers), example
    for other in rule.others:
        assert rule.id not in {RULES[number].id for number, _, _ in MATCHER.match(other)}, other


def test_the_commands_answer_in_text_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "[rank0]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, "
        "OpType=ALLREDUCE) timing out\n"
    )
    assert main(["diagnose", str(log)]) == 0
    assert "root: a GPU is out of memory  [C01, memory" in capsys.readouterr().out
    assert main(["diagnose", "--json", str(log)]) == 0
    document = json.loads(capsys.readouterr().out)
    root, cascade = document["findings"]
    assert document["schema"] == 1 and document["abstained"] is False
    assert (root["symptom"], root["family"], root["role"]) == ("C01", "memory", "root")
    assert (root["evidence"][0]["file"], root["evidence"][0]["line"]) == (str(log), 1) and root[
        "fix"
    ]
    assert (cascade["symptom"], cascade["role"]) == ("D01", "cascade")
    assert main(["diagnose", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {rule.id for rule in RULES} == {symptom["id"] for symptom in listed["symptoms"]}
    assert main(["explain", "d07"]) == 0 and "find_unused_parameters" in capsys.readouterr().out
    assert (
        main(["explain", "Z99"]) == 2
        and main(["diagnose"]) == 2
        and main(["diagnose", str(tmp_path / "no")]) == 2
    )


def roots(text: str) -> tuple[str | None, str | None]:
    """Family and id of the root that is found in a log's text."""
    lines = [
        LogText("log", number, line, rank_of(line), time_of(line))
        for number, line in enumerate(text.splitlines(), 1)
        if line
    ]
    found = next(
        (finding.rule for finding in diagnose_lines(lines).findings if finding.role == "root"), None
    )
    if found:
        return (found.family, found.id)
    return (None, None)


@pytest.mark.parametrize(
    "entry", DEVELOPMENT, ids=lambda entry: entry["url"].removeprefix("https://github.com/")
)
def test_a_quotation_of_the_development_set_has_its_family(entry: dict) -> None:
    assert roots(entry["text"])[0] == entry["family"]


@pytest.mark.parametrize("writer", _WRITERS)
def test_the_format_of_a_log_and_what_follows_the_failure_do_not_change_the_root(
    writer: str, tmp_path: Path
) -> None:
    for lines, symptom in ((_FAILURE[:2], "E11"), (_FAILURE[2:], "B10")):
        (tmp_path / "log").write_text("\n".join(_WRITERS[writer](line) for line in lines) + _AFTER)
        assert diagnose_files([tmp_path / "log"]).findings[0].rule.id == symptom


def test_records_of_a_single_line_of_json_are_read(tmp_path: Path) -> None:
    events = [
        {"timestamp": 1767225600000 + at, "message": line} for at, line in enumerate(_FAILURE[:2])
    ]
    (tmp_path / "log").write_text(json.dumps({"events": events, "nextForwardToken": "f/1"}))
    root = diagnose_files([tmp_path / "log"]).findings[0]
    assert root.rule.id == "E11" and root.evidence[0].time == pytest.approx(1767225600.001)


@pytest.mark.parametrize(("apart", "found"), [(73.0, True), (-8.0, True), (0.4, False)])
def test_clocks_that_differ_are_found_in_the_times_of_equal_steps(
    apart: float, found: bool, tmp_path: Path
) -> None:
    for node, late in ((0, 0.0), (1, apart)):
        stamps = [
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(1.7e9 + 2 * step + late))
            for step in range(60)
        ]
        text = "\n".join(
            f"{stamp} step {step} loss 2.{99 - step}" for step, stamp in enumerate(stamps)
        )
        (tmp_path / f"node-{node}.log").write_text(text)
    findings = diagnose_files(sorted(tmp_path.iterdir())).findings
    assert [finding.rule.id for finding in findings] == (["A32"] if found else [])
    assert not found or f"clock {abs(apart):.1f} s" in findings[0].evidence[1].text


@pytest.mark.parametrize(
    "files",
    [
        {"attempt0.log": ("step", range(1, 21), 0), "attempt1.log": ("step", range(1, 21), 3600)},
        {"attempt0.log": ("step", range(1, 61), 0), "attempt1.log": ("step", range(1, 61), 70)},
        {"first.log": ("step", range(1, 61), 0), "second.log": ("step", range(41, 81), 90)},
        {"first.log": ("step", range(1, 21), 0), "second.log": ("step", range(1, 21), 41)},
        {"train.log": ("step", range(60), 0), "other.log": ("eval step", range(60), 30)},
        {"train.log": ("step", range(60), 0), "evaluator.log": ("step", range(60), 30)},
        {"train.log": ("step", range(60), 0), "other.log": ("step", range(0, 60, 5), 30)},
    ],
)
def test_attempts_and_evaluators_have_no_clocks_that_differ(
    files: dict[str, tuple[str, range, float]], tmp_path: Path
) -> None:
    for name, (label, steps, late) in files.items():
        stamps = {
            step: time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(1.7e9 + 2 * step + late))
            for step in steps
        }
        text = "\n".join(
            f"{stamp} {label} {step} loss 2.{99 - step}" for step, stamp in stamps.items()
        )
        (tmp_path / name).write_text(text)
    assert not diagnose_files(sorted(tmp_path.iterdir())).findings


def test_all_symptoms_of_the_guides_have_a_rule() -> None:
    wanted = set()
    for letter, count in _OF_THE_GUIDES.items():
        for number in range(1, count + 1):
            wanted.add(f"{letter}{number:02}")
    assert len(wanted) == 123 and not wanted - {rule.id for rule in RULES}


@pytest.mark.parametrize(
    "entry",
    yaml.safe_load((SUPPORT / "composed.yaml").read_text()),
    ids=lambda entry: entry["text"][:40],
)
def test_the_root_of_a_composed_log_is_named_and_sound_logs_raise_no_alarm(entry: dict) -> None:
    assert roots(entry["text"]) == (entry["family"], entry.get("symptom"))


def test_bad_input_is_answered_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    oom = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    logs = {
        "utf16.log": oom.encode("utf-16"),
        "ansi.log": f"\x1b[31m{oom}\x1b[0m\r\n".encode(),
        "latin.log": "é".encode("latin-1") * 5000 + b"\n" + oom.encode(),
        "zipped.log.gz": gzip.compress(oom.encode()),
        "escaped.log": f'failed: Traceback:\\n  File "train.py", line 1, in <module>\\n{oom}'.encode(),
        "long.log": b"x" * (12 << 20) + b"\n" + oom.encode(),
    }
    for name, data in logs.items():
        (tmp_path / name).write_bytes(data)
        assert main(["diagnose", "--json", str(tmp_path / name)]) == 0
        assert json.loads(capsys.readouterr().out)["findings"][0]["symptom"] == "C01", name
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 99)
    (tmp_path / "empty.log").write_bytes(b"")
    assert (
        main(["diagnose", str(tmp_path / "binary")]) == 1
        and "binary file" in capsys.readouterr().err
    )
    assert (
        main(["diagnose", str(tmp_path / "empty.log")]) == 0
        and "nothing found" in capsys.readouterr().out
    )


def test_a_large_log_takes_little_processor_time_and_memory(tmp_path: Path) -> None:
    line = (
        "2025-03-01T10:00:00Z [rank{0}] INFO train: step {1} loss 2.{1} grad_norm 1.{1} tokens/s "
        "51{1}\n"
    )
    with open(tmp_path / "large.log", "w") as log:
        for block in range(20):
            log.write(
                "".join(
                    line.format(step % 8, step) for step in range(block * 5000, block * 5000 + 5000)
                )
            )
        log.write("OSError: [Errno 28] No space left on device\n")
    start = time.process_time()
    diagnosis = diagnose_files([tmp_path / "large.log"])
    assert diagnosis.findings[0].rule.id == "H10" and diagnosis.scans[0].lines == 100_001
    assert time.process_time() - start < 5  # 10 MB; 100 MB took 4.9 s of processor time


@pytest.mark.parametrize("part", ["1", "1.", "8 gpus ", "1 tokens/s", "8 x", "step 1 ", "loss "])
def test_the_time_is_linear_in_the_length_of_a_line(part: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        f"loss tokens/s time throughput {part * (64000 // len(part))} it/s x"
    )
    began = time.process_time()
    diagnose_files([tmp_path / "log"])
    assert time.process_time() - began < 3.0


def test_each_advised_command_of_ours_exists() -> None:
    advised = set()
    for rule in RULES:
        for fix in rule.fix:
            advised.update(re.findall(r"\bebbflow ([a-z]+)\b", fix))
    assert advised and advised <= set(COMMANDS)


def test_the_benchmark_counts_right_wrong_silent_and_false_findings() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    corpus = [
        {"family": "memory", "text": oom},
        {"family": "storage", "text": oom},
        {"family": "storage", "text": "epoch 1 done"},
        {"family": "sound", "text": "epoch 2 done"},
        {"family": "sound", "text": oom},
    ]
    result = evaluate(corpus)
    assert result["families"]["memory"] == {
        "items": 1,
        "precision": 0.5,
        "recall": 1.0,
        "f1": pytest.approx(2 / 3),
    }
    assert result["families"]["storage"]["f1"] == 0.0 and result["abstained"] == pytest.approx(
        1 / 3
    )
    assert (result["sound"], result["false_alarms"], result["items"]) == (2, 1, 3)


def test_the_score_of_threads_counts_alternatives_abstentions_and_alarms() -> None:
    def thread(symptom: str | None, also: tuple[str, ...] = ()) -> Thread:
        return Thread("name", "https://host/1", "memory" if symptom else "sound", symptom, "", also)

    threads = [thread("C01"), thread("C04", ("C01",)), thread("C09"), thread("C11"), thread(None)]
    score = score_threads(threads, ["C01", "C01", None, "D01", "H10"])
    assert (score.failing, score.named, score.strict, score.lenient, score.family) == (
        4,
        3,
        1,
        2,
        2,
    )
    assert (score.sound, score.false_alarms) == (1, 1)
    assert score.f1(score.strict) == pytest.approx(2 / 7)


def test_the_labels_of_threads_name_symptoms_and_a_text() -> None:
    threads = load_threads()
    assert len({thread.name for thread in threads}) == len(threads) >= 60
    for thread in threads:
        named = [symptom for symptom in (thread.symptom, *thread.also, thread.second) if symptom]
        assert set(named) <= {rule.id for rule in RULES}, thread.name
        assert thread.url.startswith("https://") and len(thread.sha256) == 64


@pytest.mark.slow
def test_the_collected_excerpts_are_still_recognised() -> None:
    files = sorted(SUPPORT.glob("collected*.yaml"))
    cases = []
    for path in files:
        cases += yaml.safe_load(path.read_text())
    result = evaluate(cases)
    assert (
        len(files) == 10
        and result["macro_f1"] > 0.9
        and result["abstained"] < 0.1
        and result["false_alarms"] == 0
    )


@pytest.mark.parametrize(
    ("lines", "symptom"),
    [
        (["step 1 loss 2.1 grad_norm nan", "step 2 loss 2.0 grad_norm nan"], "F01"),
        (["step 1 loss 2.1 grad_norm nan", "step 2 loss 2.0 grad_norm 1.2"], None),
        ([f"step {step} loss: 0.6931" for step in range(4)], "F02"),
        ([f"step {step} loss: 0.69{step}" for step in range(4)], None),
        (
            [
                f"loss 1.{step} grad_norm {norm}"
                for step, norm in enumerate((7.6, 9.2, 7.8, 11100.0))
            ],
            "F05",
        ),
        ([f"Epoch: [0][{at}/50] Time 9.1 (9.0) Data 8.{at} (8.5)" for at in range(3)], "E06"),
        (
            [
                f"epoch {at}: time per epoch {seconds} s"
                for at, seconds in enumerate((390, 890, 1200))
            ],
            "G02",
        ),
        ([f"load_data_time: {19.6 * (at == 3)}, train_step_time: 0.65" for at in range(6)], "G11"),
        (
            [
                f"Epoch: [1][{at}/50] Time {0.2 if at else 9.1} Data {0.1 if at else 8.9}"
                for at in (9, 19, 29, 0, 9)
            ],
            None,
        ),
        ([f"epoch {at} train loss {1 / (at + 1):.4f}\nval loss 0.69315" for at in range(4)], "F02"),
        (
            [f"epoch {at} train loss {1 / (at + 1):.4f}\nbest val loss 0.69315" for at in range(4)],
            None,
        ),
        (["train loss 0.5", *["val loss 0.69315"] * 8], None),
        (["loss_real is -273623008.0", "loss_real is -4028874358784.0"], "F02"),
        (["UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`."], None),
        (["This DataLoader will create 4 worker processes in total."], None),
        (
            [
                '  File "/env/torch/utils/data/_utils/collate.py", line 55, in default_collate',
                "Sizes of tensors must match except in dimension 0",
            ],
            "E11",
        ),
        (["GPU utilization rate is still very low"], "G01"),
        (
            [
                '  File "/env/datasets/builder.py", line 8, in _split',
                "IndexError: list index out of range",
            ],
            "E17",
        ),
        (
            ['  File "/app/model.py", line 8, in forward', "IndexError: list index out of range"],
            "O06",
        ),
        (['  File "/env/torch/serialization.py", line 8, in save', "ValueError: x"], "H19"),
        (
            [
                '  File "/env/torch/serialization.py", line 8, in load',
                "FileNotFoundError: No such file: 'a.tar'",
            ],
            "H02",
        ),
        (
            [
                "RuntimeError: unable to open shared memory object </torch_3>",
                "OSError: Too many open files",
            ],
            "E08",
        ),
        (
            [
                "ssh: connect to host n1 port 22: Connection timed out",
                "(InsufficientInstanceCapacity)",
            ],
            "I04",
        ),
        (
            [
                '  File "/env/torch/distributed/utils.py", line 8, in _verify',
                "    return dist._verify_params_across_processes(group, tensors)",
                "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, invalid usage, NCCL "
                "version 2.18",
                "Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 4000",
            ],
            "A09",
        ),
        (
            [
                "Caught RuntimeError in DataLoader worker process 0.",
                "stack expects each tensor to be equal size",
            ],
            "E11",
        ),
        (['  File "/env/torch/utils/data/dataloader.py", line 8, in __next__'], "E17"),
        *(
            (
                [
                    '  File "/env/torch/utils/data/dataloader.py", line 8, in _try_get_data',
                    '  File "/env/torch/multiprocessing/reductions.py", line 8, in '
                    "rebuild_storage_fd",
                    '  File "/lib/python3.12/multiprocessing/connection.py", line 8, in _recv',
                    error,
                ],
                "E01",
            )
            for error in ("ConnectionResetError: [Errno 104] Connection reset by peer", "EOFError")
        ),
        (['  File "/env/torch/utils/checkpoint.py", line 8, in forward'], None),
        (
            [
                f'{{"grad_norm": {norm}, "reward": 0.{step}}}'
                for step, norm in enumerate((0.3, 0.0, 0.0, 0.0))
            ],
            "F05",
        ),
        (
            [f"epoch {at} train loss: 0.69{at % 3} train accuracy: 0.5000" for at in range(12)],
            "F02",
        ),
        ([f"epoch {at} train loss: {1 / (at + 1):.4f} val acc: 0.88" for at in range(12)], None),
        ([*["reward_acc: 0.0"] * 12, "Training completed"], None),
        ([*["reward_acc: 0.0"] * 8], None),
        (["train-worker-0   1/2   NotReady   0   5m"], None),
        (["ip-10-0-0-1   NotReady   <none>   5m"], "B11"),
        ([f"{_VLLM} {rate} tokens/s, Running: 1 reqs" for rate in ("1300.0", "1.2") * 5], None),
        ([f"{_VLLM} 0.8 tokens/s, Running: 1 reqs"] * 2, "G12"),
        ([f"{_VLLM} 1.2 tokens/s, Running: 8 reqs, Waiting: 0 reqs"] * 5, "G08"),
        ([f"Step: {at}, Time/step: {[44.2, 4.5][at % 2]}" for at in range(8)], "G02"),
        (
            [
                f"step {at}: loss 0.{9 - at} {[8.1, 2.0, 2.1, 2.0, 2.2, 2.1][at]}s/it"
                for at in range(6)
            ],
            None,
        ),
        (["ValueError: Interpolation of the override is not allowed in this config node"], "A31"),
        (["ValueError: a shirt has no sleeves"], "O01"),
        (["wandb: Network error (ConnectionError), entering retry loop."], None),
        (
            [f"step {at} time {[0.5, 0.6, 0.5, 0.6, 2.9, 3.1, 3.0, 3.2][at]}s" for at in range(8)],
            "G02",
        ),
        ([f"step {at} time {10 * at}s" for at in range(8)], None),  # since the start of the run
        ([f"batch {at} Speed: {[95, 94, 96, 40, 21, 12][at]} samples/s" for at in range(6)], "G02"),
        (["Total img/sec on 8 GPU(s): 1531.9", "Total img/sec on 16 GPU(s): 546.9"], "G05"),
        (["Total img/sec on 8 GPU(s): 1531.9", "Total img/sec on 16 GPU(s): 2946.9"], None),
        ([f"{at} [7/start] Task is starting (status RUNNABLE)" for at in range(4)], "N21"),
        (
            [
                f"{at} [7/start] Task is starting (status {'RUNNABLE' if at < 4 else 'RUNNING'})"
                for at in range(5)
            ],
            None,
        ),
        ([*_RUNNABLE, "[7/train/2 (pid 9)] [b] Task is starting (status RUNNING)"], "N21"),
        ([*_RUNNABLE, *(line.replace("RUNNABLE", "RUNNING") for line in _RUNNABLE)], None),
        ([_UNSCHEDULED, "Successfully assigned ml/worker-0 to n1"], "N02"),
        ([_UNSCHEDULED, "Successfully assigned ml/worker-1 to n1"], None),
        (
            ["FailedScheduling 0/3 nodes are available", "Successfully assigned ml/worker-1 to n1"],
            None,
        ),
        (
            [
                "step 1 loss 3.1",
                "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T10:10:02 ***",
            ],
            None,
        ),
        (
            [
                *(f"step {at} loss 3.{at}" for at in range(12)),
                '  File "/env/torch/_inductor/graph.py", line 8, in run',
            ],
            "L11",
        ),
    ],
)
def test_series_and_frames_name_what_no_single_line_does(
    lines: list[str], symptom: str | None
) -> None:
    assert roots("\n".join(lines))[1] == symptom


def test_an_error_of_ours_ends_with_a_symptom_that_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text("store: [")
    for words in (["config", str(tmp_path / "job.yaml")], ["diagnose", str(tmp_path / "no.log")]):
        assert main(words) == 2
        symptom = capsys.readouterr().err.rstrip().rpartition("see: ")[2]
        assert main(["explain", symptom]) == 0 and symptom in capsys.readouterr().out
    for name in _SYMPTOMS.values():
        assert load_rules().find(name), name


@pytest.mark.parametrize(
    ("logs", "suspects", "note"),
    [
        ({0: "step 3 loss 0.2", 1: GONE}, [0], "from a rank that waits"),
        ({1: GONE}, [], "from a rank that waits"),
        (
            {0: "RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 2000 ms"},
            [2, 3],
            "",
        ),
        ({0: BEHIND.format(0, 62), 1: BEHIND.format(1, 61), 2: BEHIND.format(2, 62)}, [1], ""),
        (
            {0: "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 1000 vs 12", 1: ""},
            [0, 1],
            "no line tells",
        ),
        ({0: NO_INTERFACE, 1: NO_INTERFACE}, [], "every rank wrote these lines"),
        (
            {0: f"2026-01-01 10:00:00 {NO_INTERFACE}", 1: f"2026-01-01 10:01:00 {NO_INTERFACE}"},
            [],
            "every rank wrote",
        ),
        ({0: NO_NAME, 1: NO_NAME}, [], "every rank wrote these lines"),
        ({0: "step 3 loss 0.2", 1: NO_INTERFACE, 2: NO_INTERFACE}, [], ""),
        ({0: f"2026-01-01 10:00:09 {NO_MEMORY}", 1: f"2026-01-01 10:00:01 {NO_MEMORY}"}, [], ""),
        (
            {0: f"2026-01-01 10:00:01 {NO_MEMORY}", 1: f"2026-01-01 10:00:01 {NO_MEMORY}"},
            [],
            "every rank wrote",
        ),
    ],
)
def test_the_rank_that_did_not_come_is_the_suspect(
    logs: dict[int, str], suspects: list[int], note: str, tmp_path: Path
) -> None:
    for rank, text in logs.items():
        (tmp_path / f"rank-{rank}.log").write_text(f"[rank{rank}]: {text}\n")
    diagnosis = diagnose_files(sorted(tmp_path.iterdir()))
    found = diagnosis.to_json()["findings"][0]
    assert found["role"] == "root" and found["suspects"] == suspects and note in found["note"]
    shown = ", ".join(f"rank {rank}" for rank in suspects)
    shown = shown or (
        "no single rank" if note.startswith("every") else "a rank without these lines"
    )
    if note or suspects:
        assert f"  suspect: {shown}{'; ' if note else ''}{found['note']}" in command.render(
            diagnosis
        )


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("node_rank-1/rank-5.log", 5),
        ("rank-3/stderr.log", 3),
        ("rank-3/worker-1.log", 3),
        ("worker-2/a.log", 2),
    ],
)
def test_the_last_rank_in_a_path_counts(path: str, rank: int) -> None:
    assert rank_of_path(Path(path)) == rank


# Each takes a second in a process of its own. soak_headlines.py makes all of them, ten times.
@pytest.mark.parametrize(
    "name",
    [
        "no_rollouts",
        "prefix_of_ddp",
        "wrong_interface",
        "corrupt_labels",
        "device_without_work",
        "one_microbatch",
    ],
)
def test_a_symptom_made_in_plain_torch_is_named(name: str, tmp_path: Path) -> None:
    logs, _, _ = inject(name, tmp_path)
    found = next(finding for finding in diagnose_files(logs).findings if finding.role == "root")
    assert found.rule.id in (INJECTIONS[name].symptom, *INJECTIONS[name].answers)


@pytest.mark.slow
def test_the_documentation_lists_how_each_symptom_is_tested() -> None:
    """It is written with `python -m tests.unit.test_diagnosis`."""
    assert COVERAGE_PAGE.read_text(encoding="utf-8") == coverage_page()


def coverage_page() -> str:
    tests = yaml.safe_load((SUPPORT.parent / "symptoms.yaml").read_text())
    for place in tests.values():
        path, _, name = place.partition("::")
        assert re.search(rf"def {name}\b", (COVERAGE_PAGE.parents[1] / path).read_text()), place
    plain = {made.symptom: name for name, made in INJECTIONS.items()}
    replayed: dict[str, str] = {}
    for path in sorted(SUPPORT.rglob("*.yaml")):
        for entry in yaml.safe_load(path.read_text()):
            family, symptom = roots(entry["text"])
            if symptom and family == entry["family"]:
                replayed.setdefault(symptom, entry.get("url", path.name))
    rows: list[str] = []
    counts: dict[str, int] = dict.fromkeys(("plain torch", "test", "excerpt", "line"), 0)
    places: dict[str, dict[str, str]] = {"plain torch": plain, "test": tests, "excerpt": replayed}
    for rule in RULES:
        if int(rule.id[1:]) <= _OF_THE_GUIDES.get(rule.id[0], 0):
            kind = next((name for name, known in places.items() if rule.id in known), "line")
            counts[kind] += 1
            guides = ", ".join(name for name, ids in _OF_GUIDE.items() if rule.id in ids.split())
            where = places.get(kind, {}).get(rule.id, "its rule")
            rows.append(f"| {rule.id} | {rule.title} | {guides} | {kind} | `{where}` |")
    torch, test, excerpt, line = counts.values()
    head = f"""# How the symptoms are tested

Written by `python -m tests.unit.test_diagnosis`; do not edit. Of the {len(rows)} symptoms of the guides, {torch + test}
are made for real: {torch} by plain torch code or another tool, whose logs are then diagnosed
(`tests/support/injected.py`), and {test} by a test of a job, of a check or with a stand-in. {excerpt} are replayed
from a public excerpt, and {line} from the example line of their rule only.

The third column names the guides of the two [workloads](workloads.md) that have the symptom: point-cloud completion
(pcdiff) and reinforcement fine-tuning (LightRFT).

| id | symptom | guide | made by | where |
|---|---|---|---|---|
"""
    return head + "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("source", "symptoms"), [("signal", []), ("rehearsal", []), ("metadata", ["I01"])]
)
def test_only_the_cloud_announces_an_interruption(source: str, symptoms: list[str]) -> None:
    gang = GangLog(1, 1.0, [[0]])
    gang.steps(1, 3, useful_step=0.1)
    notice = event(NOTICE, 2.0, generation=1, source=source, action="terminate", does="leave")
    gang.ended("agent_stopped", 1.5)
    found = [
        finding.to_json()["symptom"]
        for finding in diagnose_job([*gang.events, notice], []).findings
    ]
    assert found == symptoms


def test_a_straggler_is_named_with_its_price() -> None:
    gang = GangLog(1, 1.0, [[0], [1]])
    gang.steps(1, 22, useful_step=0.12)
    for logged in gang.events:
        if logged.name == STEP and logged.rank == 0:
            logged.data.update(slowest_rank=1, slowest_ratio=3.0, slowest_seconds=0.06)
    told = {
        "action": "slow_rank",
        "share": 0.5,
        "usd_per_hour": 3.6,
        "reason": "rank 1 takes 3.0 times",
    }
    guard = event(GUARD, 4.0, generation=1, step=20, **told)
    guard.data["rank"] = 1
    (finding,) = (result.to_json() for result in diagnose_job([*gang.events, guard], []).findings)
    assert (finding["symptom"], finding["ranks"]) == ("G03", [1])
    assert "in all 1.3 s and $0.0026" in finding["evidence"][0]["text"]


def test_a_remark_of_a_rank_is_no_notice_of_reclamation() -> None:
    remark = event(NOTICE, t=5.0, message="metric perplexity is inf: left out of commits")
    assert diagnose_job([remark], []) == diagnose_job([], [])


if __name__ == "__main__":
    COVERAGE_PAGE.write_text(coverage_page(), encoding="utf-8")
