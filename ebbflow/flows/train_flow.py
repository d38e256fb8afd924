"""The flow of a job: check, plan, prepare, train, report. Run it with

    python flows/train_flow.py run [--config configs/laptop.yaml] [--set model.num_layers=8]
    [--rehearse node-loss@60%]

Each step is a few lines; the work is in `training/`, `cost/` and `infra/`. `train` runs on every
node of the gang. `train_node` runs on a single node in AWS Batch, because Batch runs no multi-node
job on Spot. After a failure, Metaflow retries the step from the last commit, and `@capacity`
(`flows/decorators.py`) chooses where each attempt runs. Neither step decides how the run ends:
`report` always runs, and `end` fails the run if the job is not complete.
"""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportArgumentType=false
# The last block uses what the first `__main__` block has bound.
# pyright: reportPossiblyUnboundVariable=false

import sys
from pathlib import Path

# In a checkout the package `ebbflow` is beside this file's folder; in an installation and in a code
# package of Metaflow Python finds it anyway.
_ROOT = Path(__file__).resolve().parents[2]
if (_ROOT / "ebbflow").is_dir():
    sys.path.insert(1, str(_ROOT))

from ebbflow.core.program import begin_program

if __name__ == "__main__":
    begin_program()
    from ebbflow.core.process import exit_when_interrupted

    exit_when_interrupted()  # until the launcher handles signals itself, after a second of imports

    from ebbflow.flows import launcher

    # Before Metaflow is imported, because the import reads the environment and is slow.
    launch = launcher.prepare(sys.argv)
    sys.argv = launch.line.argv  # Metaflow reads its command line from here

from metaflow import (
    FlowSpec,
    JSONType,
    Parameter,
    card,
    catch,
    current,
    parallel,
    project,
    retry,
    step,
)

from ebbflow.flows import cards, gang, steps
from ebbflow.flows.decorators import capacity, cloud, local, package_sources  # noqa: F401 - makes `--with cloud` and `--with local` known

cards.register_card()


@project(name="ebbflow")
@package_sources()
class TrainFlow(FlowSpec):
    """Cost-aware training that survives interruptions."""

    # The launcher turns --config and --set into one checked configuration; Metaflow gets its JSON
    # (flows/options.py).
    settings = Parameter(
        "config",
        type=JSONType,
        metavar="FILE",
        help=(
            "YAML file of the job; in Runner.run also a dictionary  [default: configs/laptop.yaml]"
        ),
    )
    overrides = Parameter(
        "set",
        type=JSONType,
        default="[]",
        metavar="KEY=VALUE",
        show_default=False,
        help="override one key of the file; repeatable; in Runner.run a list or a dictionary",
    )
    job_name = Parameter(
        "job",
        default="",
        metavar="NAME",
        show_default=False,
        help="name of the job; a job of that name is continued  [default: a new name]",
    )
    rehearse = Parameter(
        "rehearse",
        default="",
        metavar="FAULT",
        show_default=False,
        help="inject a fault: node-loss@60%[:node=N], sleep@step:120[:rank=N], notice@60%, …",
    )
    certify = Parameter(
        "certify",
        type=bool,
        default=False,
        help="prove first, on a small run of this job, that it resumes exactly",
    )

    @step
    def start(self):
        """Name the job (a job can have several runs), and record its configuration."""
        self.job = self.job_name or current.run_id
        # Source of each value: default, file:line, environment or --set
        self.config_sources = self.settings["sources"]
        steps.begin_job(self)
        self.next(self.preflight)

    @step
    def preflight(self):
        """Check everything that can be checked before money is spent, and report all problems
        together.
        """
        self.checks = steps.run_preflight(self)
        self.next(self.plan)

    @step
    def plan(self):
        """Choose the cheapest capacity that meets the deadline, or refuse the job and name the
        exceeded limit.
        """
        self.examined = steps.examine_workload(self)
        self.capacity = steps.plan_capacity(self)
        self.next(self.prepare)

    @step
    def prepare(self):
        """Prepare the data once for all ranks, such as token shards from text, and choose the
        branch for training.
        """
        self.prepared = steps.prepare_data(self)
        self.certificate = steps.certify(self)
        self.num_nodes = gang.gang_shape(self).nodes
        self.rounds = 0
        self.next_branch = gang.initial_branch(self)
        self.next({"node": self.train_node, "gang": self.fan_out}, condition="next_branch")

    @capacity
    @retry(times=4, minutes_between_retries=0)
    @step
    def train_node(self):
        """Train on a single node in AWS Batch, or in one Slurm job.

        If the machine is reclaimed, repeat the step on a new machine.
        """
        self.gang_outcome, self.next_branch = gang.train_node(self, current)
        self.next(
            {"again": self.train_node, "gang": self.fan_out, "done": self.report},
            condition="next_branch",
        )

    @step
    def fan_out(self):
        """Start the step `train` on all nodes of the gang."""
        self.next(self.train, num_parallel=self.num_nodes)

    @capacity
    @catch(var="train_failure", print_exception=False)
    @retry(times=4, minutes_between_retries=0)
    @parallel
    @step
    def train(self):
        """Run this node's ranks from the last commit to the end."""
        self.gang_outcome = gang.train(self, current)
        self.next(self.join)

    @step
    def join(self, inputs):
        """Merge the nodes' artifacts."""
        shared = [
            "job",
            "config_sources",
            "capacity",
            "checks",
            "prepared",
            "certificate",
            "num_nodes",
        ]
        self.merge_artifacts(inputs, include=shared)
        self.next(self.report)

    @card(type="ebbflow", id="report")
    @step
    def report(self):
        """Build one report on the job's training and cost from the events of all attempts, and show
        it as a card.
        """
        self.run_report, frames = steps.write_report(self)
        self.loss_frame, self.ledger_frame, self.throughput_frame = frames
        cards.show_report(current.card["report"], self.run_report)
        self.next(self.end)

    @step
    def end(self):
        """Succeed only if the job is complete."""
        steps.require_completion(self)


if __name__ == "__main__":
    launcher.run(TrainFlow, launch)
