"""A flow for production schedulers, in which one step supervises a job until it is complete.

    python flows/scheduled_flow.py --datastore=s3 --config settings job.yaml argo-workflows create
    python flows/scheduled_flow.py --datastore=s3 --config settings job.yaml step-functions create

These schedulers take a fixed graph. `TrainFlow` has none, so this flow starts it as a process of
the step (`ebbflow supervise`), which trains in the step's own container or, with the parameter
`options`, where these send it. The configuration becomes part of the deployed workflow.
"""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportArgumentType=false

import sys
from pathlib import Path

# In a checkout the package `ebbflow` is beside this file's folder; in an installation and in a code
# package of Metaflow Python finds it anyway.
_ROOT = Path(__file__).resolve().parents[2]
if (_ROOT / "ebbflow").is_dir():
    sys.path.insert(1, str(_ROOT))

from ebbflow.core.program import DEFAULT_CONFIG, begin_program

if __name__ == "__main__":
    begin_program()

from metaflow import Config, FlowMutator, FlowSpec, Parameter, current, project, retry, step

from ebbflow.flows.decorators import package_sources
from ebbflow.flows.supervising import scheduled


class starts(FlowMutator):  # noqa: N801 - the name of a decorator
    """Flow mutator that adds `@schedule` and `@trigger` from the configuration `when`.

    Step Functions refuses every flow with `@trigger`, so the two are not fixed here.
    """

    def pre_mutate(self, mutable_flow):
        configs = dict(mutable_flow.configs)
        scheduled.check_deployment(sys.argv, configs["settings"])
        for name, attributes in scheduled.read_starts(configs["when"]).items():
            mutable_flow.add_decorator(name, deco_kwargs=attributes)


@starts
@project(name="ebbflow")
@package_sources()
class ScheduledFlow(FlowSpec):
    """Cost-aware training, started by a production scheduler."""

    settings = Config(
        "settings",
        default=str(DEFAULT_CONFIG),
        parser=scheduled.parse_settings,
        help="YAML file of the job",
    )
    when = Config(
        "when",
        default_value={"schedule": {"daily": True}},
        help='{"schedule": arguments of @schedule, "trigger": arguments of @trigger}',
    )
    job = Parameter(
        "job",
        default="",
        help="name of the job; a job of that name is continued  [default: a new name in each run]",
    )
    options = Parameter(
        "options", default="", help="options of `ebbflow supervise`, such as --with cloud"
    )

    @step
    def start(self):
        """Name the job. Each attempt of the next step continues it."""
        self.job_name = self.job or f"scheduled-{current.run_id}"
        self.next(self.supervise)

    @retry(times=4, minutes_between_retries=1)
    @step
    def supervise(self):
        """Run the job until it is complete, or until its budget, its deadline or a failure ends it."""
        self.outcome = scheduled.supervise_job(self.settings, self.job_name, self.options)
        self.next(self.end)

    @step
    def end(self):
        """Succeed, because the previous step fails for a job that did not complete."""
        print(f"job {self.job_name}: {self.outcome}")


if __name__ == "__main__":
    ScheduledFlow()
