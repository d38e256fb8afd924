"""What `flows/supervise.py` does: start the flow, judge its end by the job's own record, and decide what comes next."""
