"""The console command `ebbflow`, which lists and runs all commands of the project."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple, NoReturn, get_args

from ebbflow import __version__
from ebbflow.core.process import exit_when_interrupted, run_benchmarks
from ebbflow.core.program import PACKAGE_ROOT, begin_program

_USAGE_EXIT = 2
_FLOW = PACKAGE_ROOT / "flows" / "train_flow.py"
_SUPERVISOR = PACKAGE_ROOT / "flows" / "supervise.py"
_LAB = "lab"
_TRACKER = "--tracker"
_BENCHMARK_GROUPS = ("gpu", "diagnose")
_COMPLETIONS = {
    "bash": "complete -W '{names}' -o default ebbflow",
    "zsh": "#compdef ebbflow\n_ebbflow() {{ _arguments '1:command:({names})' '*:file:_files' }}\n"
    "compdef _ebbflow ebbflow",
    "fish": "complete -c ebbflow -n __fish_use_subcommand -a '{names}'",
}


class Home(Enum):
    """Part of the project that runs a command."""

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
    STOP = auto()
    COMPLETION = auto()
    BENCHMARKS = auto()


class Group(Enum):
    """Group of commands with a common purpose; its value is the heading in `ebbflow --help`."""

    START = "start a job"
    WATCH = "watch and steer it"
    UNDERSTAND = "understand what happened"
    YOUR_CODE = "bring your own code"
    CLOUD = "use a cloud or cluster"
    PROVE = "prove it"
    LAB = "the laboratory: ebbflow lab COMMAND"


class Command(NamedTuple):
    """A command: the part of the project that runs it, its group, and its line of help."""

    home: Home
    group: Group
    help: str


COMMANDS: dict[str, Command] = {
    "run": Command(
        Home.FLOW,
        Group.START,
        "train a job: run CONFIG.yaml, run SCRIPT.py, or run (the default job)",
    ),
    "resume": Command(
        Home.FLOW, Group.START, "go on with the newest run under its own plan and settings"
    ),
    "supervise": Command(
        Home.SUPERVISOR, Group.START, "run a job again after each interruption until it is complete"
    ),
    "plan": Command(
        Home.COST, Group.START, "rank the capacity pools that could run a configuration"
    ),
    "preflight": Command(Home.INFRA, Group.START, "find what is wrong with a job before it starts"),
    "config": Command(
        Home.INFRA, Group.START, "show every value of a configuration and where it comes from"
    ),
    "schema": Command(
        Home.INFRA, Group.START, "print the JSON schema of configurations, for editors"
    ),
    "completion": Command(
        Home.COMPLETION, Group.START, "print a completion script for bash, zsh or fish"
    ),
    "jobs": Command(
        Home.COST, Group.WATCH, "list all jobs: state, spent, forecast, and who may start"
    ),
    "watch": Command(
        Home.COST, Group.WATCH, "show a running job's live page: progress, dollars, plots"
    ),
    "logs": Command(Home.INFRA, Group.WATCH, "show the output of a job's ranks"),
    "stop": Command(Home.STOP, Group.WATCH, "let a job save, write its report and end"),
    "track": Command(
        Home.TRACK,
        Group.WATCH,
        "send a job's metrics to W&B, MLflow, TensorBoard or JSON Lines files",
    ),
    "observe": Command(
        Home.INFRA, Group.WATCH, "watch this machine's jobs with Prometheus and alert rules"
    ),
    "report": Command(
        Home.COST, Group.UNDERSTAND, "show what a job trained, what it cost and what was lost"
    ),
    "card": Command(
        Home.FLOW, Group.UNDERSTAND, "show a run's report in the browser: card view report"
    ),
    "checkpoints": Command(
        Home.TRAINING, Group.UNDERSTAND, "list, verify, pin, export and prune a job's commits"
    ),
    "diagnose": Command(
        Home.INFRA, Group.UNDERSTAND, "name the failure in anybody's logs, with its cause and fix"
    ),
    "explain": Command(
        Home.INFRA, Group.UNDERSTAND, "print causes and fixes of a symptom, such as D07"
    ),
    "trace": Command(Home.TRACE, Group.UNDERSTAND, "write a job's timeline for ui.perfetto.dev"),
    "bundle": Command(
        Home.INFRA, Group.UNDERSTAND, "pack what a colleague needs to understand a job, no secrets"
    ),
    "reconcile": Command(
        Home.COST, Group.UNDERSTAND, "compare a job's ledger with the cloud's bill"
    ),
    "new": Command(
        Home.NEW, Group.YOUR_CODE, "write a workload of your own, its test and its configuration"
    ),
    "examine": Command(
        Home.TRYOUT, Group.YOUR_CODE, "try a workload of your own and print its model's shape"
    ),
    "doctor": Command(
        Home.TRYOUT, Group.YOUR_CODE, "kill a script, and name what its own resume loses"
    ),
    "prices": Command(
        Home.COST, Group.CLOUD, "record live spot prices, or show those that a plan would use"
    ),
    "deploy": Command(
        Home.INFRA, Group.CLOUD, "make the AWS resources of a stack, or show what would change"
    ),
    "adopt": Command(
        Home.INFRA, Group.CLOUD, "write a configuration for queues that an AWS account has"
    ),
    "kubernetes": Command(
        Home.INFRA, Group.CLOUD, "check whether a Kubernetes cluster can run a job"
    ),
    "export": Command(
        Home.EXPORT, Group.CLOUD, "write a job for SkyPilot or Slurm: export slurm CONFIG"
    ),
    "certify": Command(Home.TRYOUT, Group.PROVE, "prove that a configuration resumes exactly"),
    "compare": Command(
        Home.TRYOUT, Group.PROVE, "measure one's own model in each parallel mode, on this machine"
    ),
    "replay": Command(
        Home.COST, Group.PROVE, "price a job again under other capacity or another interval"
    ),
    "catalogue": Command(
        Home.COST, Group.LAB, "renew the tables of instances, prices and interruptions from AWS"
    ),
    "bench": Command(Home.BENCHMARKS, Group.LAB, "run a benchmark (source checkout only)"),
    "soak": Command(Home.BENCHMARKS, Group.LAB, "run a long proof (source checkout only)"),
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
    if name == _LAB:
        (name, *words) = words or [_LAB]
    page = _page(name)
    if page is not None:
        print(page)
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
    """Render the help: all commands in groups, except those for maintainers.

    These are in the help of `ebbflow lab`.
    """
    usage = (
        "usage: ebbflow COMMAND …    (ebbflow COMMAND --help shows its options; ebbflow --version)"
    )
    lines = [usage, "", "Cost-aware PyTorch training that survives spot interruptions."]
    for group in Group:
        if group is not Group.LAB:
            lines += ["", group.value, *_command_lines(group)]
    lines += ["", "ebbflow lab lists benchmarks, long proofs and tools for maintainers."]
    return "\n".join(lines)


def render_lab_help() -> str:
    usage = "usage: ebbflow lab COMMAND …    (for those who work on Ebbflow itself)"
    return "\n".join([usage, "", *_command_lines(Group.LAB)])


def _page(name: str) -> str | None:
    """Return the text to print for a word such as --help or --version, or None for a command."""
    match name:
        case "--version" | "-V":
            return f"ebbflow {__version__}"
        case "--help" | "-h" | "help":
            return render_help()
        case "lab":
            return render_lab_help()
    return None


def _command_lines(group: Group) -> list[str]:
    width = max(map(len, COMMANDS))
    return [
        f"  {name:{width}}  {command.help}"
        for name, command in COMMANDS.items()
        if command.group is group
    ]


def _hint(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return "ebbflow --help lists the commands"


def _load(home: Home) -> Callable[[list[str]], int | None]:
    """Import only the part of the project that runs a command, and return its main function."""
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
        case Home.STOP:
            from ebbflow.flows.stop import main as command
        case _:
            raise AssertionError(f"{home} is no module with commands")
    return command


def _run(words: list[str]) -> int:
    """Run `ebbflow run`: train a job with the flow, or run a script.

    The script runs under an agent or, with --nodes or --with, in the flow.
    """
    if "--help" in words[: _count_own(words)]:
        from ebbflow.flows.run_help import render_run_help

        print(render_run_help())
        return 0
    try:
        words = _expand_tracker(_expand_memory_snapshot(_expand_profile(words)))
    except ValueError as error:
        print(f"ebbflow run: {error}", file=sys.stderr)
        return _USAGE_EXIT
    script = _find_script(words)
    if script is None:
        _become_program(_FLOW, ["run", *_name_config(words)])
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
    """Replace `--profile FIRST:LAST` by the settings for profiling these steps. Raises
    ValueError.
    """
    if "--profile" not in words[: _count_own(words)]:
        return words
    place = words.index("--profile")
    given = "".join(words[place + 1 : place + 2])
    begin, _, end = given.partition(":")
    if not (begin.isdecimal() and end.isdecimal() and 0 < int(begin) <= int(end)):
        raise ValueError(
            f"--profile takes FIRST:LAST, the steps to profile, such as 10:15, and not {given!r}"
        )
    first = int(begin)
    last = int(end)
    settings = [
        "--set",
        f"training.profile_from={first}",
        "--set",
        f"training.profile_steps={last - first + 1}",
    ]
    return [*words[:place], *settings, *words[place + 2 :]]


def _expand_memory_snapshot(words: list[str]) -> list[str]:
    """Replace `--memory-snapshot STEP` by the setting for the snapshot's step. Raises
    ValueError.
    """
    option = "--memory-snapshot"
    if option not in words[: _count_own(words)]:
        return words
    place = words.index(option)
    step = "".join(words[place + 1 : place + 2])
    if not (step.isdecimal() and int(step)):
        raise ValueError(f"{option} takes a step, from 1 on, and not {step!r}")
    setting = ["--set", f"training.memory_snapshot_step={int(step)}"]
    return [*words[:place], *setting, *words[place + 2 :]]


def _expand_tracker(words: list[str]) -> list[str]:
    """Replace all options `--tracker KIND` by one setting of `trackers`. Raises ValueError."""
    from ebbflow.core.config.schema import TrackerConfig

    known = get_args(TrackerConfig.model_fields["type"].annotation)
    kinds: list[str] = []
    rest: list[str] = []
    own = words[: _count_own(words)]
    while own:
        word = own.pop(0)
        name, has_value, value = word.partition("=")
        if name != _TRACKER:
            rest.append(word)
            continue
        if not has_value:
            value = own.pop(0) if own else ""
        if value not in known:
            raise ValueError(f"--tracker takes one of {', '.join(known)}, and not {value!r}")
        kinds.append(value)
    if kinds:
        rest += ["--set", f"trackers={json.dumps([{'type': kind} for kind in kinds])}"]
    return [*rest, *words[_count_own(words) :]]


def _name_config(words: list[str]) -> list[str]:
    """Insert `--config` before a configuration file: `run job.yaml` is `run --config job.yaml`."""
    from ebbflow.flows.command_line import takes_value

    for place, word in enumerate(words):
        if not word.endswith((".yaml", ".yml")) or word.startswith("-"):
            continue
        if place == 0 or not takes_value(words[place - 1]):
            return [*words[:place], "--config", *words[place:]]
    return words


def _find_script(words: list[str]) -> str | None:
    for word in words[: _count_own(words)]:
        if word.endswith(".py") and "=" not in word:
            return word
    return None


def _count_own(words: list[str]) -> int:
    """Return the number of words before `--`. The words after it are arguments of the script."""
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
