"""Configuration rules about names: the store, paths, regions, zones, addresses, queues and tags."""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import PurePath
from urllib.parse import urlsplit

from ebbflow.core.config.rule_base import Breach, Rules, value_of
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.config.yaml_values import closest_match
from ebbflow.core.signing_key import NAME_PATTERN
from ebbflow.core.store_address import ADDRESS, find_address_problem

RULES = Rules()

_REGION = re.compile(r"([a-z]{2,4})((?:-[a-z]+)+)-([0-9]+)")
_ZONE_ID = re.compile(r"([a-z]{2,}[0-9]+)(-[a-z]+[0-9]+)?-az[0-9]+")
_ZONE_NAME = re.compile(r"[a-z]{2,4}(-[a-z]+)+-[0-9]+(-[a-z]+-[0-9]+)?[a-z]")
_WORKLOAD = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PRICE_SOURCES = ("static", "live")


def zone_prefix(region: str) -> str | None:
    """Return the prefix of an AWS region's zone ids, such as use1 for us-east-1.

    AWS shortens each compass direction and each other word to its first letter: ap-southeast-2
    becomes apse2, eu-central-1 becomes euc1. The result is None if `region` is not a region's name.
    """
    match = _REGION.fullmatch(region)
    if match is None:
        return None
    words = re.findall("north|south|east|west|[a-z]+", match[2])
    return f"{match[1]}{''.join(word[0] for word in words)}{match[3]}"


def _repetition(key: str, names: Iterable[str]) -> Breach:
    for name, times in Counter(names).items():
        if times > 1:
            return f"{key} names {name} {times} times", "keep one of them"
    return None


def _names_variable(key: str, secret: str, hint: str) -> None:
    """Add a rule: `key` must name an environment variable.

    The message omits the value, which may be the secret.
    """

    @RULES.about(key)
    def check(config: RunConfig) -> Breach:
        name = value_of(config, key)
        if name is None or NAME_PATTERN.fullmatch(name):
            return None
        return (
            f"{key} must be the name of an environment variable in upper case, and not {secret}",
            hint,
        )


_names_variable(
    "checkpoint.signing_key_env",
    "the key",
    "such as JOB_SIGNING_KEY, and set that variable to the key",
)
for _key in ("notifications.webhook_env", "notifications.smtp_password_env"):
    _names_variable(_key, "its value", "such as SLACK_WEBHOOK_URL or SMTP_PASSWORD")


@RULES.about("trackers")
def _trackers_are_possible(config: RunConfig) -> Breach:
    """Check each tracker's key_env and url: a variable's name, and a suitable address without
    password.

    Messages omit the values, which may be secret.
    """
    for tracker in config.trackers:
        if tracker.key_env is not None and not NAME_PATTERN.fullmatch(tracker.key_env):
            hint = "such as WANDB_API_KEY, and set that variable to the key"
            return (
                "trackers: key_env must be the name of an environment variable in upper case, "
                "and not the key",
                hint,
            )
        if tracker.url is not None and re.search(r"://[^/]*:[^/]*@", tracker.url):
            hint = "write url: null, and set MLFLOW_TRACKING_URI or WANDB_BASE_URL"
            return "trackers: a url with a password would be stored with the job", hint
        if tracker.url is not None and tracker.type in ("tensorboard", "jsonl"):
            return (
                f"trackers: {tracker.type} has no url, it writes files",
                "name a folder, or leave both out",
            )
    return None


@RULES.about("notifications.smtp_server", "notifications.mail_from", "notifications.mail_to")
def _mail_is_complete(config: RunConfig) -> Breach:
    own = config.notifications
    if own.smtp_server is None:
        return None
    if not re.fullmatch(r"[^:\s]+(:\d{1,5})?", own.smtp_server):
        return (
            f"notifications.smtp_server must be host:port, not {own.smtp_server!r}",
            "such as mail.example.com:587",
        )
    if not own.mail_from or not own.mail_to:
        return (
            "notifications.smtp_server needs mail_from and mail_to",
            "such as mail_to: [me@example.com]",
        )
    if own.smtp_user is not None and own.smtp_password_env is None:
        return (
            "notifications.smtp_user needs smtp_password_env",
            "name the variable that has the password",
        )
    return None


