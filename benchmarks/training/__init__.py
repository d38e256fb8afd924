"""`ebbflow bench`: what the engine and the commits cost beside what one would write with torch
alone.

Figures are measured, on this machine, side by side in one run. Importing this package imports no
torch.
"""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """The command. 0 when everything was measured, else the exit code of what went wrong."""
    if arguments[:1] == ["restore"]:
        from benchmarks.training.restore import main as restore

        return restore(arguments[1:])
    if arguments[:1] == ["mutations"]:
        from benchmarks.training.mutations import main as mutations

        return mutations(arguments[1:])
    if arguments[:1] == ["notice"]:
        from benchmarks.training.notice import main as notice

        return notice(arguments[1:])
    if arguments[:1] == ["attach"]:
        from benchmarks.training.attached import main as attach

        return attach(arguments[1:])
    if arguments[:1] == ["input"]:
        from benchmarks.training.input_pipeline import main as input_pipeline

        return input_pipeline(arguments[1:])
    if arguments[:1] == ["overhead"]:
        from benchmarks.training.overhead import main as overhead

        return overhead(arguments[1:])
    if arguments[:1] == ["survival"]:
        from benchmarks.training.survival import main as survival

        return survival(arguments[1:])
    if arguments[:1] == ["published"]:
        from benchmarks.training.published import main as published

        return published(arguments[1:])
    from benchmarks.training.commands import main as run

    return run(arguments)
