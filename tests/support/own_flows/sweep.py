"""A flow whose trials share a budget that suffices for one of them at a time."""

from metaflow import FlowSpec, current, ebbflow, step


class SweepFlow(FlowSpec):
    @step
    def start(self):
        self.rates = [0.02, 0.01, 0.005]
        self.next(self.train, foreach="rates")

    @ebbflow(budget_of_all=10.2, usd_per_node_hour=180, config="sweep.yaml")
    @step
    def train(self):
        self.model = current.ebbflow.run("train.py", lr=self.input)
        self.next(self.choose)

    @ebbflow
    @step
    def choose(self, inputs):
        self.ranking = current.ebbflow.rank(inputs)
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    SweepFlow()
