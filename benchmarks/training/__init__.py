"""`ebbflow bench`: the costs of the engine and of commits beside plain torch.

Figures are measured on this machine, side by side in one run. Importing this package imports no
torch.
"""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """Run one benchmark and return its exit code. Only that benchmark is imported."""
    options = arguments[1:]
    match arguments[:1]:
        case ["attach"]:
            from benchmarks.training.attached import main as bench_attach

            return bench_attach(options)
        case ["input"]:
            from benchmarks.training.input_pipeline import main as bench_input

            return bench_input(options)
        case ["survival"]:
            from benchmarks.training.survival.commands import main as bench_survival

            return bench_survival(options)
        case ["published"]:
            from benchmarks.training.published import main as bench_published

            return bench_published(options)
    from benchmarks.training.commands import main as bench_engine_and_checkpoint

    return bench_engine_and_checkpoint(arguments)
