"""A flow that compares learning rates, each with two seeds, in a nested foreach."""

from metaflow import FlowSpec, current, ebbflow, retry, step


class TrialsFlow(FlowSpec):
    @step
    def start(self):
        self.rates = [0.02, 0.002]
        self.next(self.choose, foreach="rates")

    @step
    def choose(self):
        self.rate = self.input
        self.lengths = [8, 12]
        self.next(self.train, foreach="lengths")

    @ebbflow
    @retry(times=2, minutes_between_retries=0)
    @step
    def train(self):
        self.model = current.ebbflow.run("train.py", lr=self.rate, max_steps=self.input)
        self.next(self.join)

    @step
    def join(self, inputs):
        self.models = {trial.input: trial.model for trial in inputs}
        self.rate = inputs[0].rate
        self.next(self.best)

    @step
    def best(self, inputs):
        self.models = {trial.rate: trial.models for trial in inputs}
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    TrialsFlow()