@RULES.about("checkpoint.keep_best.metric")
def _best_metric_of_text_is_known(config: RunConfig) -> Breach:
    metric = config.checkpoint.keep_best.metric
    known = ("held_out_loss", "held_out_bits_per_byte")
    if metric is None or metric in known or config.user_code is not None:
        return None
    return f"the built-in language model has no metric {metric!r}", f"one of {', '.join(known)}"


@RULES.about("training.ema")
def _a_script_averages_itself(config: RunConfig) -> Breach:
    if config.script is None or config.training.ema is None:
        return None
    return (
        "training.ema does not apply to a script, which takes its own steps",
        "null, and average in the script",
    )


@RULES.about("store")
def _store_is_known(config: RunConfig) -> Breach:
    store = config.store
    if not store.strip():
        return "store must not be empty", "use a folder, or s3://bucket/prefix"
    problem = find_address_problem(store)
    if problem is not None:
        (wrong, fix) = problem
        return f"store {store!r} {wrong}", f"use {fix}"
    return None


def _named(key: str, hint: str) -> None:
    """Add a rule: the value of `key` must be a non-empty path on this machine.

    `hint` is shown for an empty path.
    """

    @RULES.about(key)
    def check(config: RunConfig) -> Breach:
        value = value_of(config, key)
        if value is not None and ADDRESS.match(value):
            return (
                f"{key} must be a path on this machine, not {value!r}",
                "copy it here first, and name the copy",
            )
        if value is None or value.strip():
            return None
        return (f"{key} must not be empty", hint)


_named("data.path", "name a folder, file or glob, or write null for the standard library")
_named("data.tokenizer", "write bytes, or the path of a tokenizer.json")
_named("training.initial_weights", "name a safetensors file or a folder of them, or write null")


@RULES.about("workload")
def _workload_is_a_class(config: RunConfig) -> Breach:
    name = config.workload
    if name is None or _WORKLOAD.fullmatch(name):
        return None
    example = "my_package.module:MyWorkload"
    module, _, last = name.rpartition(".")
    if name.endswith(".py"):
        example = f"{name.removesuffix('.py').strip('./').replace('/', '.')}:MyWorkload"
    elif _WORKLOAD.fullmatch(f"{module}:{last}"):
        example = f"{module}:{last}"
    return f"workload must look like package.module:Class, not {name!r}", f"write {example}"


@RULES.about("script", "script_args", "workload")
def _script_is_a_file(config: RunConfig) -> Breach:
    name = config.script
    if name is None:
        message = "script_args have no effect without script"
        if config.script_args:
            return (message, "set script to the path of a Python file")
        return None
    if not name.endswith(".py"):
        return f"script must be the path of a Python file, not {name!r}", "such as train.py"
    if config.workload:
        return ("script and workload exclude each other", "remove one of them")
    return None


@RULES.about("script", "cluster.nodes", "cluster.processes_per_node")
def _script_has_a_number_of_ranks(config: RunConfig) -> Breach:
    cluster = config.cluster
    if config.script is None or "auto" not in (cluster.nodes, cluster.processes_per_node):
        return None
    message = (
        "cluster.nodes and cluster.processes_per_node must be numbers: a script's batch depends "
        "on them"
    )
    return message, "such as 1"


@RULES.about("workload_options", "workload")
def _options_need_a_workload(config: RunConfig) -> Breach:
    if config.workload is not None or not config.workload_options:
        return None
    names = ", ".join(config.workload_options)
    message = (
        f"workload_options ({names}) have no effect: without workload the built-in language "
        "model is trained"
    )
    return (
        message,
        "set workload to package.module:Class, or remove the options; the built-in model's are "
        "in model",
    )


