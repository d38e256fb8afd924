"""Rules about names: the store, paths, regions, zones, addresses, queues and tags."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from pathlib import PurePath
from urllib.parse import urlsplit

from ebbflow.infra.config.rule_base import Breach, Rule, value_of
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.config.yaml_values import closest_match
from ebbflow.infra.signing_key import NAME_PATTERN

# Such as s3://bucket; s3:/bucket too, because no one means a folder called "s3:".
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_REGION = re.compile(r"([a-z]{2,4})((?:-[a-z]+)+)-([0-9]+)")
_ZONE_ID = re.compile(r"([a-z]{2,}[0-9]+)(-[a-z]+[0-9]+)?-az[0-9]+")
_ZONE_NAME = re.compile(r"[a-z]{2,4}(-[a-z]+)+-[0-9]+(-[a-z]+-[0-9]+)?[a-z]")
_WORKLOAD = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PRICE_SOURCES = ("static", "live")


def zone_prefix(region: str) -> str | None:
    """Return the prefix of an AWS region's zone ids: use1 for us-east-1, apse2 for ap-southeast-2; None for no region.

    AWS shortens each compass point and each other word to its first letter: southeast → se, central → c.
    """
    match = _REGION.fullmatch(region)
    if match is None:
        return None
    words = re.findall("north|south|east|west|[a-z]+", match[2])
    return f"{match[1]}{''.join(word[0] for word in words)}{match[3]}"


def _store_is_known(config: RunConfig) -> Breach:
    store = config.store
    hint = "use a folder, or s3://bucket/prefix"
    if not store.strip():
        return "store must not be empty", hint
    if store.startswith("s3://") and not store.removeprefix("s3://").partition("/")[0]:
        return f"store {store!r} names no bucket", hint
    if ADDRESS.match(store) and not store.startswith(("s3://", "file://")):
        return f"store {store!r} is of an unknown kind", hint
    return None


def _named(key: str, hint: str) -> Rule:
    """Return the rule that the path at `key` is on this machine and not empty; `hint` is shown for an empty path."""

    def check(config: RunConfig) -> Breach:
        value = value_of(config, key)
        if value is not None and ADDRESS.match(value):
            return f"{key} must be a path on this machine, not {value!r}", "copy it here first, and name the copy"
        return None if value is None or value.strip() else (f"{key} must not be empty", hint)

    return Rule((key,), check)


def _workload_is_a_class(config: RunConfig) -> Breach:
    name = config.workload
    if name is None or _WORKLOAD.fullmatch(name):
        return None
    example = "my_package.module:MyWorkload"
    module, dot, last = name.rpartition(".")
    if name.endswith(".py"):
        example = f"{name.removesuffix('.py').strip('./').replace('/', '.')}:MyWorkload"
    elif dot and ":" not in name and _WORKLOAD.fullmatch(f"{module}:{last}"):
        example = f"{module}:{last}"
    return f"workload must look like package.module:Class, not {name!r}", f"write {example}"


def _options_need_a_workload(config: RunConfig) -> Breach:
    if config.workload is not None or not config.workload_options:
        return None
    names = ", ".join(config.workload_options)
    message = f"workload_options ({names}) have no effect: without workload the built-in language model is trained"
    return message, "set workload to package.module:Class, or remove the options; the built-in model's are in model"


def _regions_are_regions(config: RunConfig) -> Breach:
    regions = config.cost.regions
    if not regions:
        return "cost.regions must name at least one region, or there is no capacity to choose from", "write [us-east-1]"
    for name, times in Counter(regions).items():
        if zone_prefix(name) is None:
            zone = name[:-1]
            hint = f"{name} is a zone; its region is {zone}" if _ZONE_NAME.fullmatch(name) else "such as us-east-1"
            return f"cost.regions must be names of AWS regions, not {name!r}", hint
        if times > 1:
            return f"cost.regions names {name} {times} times", "keep one of them"
    return None


def region_problem(key: str, name: str | None) -> Breach:
    """Return the problem if `name`, the value of `key`, is not an AWS region; None if it is one, or is null."""
    if name is None or zone_prefix(name) is not None:
        return None
    return f"{key} must be the name of an AWS region, not {name!r}", "such as us-east-1"


def _store_region_is_a_region(config: RunConfig) -> Breach:
    return region_problem("cost.store_region", config.cost.store_region)


def _zones_lie_in_the_regions(config: RunConfig) -> Breach:
    prefixes = {zone_prefix(region): region for region in config.cost.regions}
    if None in prefixes:
        return None  # an invalid region breaks a rule of its own
    for name, times in Counter(config.cost.zones).items():
        match = _ZONE_ID.fullmatch(name)
        if match is None:
            hint = "such as use1-az1; aws ec2 describe-availability-zones lists them"
            if _ZONE_NAME.fullmatch(name):
                hint = f"{name} is another zone in each account; aws ec2 describe-availability-zones shows its id"
            return f"cost.zones must be zone ids, not {name!r}", hint
        if match[1] not in prefixes:
            allowed = ", ".join(f"{prefix}-az… ({region})" for prefix, region in prefixes.items())
            message = f"cost.zones: {name} is in none of cost.regions, whose zones are {allowed}"
            return message, "add its region to cost.regions, or remove the zone"
        if times > 1:
            return f"cost.zones names {name} {times} times", "keep one of them"
    return None


def _prices_are_known(config: RunConfig) -> Breach:
    source = config.cost.prices
    hint = "write static, live, or a file of recorded prices such as prices.json"
    if not source.strip():
        return "cost.prices must not be empty", hint
    name = PurePath(source).name
    if ADDRESS.match(source):
        return f"cost.prices must be a path on this machine, not {source!r}", hint
    if source in _PRICE_SOURCES or PurePath(source).suffix:
        return None
    close = closest_match(name, _PRICE_SOURCES)
    message = f"cost.prices must be static, live, or a file with an ending, not {name!r}"
    return message, f"did you mean {close}?" if close else hint


def _push_url_is_an_address(config: RunConfig) -> Breach:
    url = config.metrics.push_url
    if url is None:
        return None
    hint = "such as http://pushgateway:9091"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"metrics.push_url is no address: {error}", hint
    if parts.scheme not in ("http", "https") or not host or port == 0:
        return f"metrics.push_url must be an http:// or https:// address with a host, not {url!r}", hint
    if parts.username or parts.password:
        message = "metrics.push_url must not hold a user or password: the configuration is written into the store"
        return message, f"let a proxy add them, and write {parts.scheme}://{host}"
    if parts.query or parts.fragment:
        return f"metrics.push_url must end with its path, not {url!r}", "leave out what follows '?' or '#'"
    return None


def _metrics_address_is_an_ip_address(config: RunConfig) -> Breach:
    address = config.metrics.address
    if address is None:
        return None
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return f"metrics.address must be an IP address, not {address!r}", "such as 127.0.0.1, or 0.0.0.0 for all"
    return None


def _signing_key_env_is_a_name(config: RunConfig) -> Breach:
    """Check the name of the variable. The message does not show it: a user may have given the key itself by mistake."""
    name = config.checkpoint.signing_key_env
    if name is None or NAME_PATTERN.fullmatch(name):
        return None
    message = "checkpoint.signing_key_env must be the name of an environment variable in upper case, and not the key"
    return message, "such as JOB_SIGNING_KEY, and set that variable to the key"


NAMES_RULES = (
    Rule(("checkpoint.signing_key_env",), _signing_key_env_is_a_name),
    Rule(("store",), _store_is_known),
    _named("data.path", "name a folder, file or glob, or write null for the standard library"),
    _named("data.tokenizer", "write bytes, or the path of a tokenizer.json"),
    _named("training.initial_weights", "name a safetensors file or a folder of them, or write null"),
    Rule(("workload",), _workload_is_a_class),
    Rule(("workload_options", "workload"), _options_need_a_workload),
    Rule(("cost.regions",), _regions_are_regions),
    Rule(("cost.zones", "cost.regions"), _zones_lie_in_the_regions),
    Rule(("cost.store_region",), _store_region_is_a_region),
    Rule(("cost.prices",), _prices_are_known),
    Rule(("metrics.push_url",), _push_url_is_an_address),
    Rule(("metrics.address",), _metrics_address_is_an_ip_address),
)


# https://docs.aws.amazon.com/batch/latest/APIReference/API_CreateJobQueue.html
_QUEUE = re.compile(r"(arn:aws[a-z-]*:batch:[a-z0-9-]+:[0-9]{12}:job-queue/)?[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_INSTANCE_TYPE = re.compile(r"[a-z][a-z0-9-]*(\.([a-z0-9-]+)?)?")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]+", re.ASCII)
# https://docs.aws.amazon.com/batch/latest/userguide/using-tags.html
_MOST_TAGS, _LONGEST_TAG_NAME, _LONGEST_TAG_VALUE = 50, 128, 256
_TAG_CHARACTERS = re.compile(r"[\w +\-.:/@]*")  # AWS takes "=" as well, and Metaflow's `--aws-batch-tag` does not
_QUEUE_HINT = "letters, digits, '-' and '_', at most 128; aws batch describe-job-queues lists them"


def _queues_have_names(config: RunConfig) -> Breach:
    names = Counter(queue.name for queue in config.batch.queues)
    for name, times in names.items():
        if not _QUEUE.fullmatch(name):
            return f"batch.queues: {name!r} is no name of a job queue", _QUEUE_HINT
        if times > 1:
            return f"batch.queues names {name} {times} times", "keep one of them"
    return None


def _light_queue_has_a_name(config: RunConfig) -> Breach:
    name = config.batch.light_queue
    if name is None or _QUEUE.fullmatch(name):
        return None
    return f"batch.light_queue: {name!r} is no name of a job queue", _QUEUE_HINT


def _several_nodes_are_on_demand(config: RunConfig) -> Breach:
    for queue in config.batch.queues:
        if queue.market == "spot" and queue.multi_node:
            message = (
                f"batch.queues: {queue.name} is spot and multi_node: AWS Batch runs no job of several nodes on Spot"
            )
            return message, f"set multi_node of {queue.name} to false; several nodes on Spot need Kubernetes"
    return None


def _a_queue_takes_the_nodes(config: RunConfig) -> Breach:
    nodes, queues = config.cluster.nodes, config.batch.queues
    if config.cluster.plan_for != "batch" or nodes == "auto" or nodes == 1 or not queues:
        return None
    if any(queue.multi_node for queue in queues):
        return None
    message = f"cluster.nodes {nodes}: none of batch.queues ({_queue_markets(config)}) is multi_node"
    return message, "set multi_node of an on-demand queue to true, or cluster.nodes to 1 or auto"


def _a_queue_is_of_the_market(config: RunConfig) -> Breach:
    market, queues = config.cluster.market, config.batch.queues
    if config.cluster.plan_for != "batch" or market == "auto" or not queues:
        return None
    if any(queue.market == market for queue in queues):
        return None
    message = f"cluster.market {market}: none of batch.queues ({_queue_markets(config)}) is {market}"
    return message, f"add a queue of market {market}, or set cluster.market to auto"


def _instance_types_are_types(config: RunConfig) -> Breach:
    for queue in config.batch.queues:
        for kind in queue.instance_types:
            if not _INSTANCE_TYPE.fullmatch(kind):
                message = f"batch.queues: {queue.name}: {kind!r} is no instance type nor the beginning of one"
                return message, "such as g5 or g5.12xlarge; leave instance_types out for any"
    return None


def _region_is_a_region(config: RunConfig) -> Breach:
    return region_problem("batch.region", config.batch.region)


def _image_is_a_word(config: RunConfig) -> Breach:
    image = config.batch.image
    if image is None or (image and not any(char.isspace() for char in image)):
        return None
    return (
        f"batch.image must be the address of an image, not {image!r}",
        "such as 123456789012.dkr.ecr.us-east-1.amazonaws.com/ebbflow:1",
    )


def _job_role_is_an_arn(config: RunConfig) -> Breach:
    role = config.batch.job_role
    if role is None or _ROLE.fullmatch(role):
        return None
    return (
        f"batch.job_role must be the ARN of a role, not {role!r}",
        "such as arn:aws:iam::123456789012:role/ebbflow-job",
    )


def _tags_are_tags(config: RunConfig) -> Breach:
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
    """Describe why AWS or Metaflow rejects a tag's value; None if they accept it."""
    if "=" in value:
        return "has '=' in it: Metaflow hands tags on as NAME=VALUE and splits them at each '='"
    if value.lower().startswith("aws:"):
        return f"begins with {value[:4]}, which AWS keeps to itself"
    odd = next((char for char in value if not _TAG_CHARACTERS.fullmatch(char)), None)
    return None if odd is None else f"has {odd!r} in it, which AWS does not take"


def _queue_markets(config: RunConfig) -> str:
    return ", ".join(f"{queue.name}: {queue.market}" for queue in config.batch.queues)


BATCH_RULES = (
    Rule(("batch.queues",), _queues_have_names),
    Rule(("batch.queues",), _several_nodes_are_on_demand),
    Rule(("batch.queues",), _instance_types_are_types),
    Rule(("cluster.nodes", "batch.queues", "cluster.plan_for"), _a_queue_takes_the_nodes),
    Rule(("cluster.market", "batch.queues", "cluster.plan_for"), _a_queue_is_of_the_market),
    Rule(("batch.light_queue",), _light_queue_has_a_name),
    Rule(("batch.region",), _region_is_a_region),
    Rule(("batch.image",), _image_is_a_word),
    Rule(("batch.job_role",), _job_role_is_an_arn),
    Rule(("batch.tags",), _tags_are_tags),
)
