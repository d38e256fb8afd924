"""A flow with one training, whose model the next step loads."""

from metaflow import FlowSpec, Parameter, current, ebbflow, retry, step
from torch import nn


class SingleFlow(FlowSpec):
    lr = Parameter("lr", default=0.02)

    @step
    def start(self):
        self.next(self.train)

    @ebbflow
    @retry(times=2, minutes_between_retries=0)
    @step
    def train(self):
        self.model = current.ebbflow.run("train.py", lr=self.lr)
        self.next(self.end)

    @step
    def end(self):
        module = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 2))
        self.model.load(module)
        self.total = float(sum(parameter.double().sum() for parameter in module.parameters()))


if __name__ == "__main__":
    SingleFlow()