@RULES.about("cost.regions")
def _regions_are_regions(config: RunConfig) -> Breach:
    regions = config.cost.regions
    if not regions:
        return (
            "cost.regions must name at least one region, or there is no capacity to choose from",
            "write [us-east-1]",
        )
    for name in regions:
        if zone_prefix(name) is None:
            zone = name[:-1]
            if _ZONE_NAME.fullmatch(name):
                hint = f"{name} is a zone; its region is {zone}"
            else:
                hint = "such as us-east-1"
            return f"cost.regions must be names of AWS regions, not {name!r}", hint
    return _repetition("cost.regions", regions)


@RULES.about("cost.zones", "cost.regions")
def _zones_lie_in_the_regions(config: RunConfig) -> Breach:
    prefixes = {zone_prefix(region): region for region in config.cost.regions}
    if None in prefixes:
        return None  # an invalid region breaks a rule of its own
    for name in config.cost.zones:
        match = _ZONE_ID.fullmatch(name)
        if match is None:
            hint = "such as use1-az1; aws ec2 describe-availability-zones lists them"
            if _ZONE_NAME.fullmatch(name):
                hint = (
                    f"{name} is another zone in each account; aws ec2 "
                    "describe-availability-zones shows its id"
                )
            return f"cost.zones must be zone ids, not {name!r}", hint
        if match[1] not in prefixes:
            allowed = ", ".join(f"{prefix}-az… ({region})" for prefix, region in prefixes.items())
            message = f"cost.zones: {name} is in none of cost.regions, whose zones are {allowed}"
            return message, "add its region to cost.regions, or remove the zone"
    return _repetition("cost.zones", config.cost.zones)


@RULES.about("cost.prices")
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


@RULES.about("metrics.push_url")
def _push_url_is_an_address(config: RunConfig) -> Breach:
    url = config.metrics.push_url
    if url is None:
        return None
    hint = "such as http://pushgateway:9091"
    try:
        parts = urlsplit(url)
        host = parts.hostname
        port = parts.port
    except ValueError as error:
        return f"metrics.push_url is no address: {error}", hint
    if parts.scheme not in ("http", "https") or not host or port == 0:
        return (
            f"metrics.push_url must be an http:// or https:// address with a host, not {url!r}",
            hint,
        )
    if parts.username or parts.password:
        message = (
            "metrics.push_url must not hold a user or password: the configuration is written "
            "into the store"
        )
        return message, f"let a proxy add them, and write {parts.scheme}://{host}"
    if parts.query or parts.fragment:
        return (
            f"metrics.push_url must end with its path, not {url!r}",
            "leave out what follows '?' or '#'",
        )
    return None


def _is_ip_address(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _is_utc(text: str) -> bool:
    try:
        return len(text) == 20 and text.endswith("Z") and bool(datetime.fromisoformat(text))
    except ValueError:
        return False


# https://docs.aws.amazon.com/batch/latest/APIReference/API_CreateJobQueue.html
_QUEUE = re.compile(
    r"(arn:aws[a-z-]*:batch:[a-z0-9-]+:[0-9]{12}:job-queue/)?[A-Za-z0-9][A-Za-z0-9_-]{0,127}"
)
_QUEUE_HINT = "letters, digits, '-' and '_', at most 128; aws batch describe-job-queues lists them"
_INSTANCE_TYPE = re.compile(r"[a-z][a-z0-9-]*(\.([a-z0-9-]+)?)?")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]+", re.ASCII)
_IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/ebbflow:1"
# What the value of a key must be unless it is null, a test of it, and a hint.
_FORMS: dict[str, tuple[str, Callable[[str], object], str]] = {
    "metrics.address": ("an IP address", _is_ip_address, "such as 127.0.0.1, or 0.0.0.0 for all"),
    "cost.store_region": ("the name of an AWS region", zone_prefix, "such as us-east-1"),
    "batch.region": ("the name of an AWS region", zone_prefix, "such as us-east-1"),
    "batch.light_queue": ("the name of a job queue", _QUEUE.fullmatch, _QUEUE_HINT),
    "batch.image": ("the address of an image", re.compile(r"\S+").fullmatch, f"such as {_IMAGE}"),
    "batch.job_role": (
        "the ARN of a role",
        _ROLE.fullmatch,
        "such as arn:aws:iam::123456789012:role/ebbflow-job",
    ),
}


