"""The command line of the flow file: options of Metaflow, Metaflow's command, and the command's
arguments.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ebbflow.core.errors import Outcome

# Options that this project adds to Metaflow's `run`.
RUN_OPTIONS = frozenset({"--config", "--set", "--job", "--rehearse", "--certify"})
# Flags of `run` and `resume` that Metaflow does not know.
FLAGS = {
    "--verbose": "show Metaflow's log, every check, the full plan and the full report on the terminal",
    "--yes": "do not ask before cloud money is spent",
    "--compare": "after a rehearsal, run the job once more without the fault, and compare the weights",
    "--take-over": "take the job from another launcher, which saves and leaves",
}
_PERMITS = frozenset({"--from-scratch", "--accept-rollback"})  # `run` and `resume` take them
# Metaflow's commands, used to find the command among the words of the command line.
_COMMANDS = frozenset(
    {
        "run",
        "resume",
        "step",
        "spin",
        "card",
        "show",
        "check",
        "dump",
        "logs",
        "tag",
        "batch",
        "kubernetes",
        "package",
        "init",
        "code",
    }
)


@dataclass(frozen=True)
class CommandLine:
    """A command line, split into the words before and after Metaflow's command."""

    program: str  # the flow file
    options: list[str] = field(default_factory=list)  # words before the command
    command: str = ""  # "" if the words contain no command
    arguments: list[str] = field(default_factory=list)  # words after the command

    @classmethod
    def parse(cls, argv: Sequence[str]) -> CommandLine:
        """Split `argv`, whose first word is the program. The value of `--with` does not count as
        the command.
        """
        for position in range(1, len(argv)):
            if argv[position] in _COMMANDS and argv[position - 1] != "--with":
                return cls(
                    argv[0],
                    list(argv[1:position]),
                    argv[position],
                    list(argv[position + 1 :]),
                )
        return cls(argv[0], list(argv[1:]))

    @property
    def argv(self) -> list[str]:
        command = [self.command] if self.command else []
        return [self.program, *self.options, *command, *self.arguments]

    @property
    def starts_run(self) -> bool:
        """Whether the command is `run` or `resume`, without `--help`."""
        return self.command in ("run", "resume") and "--help" not in self.argv

    @property
    def run_id_file(self) -> str | None:
        """Value of Metaflow's option --run-id-file, or None."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--run-id-file")
        return parser.parse_known_args(self.arguments)[0].run_id_file

    def is_step_of(self, backend: str) -> bool:
        """Return whether the command is `BACKEND step`, which submits an attempt to a backend."""
        return self.command == backend and self.arguments[:1] == ["step"]

    def without_backend(self, name: str) -> CommandLine:
        """Return the command line without `--with NAME`."""
        return replace(
            self,
            options=_without_value(self.options, "--with", name),
            arguments=_without_value(self.arguments, "--with", name),
        )

    def with_arguments(self, arguments: Sequence[str]) -> CommandLine:
        return replace(self, arguments=list(arguments))


def describe_flags() -> str:
    """Return the help of all flags that Ebbflow adds to Metaflow's `run` and `resume`."""
    # Late, since every task imports this module
    from ebbflow.training.checkpoint.rollback import add_permits

    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    for flag, text in FLAGS.items():
        parser.add_argument(flag, action="store_true", help=text)
    add_permits(parser)
    return (
        "\nFlags of Ebbflow for run and "
        f"resume:\n{parser.format_help().partition(':')[2].lstrip(chr(10))}"
    )


def takes_value(word: str) -> bool:
    """Return whether the word is an option of `run` or `resume` whose value is the next word."""
    if not word.startswith("-") or "=" in word:
        return False
    return word not in FLAGS and word not in _PERMITS and not word.startswith("--no-")


def option_values(words: Sequence[str], option: str) -> list[str]:
    """Return all values of an option, given as "--option value" or "--option=value"."""
    found = [words[at + 1] for at, word in enumerate(words[:-1]) if word == option]
    return found + [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]


def reorder_words(words: Sequence[str]) -> list[str]:
    """Return the command line with options of `run` moved after Metaflow's command, where Metaflow
    accepts them.

    If there are such options but no command, print the fix and exit with 2.
    """
    before: list[str] = []
    moved: list[str] = []
    rest = list(words)
    while rest and rest[0] not in _COMMANDS:
        word = rest.pop(0)
        if word in _PERMITS:
            moved.append(word)
            continue
        if word.partition("=")[0] not in RUN_OPTIONS:
            before.append(word)
            if word == "--with" and rest:  # its value may be the name of a command: --with batch
                before.append(rest.pop(0))
            continue
        moved.append(word)
        if "=" not in word and rest:
            moved.append(rest.pop(0))
    if moved and not rest:
        option = moved[0].partition("=")[0]
        print(
            f"{option} is an option of run; fix: {sys.argv[0]} run {shlex.join(words)}",
            file=sys.stderr,
        )
        sys.exit(Outcome.CONFIG.exit_code)
    return [*before, *rest[:1], *moved, *rest[1:]]


def _without_value(words: Sequence[str], option: str, value: str) -> list[str]:
    """Remove `OPTION VALUE` and `OPTION=VALUE` from the words of a command line."""
    kept: list[str] = []
    for word in words:
        if word == value and kept[-1:] == [option]:
            kept.pop()
        elif word != f"{option}={value}":
            kept.append(word)
    return kept
