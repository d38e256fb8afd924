"""A flow of a few lines that knows nothing of this project: what the local Batch is tried with.

--fail: statuses that `shout` exits with, one per attempt, with commas. --sleep: seconds that its
first attempt lasts. Without @parallel: Metaflow 2.19.39 cannot run it on Batch with local metadata
(Netflix/metaflow#2564).
"""

import os
import sys
import time

from metaflow import FlowSpec, Parameter, current, retry, step


class TinyFlow(FlowSpec):
    sleep = Parameter("sleep", default=0.0)
    fail = Parameter("fail", default="")

    @step
    def start(self):
        self.word = "ebb"
        self.next(self.shout)

    @retry(times=2, minutes_between_retries=0)
    @step
    def shout(self):
        if self.fail:
            codes = self.fail.split(",")
        else:
            codes = []
        time.sleep(self.sleep if current.retry_count == 0 else 0)
        if current.retry_count < len(codes):
            sys.exit(int(codes[current.retry_count]))
        self.where = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        self.attempt = current.retry_count
        self.next(self.end)

    @step
    def end(self):
        print("attempt", self.attempt, "in", self.where["AWS_BATCH_JQ_NAME"])


if __name__ == "__main__":
    TinyFlow()