def _formed(key: str, what: str, is_one: Callable[[str], object], hint: str) -> None:
    @RULES.about(key)
    def check(config: RunConfig) -> Breach:
        value = value_of(config, key)
        if value is None or is_one(value):
            return None
        return (f"{key} must be {what}, not {value!r}", hint)


for _key, _form in _FORMS.items():
    _formed(_key, *_form)


@RULES.about("batch.queues")
def _queues_are_possible(config: RunConfig) -> Breach:
    for queue in config.batch.queues:
        name = queue.name
        if not _QUEUE.fullmatch(name):
            return f"batch.queues: {name!r} is no name of a job queue", _QUEUE_HINT
        if queue.market == "spot" and queue.multi_node:
            message = (
                f"batch.queues: {name} is spot and multi_node: AWS Batch runs no job of several "
                "nodes on Spot"
            )
            return (
                message,
                f"set multi_node of {name} to false; several nodes on Spot need Kubernetes",
            )
        if queue.region is not None and zone_prefix(queue.region) is None:
            return (
                f"batch.queues: {name}: region {queue.region!r} is no AWS region",
                "such as us-west-2",
            )
        if wrong := [kind for kind in queue.instance_types if not _INSTANCE_TYPE.fullmatch(kind)]:
            message = (
                f"batch.queues: {name}: {wrong[0]!r} is no instance type nor the beginning of one"
            )
            return message, "such as g5 or g5.12xlarge; leave instance_types out for any"
    return _repetition("batch.queues", (queue.name for queue in config.batch.queues))


@RULES.about("batch.queues", "batch.region", "cost.store_region")
def _several_regions_are_named(config: RunConfig) -> Breach:
    batch = config.batch
    there = [
        queue.region or (queue.name.split(":")[3] if queue.name.startswith("arn:") else None)
        for queue in batch.queues
    ]
    regions = dict.fromkeys(region for region in there if region not in (None, batch.region))
    if not regions or (len(regions) == 1 and batch.region is None and None not in there):
        return None
    lacking = [
        key for key in ("batch.region", "cost.store_region") if value_of(config, key) is None
    ]
    if not lacking:
        return None
    message = (
        f"batch.queues has queues in other regions ({', '.join(map(str, regions))}), and no "
        f"{lacking[0]} is set"
    )
    return (
        message,
        "set batch.region to the region of the light queue, and cost.store_region to that of the "
        "bucket",
    )


@RULES.about("cost.reservations", "batch.queues")
def _reservations_are_possible(config: RunConfig) -> Breach:  # noqa: PLR0911 (one return for each mistake)
    for reservation in config.cost.reservations:
        if (
            not _INSTANCE_TYPE.fullmatch(reservation.instance_type)
            or "." not in reservation.instance_type
        ):
            return (
                f"cost.reservations: {reservation.id}: {reservation.instance_type!r} is no "
                "instance type",
                "such as p5.48xlarge",
            )
        prefix = zone_prefix(reservation.region)
        if prefix is None:
            return (
                f"cost.reservations: {reservation.id}: region {reservation.region!r} is no AWS "
                "region",
                "such as us-west-2",
            )
        if reservation.zone is None:
            match = None
        else:
            match = _ZONE_ID.fullmatch(reservation.zone)
        if reservation.zone is not None and (match is None or match[1] != prefix):
            message = (
                f"cost.reservations: {reservation.id}: zone {reservation.zone!r} is no zone id "
                f"of {reservation.region}"
            )
            return message, f"such as {prefix}-az1; aws ec2 describe-availability-zones lists them"
        for name, text in (("start", reservation.start), ("end", reservation.end)):
            if text is not None and not _is_utc(text):
                hint = "such as 2026-12-01T11:30:00Z"
                return (
                    f"cost.reservations: {reservation.id}: {name} {text!r} is no time in UTC",
                    hint,
                )
        if (
            reservation.start is not None
            and reservation.end is not None
            and reservation.end <= reservation.start
        ):
            message = (
                f"cost.reservations: {reservation.id} ends at {reservation.end}, before its "
                f"start at {reservation.start}"
            )
            return message, "correct one of them"
    known = [reservation.id for reservation in config.cost.reservations]
    for queue in config.batch.queues:
        if queue.reservation is not None and queue.reservation not in known:
            message = (
                f"batch.queues: {queue.name}: reservation {queue.reservation} is not in "
                "cost.reservations"
            )
            return message, f"there are: {', '.join(known) or 'none'}"
        if queue.reservation is not None and queue.market != "on_demand":
            message = (
                f"batch.queues: {queue.name} is {queue.market} and has a reservation, which is "
                "never Spot"
            )
            return message, "set its market to on_demand"
    return _repetition("cost.reservations", known)


