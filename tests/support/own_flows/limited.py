"""A flow whose loop in the step exceeds its budget."""

import time

from metaflow import FlowSpec, current, ebbflow, retry, step


class LimitedFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train)

    @retry(times=3, minutes_between_retries=0)
    @ebbflow(budget=4, usd_per_node_hour=360, config="limits.yaml")
    @step
    def train(self):
        import torch
        from torch import nn

        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = current.ebbflow.attach(model, optimizer)
        for _ in job.steps(2000):
            loss = model(torch.randn(8, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.2)
        self.model = current.ebbflow.result()
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    LimitedFlow()
