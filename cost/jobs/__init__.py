"""Jobs that ran: find, load and compare their reports. In a notebook: `from ebbflow.cost.jobs import load_report`."""

from ebbflow.cost.jobs.load import known_job_names as known_job_names
from ebbflow.cost.jobs.load import load_report as load_report
from ebbflow.cost.jobs.load import read_job as read_job
