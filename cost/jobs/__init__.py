"""Jobs that ran: found by name, loaded as reports, compared. In a notebook: `from cost.jobs import load_report`."""

from cost.jobs.load import known_job_names as known_job_names
from cost.jobs.load import load_report as load_report
from cost.jobs.load import read_job as read_job
