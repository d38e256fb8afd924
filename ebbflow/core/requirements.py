"""Packages that a job needs, with their supported versions (the same ranges as in setup.cfg)."""

import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 13)
TESTED_PYTHON = (3, 11)
TESTED_TORCH = (2, 13)  # newer releases are accepted if they have the names of `torch_names`

DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Requirement:
    """A required package: its distribution, the module it provides, and the supported versions."""

    name: str
    module: str
    least: tuple[int, ...]  # first supported version
    below: tuple[int, ...]  # first version after the range
    tested: tuple[int, ...] = ()  # first numbers of the tested version; empty: any in the range
    strict: bool = False  # whether other versions are refused
    extra: str = ""  # extra of our distribution that has it; "": every installation has it

    def __str__(self) -> str:
        return f"{self.name}>={_dotted(self.least)},<{_dotted(self.below)}"

    def installed(self) -> str | None:
        """Return the installed version, or None if the package is missing.

        The package is not imported.
        """
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    def is_supported(self, version: str) -> bool:
        """Return whether a version is in the range.

        A local suffix is ignored: 2.13.0+cpu counts as 2.13.0.
        """
        return self.least <= _numbers(version) < self.below

    def is_tested(self, version: str) -> bool:
        return self.is_supported(version) and _numbers(version)[: len(self.tested)] == self.tested


FLOW_EXTRA = "flow"
REQUIREMENTS = (
    Requirement("torch", "torch", (2, 7), (3,), tested=TESTED_TORCH, strict=True),
    Requirement("numpy", "numpy", (1, 26), (3,)),
    Requirement("pyyaml", "yaml", (6,), (7,)),
    Requirement("ruamel.yaml", "ruamel", (0, 18, 6), (0, 20)),
    Requirement("pydantic", "pydantic", (2, 9), (3,)),
    Requirement("obstore", "obstore", (0, 11), (0, 13)),
    Requirement("awscrt", "awscrt", (0, 31), (1,)),
    Requirement("safetensors", "safetensors", (0, 4, 5), (1,)),
    Requirement("rich", "rich", (13, 9), (16,)),
    Requirement("metaflow", "metaflow", (2, 19), (3,), tested=(2, 19), extra=FLOW_EXTRA),
    Requirement("boto3", "boto3", (1, 35), (2,), extra=FLOW_EXTRA),
    Requirement("pandas", "pandas", (2, 2), (4,), extra=FLOW_EXTRA),
    Requirement("prometheus-client", "prometheus_client", (0, 20), (1,), extra=FLOW_EXTRA),
)


def installed_versions() -> dict[str, str]:
    """Return the installed versions of Python, the NVIDIA driver and the required packages."""
    driver = re.search(
        r"\b([0-9]{3,}\.[0-9.]+)\b", DRIVER_FILE.read_text() if DRIVER_FILE.exists() else ""
    )
    versions = {"python": platform.python_version(), "NVIDIA driver": driver and driver[1]}
    versions |= {requirement.name: requirement.installed() for requirement in REQUIREMENTS}
    return {name: version for name, version in versions.items() if version}


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
