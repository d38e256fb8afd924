"""A flow with a Config, variables of the environment, and two trainings in one step."""

import os

from metaflow import Config, FlowSpec, config_expr, current, ebbflow, environment, step


class ConfiguredFlow(FlowSpec):
    settings = Config("settings", default="settings.json")

    @step
    def start(self):
        self.next(self.train)

    @environment(vars={"STEP_SECONDS": os.environ.get("STEP_SECONDS", "0")})
    @ebbflow(budget=config_expr("settings.budget"), deadline="8h", name="tuned")
    @step
    def train(self):
        settings = self.settings
        self.model = current.ebbflow.run("train.py", lr=settings.lr, max_steps=settings.steps)
        self.plain = current.ebbflow.run("plain.py", "written.txt", depth=3)
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    ConfiguredFlow()
