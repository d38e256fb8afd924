"""Reading pages of Prometheus metrics in tests."""

from __future__ import annotations

import shutil
import subprocess

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

PROMTOOL = shutil.which("promtool")


def parse(page: bytes) -> dict[str, Metric]:
    """Families by full name.

    Fails on a page that is not the text format, or that has a series twice.
    """
    families = {}
    for family in text_string_to_metric_families(page.decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert name not in families, f"{name} stands twice"
        families[name] = family
        series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(series) == len(set(series)), f"{name} has a series twice"
    return families


def values(page: bytes, name: str, **labels: str) -> list[float]:
    """All values of a metric whose labels include these."""
    family = parse(page).get(name)
    if family is None:
        samples = []
    else:
        samples = family.samples
    return [
        sample.value
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def lint(page: bytes) -> str:
    """What `promtool check metrics` has to say: nothing, for a page that keeps to the conventions."""
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=page, capture_output=True, timeout=30
    )
    return (done.stdout + done.stderr).decode()
