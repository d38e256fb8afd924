"""Cost-aware PyTorch training on Metaflow that survives spot interruptions.

In a training script:

    job = ebbflow.attach(model, optimizer)
    for batch in job.batches(loader, epochs=4):
        …  # forward, backward, optimizer.step()

Start it with `ebbflow run train.py`, plain `python`, torchrun or Slurm's `srun`. The job saves without stopping the
step, resumes where it was interrupted, and reports what it cost. `use_records()` lets a notebook
read the runs of this machine through Metaflow's Client. On the command line, `ebbflow --help` lists
everything else.
"""

# Everything is imported as `ebbflow.…`, in a checkout, in an installation and in Metaflow's code
# package alike. The links at the top of the repository serve paths, not imports.

import os
import sys
from typing import TYPE_CHECKING

from ebbflow.core.renamed_modules import install_old_names

__version__ = "0.3.0"

if TYPE_CHECKING:
    from ebbflow.flows.launcher import use_records
    from ebbflow.training.attach.entry import AttachedJob, attach

__all__ = ["AttachedJob", "attach", "use_records"]

install_old_names()


def _adopt_slurm() -> None:
    """Set torchrun's variables for a script under `srun`, because `init_process_group` reads
    them.
    """
    from ebbflow.infra.slurm.environment import (
        SlurmEnvironmentError,
        adopt_slurm_environment,
        is_own_program,
    )

    if is_own_program(sys.orig_argv):
        return
    try:
        adopt_slurm_environment(os.environ)
    except SlurmEnvironmentError:
        return  # `attach` reports it in one line


if "SLURM_PROCID" in os.environ:
    _adopt_slurm()


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> object:
    """Import public names on first use, so that `import ebbflow` is fast."""
    if name == "use_records":
        from ebbflow.flows.launcher import use_records

        return use_records
    if name in __all__:
        from ebbflow.training.attach import entry as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
