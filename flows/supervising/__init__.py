"""The supervisor of `flows/supervise.py`: start the flow, judge its end by the job's record, and go on or stop."""
