"""The packages a job needs and the versions that the tests run with: the same ranges as in setup.cfg."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

TESTED_PYTHON = (3, 11)


@dataclass(frozen=True)
class Requirement:
    """A distribution, the module it provides, and the tested range: at least, below. strict: no other version runs."""

    name: str
    module: str
    least: tuple[int, ...]
    below: tuple[int, ...]
    strict: bool = False

    def __str__(self) -> str:
        return f"{self.name}>={_dotted(self.least)},<{_dotted(self.below)}"

    def installed(self) -> str | None:
        """The version that is installed, or None. Imports nothing."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    def is_tested(self, version: str) -> bool:
        """Whether a version is in the range; local builds such as 2.13.0+cpu count as their number."""
        digits = (part for part in version.partition("+")[0].split("."))
        numbers = tuple(int(part) if part.isdecimal() else 0 for part in digits)
        return self.least <= numbers < self.below


REQUIREMENTS = (
    Requirement("torch", "torch", (2, 13), (2, 14), strict=True),
    Requirement("numpy", "numpy", (2, 4), (3,)),
    Requirement("metaflow", "metaflow", (2, 19, 39), (2, 19, 40)),
    Requirement("boto3", "boto3", (1, 44), (2,)),
    Requirement("prometheus-client", "prometheus_client", (0, 26), (1,)),
    Requirement("pandas", "pandas", (3, 1), (4,)),
    Requirement("pyyaml", "yaml", (6,), (7,)),
    Requirement("ruamel.yaml", "ruamel", (0, 19), (0, 20)),
    Requirement("pydantic", "pydantic", (2, 14), (3,)),
    Requirement("obstore", "obstore", (0, 12), (0, 13)),
    Requirement("awscrt", "awscrt", (0, 38), (1,)),
    Requirement("safetensors", "safetensors", (0, 8), (1,)),
)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
