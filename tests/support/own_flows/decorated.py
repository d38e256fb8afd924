"""A flow whose training step names its resources and a time limit."""

from metaflow import FlowSpec, Parameter, current, ebbflow, resources, retry, step, timeout


class DecoratedFlow(FlowSpec):
    lr = Parameter("lr", default=0.02)

    @step
    def start(self):
        self.next(self.train)

    @resources(cpu=1, memory=2048)
    @timeout(hours=1)
    @retry(times=2, minutes_between_retries=0)
    @ebbflow
    @step
    def train(self):
        self.model = current.ebbflow.run("train.py", lr=self.lr)
        self.next(self.end)

    @step
    def end(self):
        self.size = sum(tensor.numel() for tensor in self.model.state_dict().values())


if __name__ == "__main__":
    DecoratedFlow()
