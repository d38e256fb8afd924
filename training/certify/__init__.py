"""`ebbflow certify CONFIG`: proof that this job resumes exactly, from running it small with and without
interruptions on this machine. Importing this package imports no torch."""

from __future__ import annotations

from typing import Any

from ebbflow.infra.config.schema import RunConfig


def certify_in_child(config: RunConfig, **fewer: Any) -> dict[str, Any]:
    """The certificate as JSON, from processes of its own. Raises TrainingError when none could be made.

    fewer: `steps` of each run, `interruptions` by name, where not all of it is wanted.
    """
    from ebbflow.training.certify.commands import certify_in_child as run

    return run(config, **fewer)


def main(arguments: list[str]) -> int:
    """The command. 0 with a certificate that holds, 1 with one that does not, else the code of what went wrong."""
    from ebbflow.training.certify.commands import main as run

    return run(arguments)
