"""The variables that a container finds: the image's, the role's, the job's, and those that Batch
sets.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path

from tests.support.batch.jobs import Job, Node
from tests.support.batch.settings import Settings

_OF_THE_MACHINE = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")


def container_environment(settings: Settings, job: Job, node: Node) -> dict[str, str]:
    """Nothing of the submitting process is among them."""
    image = {name: os.environ[name] for name in _OF_THE_MACHINE if name in os.environ}
    image["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    )
    image["METAFLOW_SKIP_INSTALL_DEPENDENCIES"] = "1"  # the image has them
    instance = {}
    if node.instance is not None:
        instance["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = node.instance.metadata_address
    own = {
        variable["name"]: variable["value"] for variable in node.properties.get("environment", [])
    }
    return {**image, **settings.role_environment, **instance, **own, **_of_batch(job, node)}


def _of_batch(job: Job, node: Node) -> dict[str, str]:
    found = {
        "AWS_BATCH_JOB_ID": f"{job.id}#{node.index}" if job.multi_node else job.id,
        "AWS_BATCH_JOB_ATTEMPT": str(len(job.attempts) + 1),
        "AWS_BATCH_CE_NAME": f"{job.queue}-environment",
        "AWS_BATCH_JQ_NAME": job.queue,
        "AWS_EXECUTION_ENV": "AWS_ECS_EC2",
    }
    if job.multi_node:
        found |= {
            "AWS_BATCH_JOB_NUM_NODES": str(len(job.nodes)),
            "AWS_BATCH_JOB_NODE_INDEX": str(node.index),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        }
        if node.index:
            found["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = _address()
    return found


@functools.cache
def _address() -> str:
    """What Metaflow finds for itself on the main node: all nodes are this machine."""
    try:
        return socket.gethostbyname_ex(socket.gethostname())[2][0]
    except (OSError, IndexError):
        return "127.0.0.1"
