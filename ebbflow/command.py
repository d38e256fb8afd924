"""The console command `ebbflow`: every command of the project under one help."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple, NoReturn

from ebbflow import __version__
from ebbflow.core.process import exit_when_interrupted, run_benchmarks
from ebbflow.core.program import PACKAGE_ROOT, begin_program

_USAGE_EXIT = 2
_FLOW = PACKAGE_ROOT / "flows" / "train_flow.py"
_SUPERVISOR = PACKAGE_ROOT / "flows" / "supervise.py"
_BENCHMARK_GROUPS = ("gpu", "diagnose")
_COMPLETIONS = {
    "bash": "complete -W '{names}' -o default ebbflow",
    "zsh": "#compdef ebbflow\n_ebbflow() {{ _arguments '1:command:({names})' '*:file:_files' }}\n"
    "compdef _ebbflow ebbflow",
    "fish": "complete -c ebbflow -n __fish_use_subcommand -a '{names}'",
}


class Home(Enum):
    """The part of the product that runs a command."""

    FLOW = auto()  # programs of their own, because Metaflow starts them again for each step
    SUPERVISOR = auto()
    INFRA = auto()
    COST = auto()
    TRAINING = auto()
    TRYOUT = auto()
    NEW = auto()
    TRACE = auto()
    TRACK = auto()
    EXPORT = auto()
    COMPLETION = auto()
    BENCHMARKS = auto()


class Command(NamedTuple):
    """A command's home, and its line of help."""

    home: Home
    help: str


