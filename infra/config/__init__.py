"""The one typed configuration: its schema, and how it is read from a file and the command line."""

from __future__ import annotations

from infra.config.load import LoadedConfig, load_config
from infra.config.problems import ConfigError, Place, Problem, render_problems
from infra.config.rules import violations
from infra.config.schema import RunConfig

__all__ = [
    "ConfigError",
    "LoadedConfig",
    "Place",
    "Problem",
    "RunConfig",
    "load_config",
    "render_problems",
    "violations",
]
