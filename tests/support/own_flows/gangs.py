"""A flow with a gang for each learning rate, whose loop is in the step itself."""

from metaflow import FlowSpec, current, ebbflow, step


class GangsFlow(FlowSpec):
    @step
    def start(self):
        self.rates = [0.1, 0.01]
        self.next(self.fan_out, foreach="rates")

    @step
    def fan_out(self):
        self.rate = self.input
        self.next(self.train, num_parallel=2)

    @ebbflow
    @step
    def train(self):
        import torch
        import torch.distributed as dist
        from torch import nn

        dist.init_process_group("gloo")
        torch.manual_seed(1)
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 2))
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate)
        job = current.ebbflow.attach(model, optimizer)
        for _ in job.steps(8):
            loss = model(torch.randn(8, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.model = current.ebbflow.result()
        self.world_size = dist.get_world_size()
        self.next(self.join)

    @step
    def join(self, inputs):
        self.nodes = [(node.rate, node.model, node.world_size) for node in inputs]
        self.next(self.collect)

    @step
    def collect(self, inputs):
        self.nodes = [node for gang in inputs for node in gang.nodes]
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    GangsFlow()
