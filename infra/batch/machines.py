"""What a compute environment's instance types are, told from their names: Batch itself does not say.

Families as AWS has them: https://docs.aws.amazon.com/ec2/latest/instancetypes/instance-type-names.html
"""

from __future__ import annotations

import re

# Batch takes what fits the job, of the families c6i, c7i, m6i and r6i, or their Arm kin: none of them has a GPU.
# https://docs.aws.amazon.com/batch/latest/userguide/instance-type-compute-table.html
BATCHS_CHOICE = ("optimal", "default_x86_64", "default_arm64")
_ARM_CHOICE = "default_arm64"
_ARM = re.compile(r"a1\b|[a-z]+[0-9]+[a-z]*g")  # Graviton's families have a g behind their generation: m6g, c7gn, g5g
_ACCELERATED = re.compile(r"(p|g|gr|vt|inf|trn|dl|f)[0-9]")


def accelerated(instance_type: str) -> bool:
    """Whether a type, or a family, has GPUs or other accelerators, and its price."""
    return _ACCELERATED.match(instance_type) is not None


def arm(instance_type: str) -> bool:
    """Whether a type, or a family, has processors that run no image for x86-64."""
    return instance_type == _ARM_CHOICE or _ARM.match(instance_type.partition(".")[0]) is not None
