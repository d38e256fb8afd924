"""Rules of the section `batch`: names that AWS knows, and queues that Batch can really run the job on."""

from __future__ import annotations

import re
from collections import Counter

from ebbflow.infra.config.rules.names import is_a_region
from ebbflow.infra.config.rules.rule import Answer, Rule
from ebbflow.infra.config.schema import RunConfig

# https://docs.aws.amazon.com/batch/latest/APIReference/API_CreateJobQueue.html
_QUEUE = re.compile(r"(arn:aws[a-z-]*:batch:[a-z0-9-]+:[0-9]{12}:job-queue/)?[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_INSTANCE_TYPE = re.compile(r"[a-z][a-z0-9-]*(\.([a-z0-9-]+)?)?")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]+", re.ASCII)
# https://docs.aws.amazon.com/batch/latest/userguide/using-tags.html
_MOST_TAGS, _LONGEST_TAG_NAME, _LONGEST_TAG_VALUE = 50, 128, 256
_TAG_CHARACTERS = re.compile(r"[\w +\-.:/@]*")  # AWS takes "=" as well, and Metaflow's `--aws-batch-tag` does not
_QUEUE_HINT = "letters, digits, '-' and '_', at most 128; aws batch describe-job-queues lists them"


def _queues_have_names(config: RunConfig) -> Answer:
    names = Counter(queue.name for queue in config.batch.queues)
    for name, times in names.items():
        if not _QUEUE.fullmatch(name):
            return f"batch.queues: {name!r} is no name of a job queue", _QUEUE_HINT
        if times > 1:
            return f"batch.queues names {name} {times} times", "keep one of them"
    return None


def _light_queue_has_a_name(config: RunConfig) -> Answer:
    name = config.batch.light_queue
    if name is None or _QUEUE.fullmatch(name):
        return None
    return f"batch.light_queue: {name!r} is no name of a job queue", _QUEUE_HINT


def _several_nodes_are_on_demand(config: RunConfig) -> Answer:
    for queue in config.batch.queues:
        if queue.market == "spot" and queue.multi_node:
            message = (
                f"batch.queues: {queue.name} is spot and multi_node: AWS Batch runs no job of several nodes on Spot"
            )
            return message, f"set multi_node of {queue.name} to false; several nodes on Spot need Kubernetes"
    return None


def _a_queue_takes_the_nodes(config: RunConfig) -> Answer:
    nodes, queues = config.cluster.nodes, config.batch.queues
    if config.cluster.backend != "batch" or nodes == "auto" or nodes == 1 or not queues:
        return None
    if any(queue.multi_node for queue in queues):
        return None
    message = f"cluster.nodes {nodes}: none of batch.queues ({_named(config)}) is multi_node"
    return message, "set multi_node of an on-demand queue to true, or cluster.nodes to 1 or auto"


def _a_queue_is_of_the_market(config: RunConfig) -> Answer:
    market, queues = config.cluster.market, config.batch.queues
    if config.cluster.backend != "batch" or market == "auto" or not queues:
        return None
    if any(queue.market == market for queue in queues):
        return None
    message = f"cluster.market {market}: none of batch.queues ({_named(config)}) is {market}"
    return message, f"add a queue of market {market}, or set cluster.market to auto"


def _instance_types_are_types(config: RunConfig) -> Answer:
    for queue in config.batch.queues:
        for kind in queue.instance_types:
            if not _INSTANCE_TYPE.fullmatch(kind):
                message = f"batch.queues: {queue.name}: {kind!r} is no instance type nor the beginning of one"
                return message, "such as g5 or g5.12xlarge; leave instance_types out for any"
    return None


def _region_is_a_region(config: RunConfig) -> Answer:
    return is_a_region("batch.region", config.batch.region)


def _image_is_a_word(config: RunConfig) -> Answer:
    image = config.batch.image
    if image is None or (image and not any(char.isspace() for char in image)):
        return None
    return (
        f"batch.image must be the address of an image, not {image!r}",
        "such as 123456789012.dkr.ecr.us-east-1.amazonaws.com/ebbflow:1",
    )


def _job_role_is_an_arn(config: RunConfig) -> Answer:
    role = config.batch.job_role
    if role is None or _ROLE.fullmatch(role):
        return None
    return (
        f"batch.job_role must be the ARN of a role, not {role!r}",
        "such as arn:aws:iam::123456789012:role/ebbflow-job",
    )


def _tags_are_tags(config: RunConfig) -> Answer:
    tags = config.batch.tags
    if len(tags) > _MOST_TAGS:
        return f"batch.tags has {len(tags)} tags, and AWS takes at most {_MOST_TAGS}", "leave some out"
    for name, value in tags.items():
        if len(name) > _LONGEST_TAG_NAME or len(value) > _LONGEST_TAG_VALUE:
            limits = f"{_LONGEST_TAG_NAME} characters of name and {_LONGEST_TAG_VALUE} of value"
            return f"batch.tags: {name[:40]} is too long: AWS takes {limits}", "shorten it"
        if problem := _value_problem(value):
            return f"batch.tags: {name}: {value!r} {problem}", "use letters, digits, spaces and + - . _ : / @"
    return None


def _value_problem(value: str) -> str | None:
    """Names are narrower already, as keys of the configuration."""
    if "=" in value:
        return "has '=' in it: Metaflow hands tags on as NAME=VALUE and splits them at each '='"
    if value.lower().startswith("aws:"):
        return f"begins with {value[:4]}, which AWS keeps to itself"
    odd = next((char for char in value if not _TAG_CHARACTERS.fullmatch(char)), None)
    return None if odd is None else f"has {odd!r} in it, which AWS does not take"


def _named(config: RunConfig) -> str:
    return ", ".join(f"{queue.name}: {queue.market}" for queue in config.batch.queues)


RULES = (
    Rule(("batch.queues",), _queues_have_names),
    Rule(("batch.queues",), _several_nodes_are_on_demand),
    Rule(("batch.queues",), _instance_types_are_types),
    Rule(("cluster.nodes", "batch.queues", "cluster.backend"), _a_queue_takes_the_nodes),
    Rule(("cluster.market", "batch.queues", "cluster.backend"), _a_queue_is_of_the_market),
    Rule(("batch.light_queue",), _light_queue_has_a_name),
    Rule(("batch.region",), _region_is_a_region),
    Rule(("batch.image",), _image_is_a_word),
    Rule(("batch.job_role",), _job_role_is_an_arn),
    Rule(("batch.tags",), _tags_are_tags),
)