@RULES.about("cluster.nodes", "batch.queues", "cluster.plan_for")
def _a_queue_takes_the_nodes(config: RunConfig) -> Breach:
    nodes = config.cluster.nodes
    queues = config.batch.queues
    if (
        config.cluster.plan_for != "batch"
        or nodes in ("auto", 1)
        or not queues
        or any(queue.multi_node for queue in queues)
    ):
        return None
    message = (
        f"cluster.nodes {nodes}: none of batch.queues ({_queue_markets(config)}) is multi_node"
    )
    return message, "set multi_node of an on-demand queue to true, or cluster.nodes to 1 or auto"


@RULES.about("cluster.market", "batch.queues", "cluster.plan_for")
def _a_queue_is_of_the_market(config: RunConfig) -> Breach:
    market = config.cluster.market
    queues = config.batch.queues
    offered = ("auto", *(queue.market for queue in queues))
    if config.cluster.plan_for != "batch" or not queues or market in offered:
        return None
    message = (
        f"cluster.market {market}: none of batch.queues ({_queue_markets(config)}) is {market}"
    )
    return message, f"add a queue of market {market}, or set cluster.market to auto"


def _queue_markets(config: RunConfig) -> str:
    return ", ".join(f"{queue.name}: {queue.market}" for queue in config.batch.queues)


# https://docs.aws.amazon.com/batch/latest/userguide/using-tags.html
_MOST_TAGS = 50
_LONGEST_TAG_NAME = 128
_LONGEST_TAG_VALUE = 256
# AWS takes "=" as well, and Metaflow's `--aws-batch-tag` does not
_TAG_CHARACTERS = re.compile(r"[\w +\-.:/@]*")


@RULES.about("batch.tags")
def _tags_are_tags(config: RunConfig) -> Breach:
    tags = config.batch.tags
    if len(tags) > _MOST_TAGS:
        return (
            f"batch.tags has {len(tags)} tags, and AWS takes at most {_MOST_TAGS}",
            "leave some out",
        )
    for name, value in tags.items():
        if len(name) > _LONGEST_TAG_NAME or len(value) > _LONGEST_TAG_VALUE:
            limits = f"{_LONGEST_TAG_NAME} characters of name and {_LONGEST_TAG_VALUE} of value"
            return f"batch.tags: {name[:40]} is too long: AWS takes {limits}", "shorten it"
        problem = ""
        if "=" in value:
            problem = (
                "has '=' in it: Metaflow hands tags on as NAME=VALUE and splits them at each '='"
            )
        elif value.lower().startswith("aws:"):
            problem = f"begins with {value[:4]}, which AWS keeps to itself"
        elif odd := next((char for char in value if not _TAG_CHARACTERS.fullmatch(char)), None):
            problem = f"has {odd!r} in it, which AWS does not take"
        if problem:
            return (
                f"batch.tags: {name}: {value!r} {problem}",
                "use letters, digits, spaces and + - . _ : / @",
            )
    return None
