"""Typed configuration of a job: its schema, and a loader that reads a file, environment variables
and --set options.
"""

from ebbflow.infra.config.load import LoadedConfig, load_config, violations
from ebbflow.infra.config.problems import ConfigError, Problem, SourceSpan, render_problems
from ebbflow.infra.config.schema import RunConfig
