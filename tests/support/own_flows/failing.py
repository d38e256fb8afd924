"""A flow whose training exceeds its budget, and whose script fails; the flow goes on."""

from metaflow import FlowSpec, catch, current, ebbflow, step


class FailingFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.expensive, self.broken)

    @catch(var="failure", print_exception=False)
    @ebbflow(budget=0.05, usd_per_node_hour=3600)
    @step
    def expensive(self):
        self.model = current.ebbflow.run("train.py", max_steps=400)
        self.next(self.join)

    @catch(var="failure", print_exception=False)
    @ebbflow
    @step
    def broken(self):
        self.model = current.ebbflow.run("plain.py")
        self.next(self.join)

    @step
    def join(self, inputs):
        self.failures = [str(branch.failure) for branch in (inputs.expensive, inputs.broken)]
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    FailingFlow()
