"""A flow whose training step repeats itself, and whose second training fails at first."""

import os
from pathlib import Path

from metaflow import FlowSpec, current, ebbflow, step


class RepeatedFlow(FlowSpec):
    @step
    def start(self):
        self.models = []
        self.branch = "again"
        self.next(self.train)

    @ebbflow
    @step
    def train(self):
        self.models = [*self.models, current.ebbflow.run("train.py", max_steps=8)]
        if len(self.models) == 2 and not Path("fixed").exists():
            raise RuntimeError("fails after its training")
        self.branch = "again" if len(self.models) < 2 else "done"
        self.next({"again": self.train, "done": self.end}, condition="branch")

    @step
    def end(self):
        print(os.getpid())


if __name__ == "__main__":
    RepeatedFlow()
