"""A flow whose training step runs on two nodes."""

from metaflow import FlowSpec, current, ebbflow, retry, step


class GangFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @ebbflow(usd_per_node_hour=36)
    @retry(times=2, minutes_between_retries=0)
    @step
    def train(self):
        self.node = current.parallel.node_index
        self.model = current.ebbflow.run("train.py", lr=0.02)
        self.next(self.join)

    @step
    def join(self, inputs):
        self.models = {node.node: node.model for node in inputs}
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    GangFlow()
