"""A flow with two branches: a loop in the step itself, and a job of a configuration file."""

import time

from metaflow import FlowSpec, Parameter, current, ebbflow, retry, step


class BranchesFlow(FlowSpec):
    step_seconds = Parameter("step-seconds", default=0.0)

    @step
    def start(self):
        self.next(self.loop, self.job)

    @retry(times=2, minutes_between_retries=0)
    @ebbflow(usd_per_node_hour=36)
    @step
    def loop(self):
        import torch
        from torch import nn

        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = current.ebbflow.attach(model, optimizer)
        for _ in job.steps(24):
            loss = model(torch.randn(8, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(self.step_seconds)
        self.model = current.ebbflow.result()
        self.next(self.join)

    @ebbflow
    @step
    def job(self):
        self.model = current.ebbflow.train("job.yaml", set={"training.max_steps": 8})
        self.next(self.join)

    @step
    def join(self, inputs):
        self.models = {"loop": inputs.loop.model, "job": inputs.job.model}
        self.next(self.end)

    @step
    def end(self):
        weights = self.models["loop"].state_dict()
        self.names = sorted(weights)


if __name__ == "__main__":
    BranchesFlow()
