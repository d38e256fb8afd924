"""Typed configuration of a job: its schema, and a loader that reads a file, environment variables
and --set options.
"""

from ebbflow.core.config.load import LoadedConfig, load_config, violations
from ebbflow.core.config.problems import ConfigError, Problem, SourceSpan, render_problems
from ebbflow.core.config.schema import RunConfig