COMMANDS: dict[str, Command] = {
    "run": Command(
        Home.FLOW,
        "train a job: preflight, plan, training, report; or run SCRIPT.py",
    ),
    "resume": Command(Home.FLOW, "go on with the newest run under its own plan and settings"),
    "card": Command(Home.FLOW, "show a run's report in the browser: card view report"),
    "supervise": Command(
        Home.SUPERVISOR,
        "run a job again after each interruption until it is complete",
    ),
    "preflight": Command(Home.INFRA, "find what is wrong with a job before it starts"),
    "plan": Command(Home.COST, "rank the capacity pools that could run a configuration"),
    "report": Command(Home.COST, "show what a job trained, what it cost and what was lost"),
    "watch": Command(Home.COST, "show a running job's live page: progress, dollars, plots"),
    "jobs": Command(
        Home.COST,
        "list all jobs: running, waiting, done, spent, forecast, and who may start",
    ),
    "logs": Command(Home.INFRA, "show the output of a job's ranks"),
    "diagnose": Command(
        Home.INFRA,
        "name the failure in anybody's logs, with its cause and fix",
    ),
    "explain": Command(Home.INFRA, "print causes and fixes of a symptom, such as D07"),
    "bundle": Command(
        Home.INFRA,
        "pack what a colleague needs to understand a job, without secrets",
    ),
    "checkpoints": Command(
        Home.TRAINING,
        "list, verify, pin, export and prune the commits of a job",
    ),
    "config": Command(
        Home.INFRA,
        "show every value of a configuration and where it comes from",
    ),
    "schema": Command(Home.INFRA, "print the JSON schema of configurations, for editors"),
    "new": Command(
        Home.NEW,
        "write a workload of your own, its test and its configuration",
    ),
    "examine": Command(
        Home.TRYOUT,
        "try a workload of your own and print its model's shape",
    ),
    "compare": Command(
        Home.TRYOUT,
        "measure one's own model in each parallel mode, on this machine",
    ),
    "certify": Command(Home.TRYOUT, "prove that a configuration resumes exactly"),
    "trace": Command(Home.TRACE, "write a job's timeline for ui.perfetto.dev"),
    "track": Command(
        Home.TRACK,
        "send a job's metrics to W&B, MLflow, TensorBoard or JSON Lines files",
    ),
    "observe": Command(
        Home.INFRA,
        "watch this machine's jobs with Prometheus, alert rules included",
    ),
    "doctor": Command(
        Home.TRYOUT,
        "kill a script, let it resume, and name what its own resume loses",
    ),
    "prices": Command(
        Home.COST,
        "record live spot prices, or show those that a plan would use",
    ),
    "export": Command(
        Home.EXPORT,
        "write a job as a task of SkyPilot: export skypilot CONFIG",
    ),
    "replay": Command(
        Home.COST,
        "price a job again under other capacity or another checkpoint interval",
    ),
    "reconcile": Command(Home.COST, "compare a job's ledger with the cloud's bill"),
    "catalogue": Command(
        Home.COST,
        "renew the tables of instances, prices and interruptions from AWS",
    ),
    "deploy": Command(
        Home.INFRA,
        "make the AWS resources of a stack, or show what would change",
    ),
    "adopt": Command(
        Home.INFRA,
        "write a configuration for queues that an AWS account already has",
    ),
    "kubernetes": Command(Home.INFRA, "check whether a Kubernetes cluster can run a job"),
    "bench": Command(Home.BENCHMARKS, "run a benchmark (source checkout only)"),
    "soak": Command(Home.BENCHMARKS, "run a long proof (source checkout only)"),
    "completion": Command(Home.COMPLETION, "print a completion script for bash, zsh or fish"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, which is 2 if the command is unknown.

    Args:
        arguments: the command's name and its options; None uses those of this process.
    """
    begin_program()
    if arguments is None:
        arguments = sys.argv[1:]
    name, *words = arguments or ["--help"]
    if name in ("--version", "-V"):
        print(f"ebbflow {__version__}")
        return 0
    if name in ("--help", "-h", "help"):
        print(render_help())
        return 0
    if name not in COMMANDS:
        print(f"ebbflow: there is no command {name!r}; {_hint(name)}", file=sys.stderr)
        return _USAGE_EXIT
    if name == "run":
        return _run(words)
    home = COMMANDS[name].home
    if home is Home.FLOW:
        _become_program(_FLOW, [name, *words])
    if home is Home.SUPERVISOR:
        _become_program(_SUPERVISOR, words)
    if home is Home.BENCHMARKS:
        _become_benchmark(name, words)
    if home is Home.COMPLETION:
        return _print_completion(words)
    exit_when_interrupted()
    command = _load(home)
    return command([name, *words]) or 0


def render_help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    usage = (
        "usage: ebbflow COMMAND …    (ebbflow COMMAND --help shows its options; ebbflow --version)"
    )
    return "\n".join(
        [usage, "", "Cost-aware PyTorch training that survives spot interruptions.", "", *lines]
    )


def _hint(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return "ebbflow --help lists the commands"


def _load(home: Home) -> Callable[[list[str]], int | None]:
    """Import the part of the product that runs a command, and no other."""
    match home:
        case Home.INFRA:
            from ebbflow.infra.__main__ import main as command
        case Home.COST:
            from ebbflow.cost.__main__ import main as command
        case Home.TRAINING:
            from ebbflow.training.__main__ import main as command
        case Home.TRYOUT:
            from ebbflow.tryout.__main__ import main as command
        case Home.NEW:
            from ebbflow.workloads.new import main as command
        case Home.TRACE:
            from ebbflow.observe.trace import main as command
        case Home.TRACK:
            from ebbflow.observe.track import main as command
        case Home.EXPORT:
            from ebbflow.flows.skypilot import main as command
        case _:
            raise AssertionError(f"{home} is no module with commands")
    return command


def _run(words: list[str]) -> int:
    """Train a job by the flow, or run a script: under an agent, or by the flow too."""
    try:
        words = _expand_profile(words)
    except ValueError:
        print(
            "ebbflow run: --profile takes FIRST:LAST, the steps to profile, such as 10:15",
            file=sys.stderr,
        )
        return _USAGE_EXIT
    script = _find_script(words)
    if script is None:
        _become_program(_FLOW, ["run", *words])
    from ebbflow.training.attach.script import flow_options

    # Behind an option of the flow, it would be read as the option's value
    words.remove(script)
    words.insert(0, script)
    options = flow_options(words)
    if options is not None:
        _become_program(_FLOW, options)
    exit_when_interrupted()
    return _load(Home.TRAINING)(["run", *words]) or 0


def _expand_profile(words: list[str]) -> list[str]:
    """Replace `--profile FIRST:LAST` by the settings that it stands for. Raises ValueError."""
    if "--profile" not in words[: _count_own(words)]:
        return words
    place = words.index("--profile")
    first, last = map(int, "".join(words[place + 1 : place + 2]).split(":"))
    if not 0 < first <= last:
        raise ValueError
    settings = [
        "--set",
        f"training.profile_from={first}",
        "--set",
        f"training.profile_steps={last - first + 1}",
    ]
    return [*words[:place], *settings, *words[place + 2 :]]


def _find_script(words: list[str]) -> str | None:
    for word in words[: _count_own(words)]:
        if word.endswith(".py") and "=" not in word:
            return word
    return None


def _count_own(words: list[str]) -> int:
    """Return how many words come before `--`, behind which those of a script follow."""
    if "--" in words:
        return words.index("--")
    return len(words)


def _become_program(program: Path, words: Sequence[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, str(program), *words])


def _become_benchmark(name: str, words: list[str]) -> NoReturn:
    if words and words[0] in _BENCHMARK_GROUPS:
        run_benchmarks(words)
    run_benchmarks(["soak" if name == "soak" else "training", *words])


def _print_completion(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0] not in _COMPLETIONS:
        print(
            "usage: ebbflow completion bash|zsh|fish    (add its output to the shell's start file)",
            file=sys.stderr,
        )
        return _USAGE_EXIT
    print(_COMPLETIONS[words[0]].format(names=" ".join(COMMANDS)))
    return 0
