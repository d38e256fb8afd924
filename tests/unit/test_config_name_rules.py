"""Rules about names: each refusal with its keys, message and hint, and what is accepted just beside
it.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ebbflow.core.config import RunConfig, violations
from ebbflow.core.config.name_rules import zone_prefix
from ebbflow.core.config.rule_base import Violation

# A configuration, the keys of the one rule that it breaks, the rule's message, and its hint.
BREACHES = {
    "a key in the configuration": (
        "checkpoint: {signing_key_env: secret-key}",
        "checkpoint.signing_key_env",
        "checkpoint.signing_key_env must be the name of an environment variable in upper case, "
        "and not the key",
        "such as JOB_SIGNING_KEY, and set that variable to the key",
    ),
    "a webhook in the configuration": (
        "notifications: {webhook_env: 'https://hooks.example.com/T0'}",
        "notifications.webhook_env",
        "notifications.webhook_env must be the name of an environment variable in upper case, "
        "and not its value",
        "such as SLACK_WEBHOOK_URL or SMTP_PASSWORD",
    ),
    "a password of a mail server in the configuration": (
        "notifications: {smtp_password_env: hunter2}",
        "notifications.smtp_password_env",
        "notifications.smtp_password_env must be the name of an environment variable in upper "
        "case, and not its value",
        "such as SLACK_WEBHOOK_URL or SMTP_PASSWORD",
    ),
    "a tracker's key in the configuration": (
        "trackers: [{type: wandb, key_env: abc}]",
        "trackers",
        "trackers: key_env must be the name of an environment variable in upper case, and not "
        "the key",
        "such as WANDB_API_KEY, and set that variable to the key",
    ),
    "a tracker's password in its url": (
        "trackers: [{type: wandb}, {type: mlflow, url: 'https://me:pw@host'}]",
        "trackers",
        "trackers: a url with a password would be stored with the job",
        "write url: null, and set MLFLOW_TRACKING_URI or WANDB_BASE_URL",
    ),
    "a url of TensorBoard": (
        "trackers: [{type: tensorboard, url: 'https://host'}]",
        "trackers",
        "trackers: tensorboard has no url, it writes files",
        "name a folder, or leave both out",
    ),
    "a url of JSON Lines": (
        "trackers: [{type: jsonl, url: x}]",
        "trackers",
        "trackers: jsonl has no url, it writes files",
        "name a folder, or leave both out",
    ),
    "a mail server with a space": (
        "notifications: {smtp_server: a b, mail_from: a, mail_to: [b]}",
        "notifications.smtp_server notifications.mail_from notifications.mail_to",
        "notifications.smtp_server must be host:port, not 'a b'",
        "such as mail.example.com:587",
    ),
    "a mail server's port of six digits": (
        "notifications: {smtp_server: 'mail:123456', mail_from: a, mail_to: [b]}",
        "notifications.smtp_server notifications.mail_from notifications.mail_to",
        "notifications.smtp_server must be host:port, not 'mail:123456'",
        "such as mail.example.com:587",
    ),
    "mail to none": (
        "notifications: {smtp_server: 'mail:25', mail_from: a}",
        "notifications.smtp_server notifications.mail_from notifications.mail_to",
        "notifications.smtp_server needs mail_from and mail_to",
        "such as mail_to: [me@example.com]",
    ),
    "mail from none": (
        "notifications: {smtp_server: 'mail:25', mail_to: [b]}",
        "notifications.smtp_server notifications.mail_from notifications.mail_to",
        "notifications.smtp_server needs mail_from and mail_to",
        "such as mail_to: [me@example.com]",
    ),
    "a mail user without a password": (
        "notifications: {smtp_server: mail, mail_from: a, mail_to: [b], smtp_user: me}",
        "notifications.smtp_server notifications.mail_from notifications.mail_to",
        "notifications.smtp_user needs smtp_password_env",
        "name the variable that has the password",
    ),
    "a metric that the built-in model lacks": (
        "checkpoint: {keep_best: {metric: accuracy}}",
        "checkpoint.keep_best.metric",
        "the built-in language model has no metric 'accuracy'",
        "one of held_out_loss, held_out_bits_per_byte",
    ),
    "an average of a script's weights": (
        "{script: train.py, training: {ema: 0.5}}",
        "training.ema",
        "training.ema does not apply to a script, which takes its own steps",
        "null, and average in the script",
    ),
    "an empty store": (
        "store: ' '",
        "store",
        "store must not be empty",
        "use a folder, or s3://bucket/prefix",
    ),
    "a store without a bucket": (
        "store: s3:///folder",
        "store",
        "store 's3:///folder' is a place in S3",
        "use s3://folder",
    ),
    "a store with one slash": (
        "store: s3:/bucket",
        "store",
        "store 's3:/bucket' is a place in S3",
        "use s3://bucket",
    ),
    "a store of another kind": (
        "store: swift://bucket",
        "store",
        "store 'swift://bucket' is of an unknown kind",
        "use a folder, or s3://bucket/prefix",
    ),
    "a path of data on another machine": (
        "data: {path: 's3://bucket/texts'}",
        "data.path",
        "data.path must be a path on this machine, not 's3://bucket/texts'",
        "copy it here first, and name the copy",
    ),
    "an empty path of data": (
        "data: {path: ''}",
        "data.path",
        "data.path must not be empty",
        "name a folder, file or glob, or write null for the standard library",
    ),
    "an empty tokenizer": (
        "data: {tokenizer: ' '}",
        "data.tokenizer",
        "data.tokenizer must not be empty",
        "write bytes, or the path of a tokenizer.json",
    ),
    "empty weights": (
        "training: {initial_weights: ''}",
        "training.initial_weights",
        "training.initial_weights must not be empty",
        "name a safetensors file or a folder of them, or write null",
    ),
    "a workload with a dot for the colon": (
        "workload: package.module.Class",
        "workload",
        "workload must look like package.module:Class, not 'package.module.Class'",
        "write package.module:Class",
    ),
    "a workload with a dot for the colon and another character": (
        "workload: my-package.Class",
        "workload",
        "workload must look like package.module:Class, not 'my-package.Class'",
        "write my_package.module:MyWorkload",
    ),
    "a workload's file": (
        "workload: ./src/train.py",
        "workload",
        "workload must look like package.module:Class, not './src/train.py'",
        "write src.train:MyWorkload",
    ),
    "a workload without a module": (
        "workload: train",
        "workload",
        "workload must look like package.module:Class, not 'train'",
        "write my_package.module:MyWorkload",
    ),
    "a workload that is no name": (
        "workload: 'a-b:C.d'",
        "workload",
        "workload must look like package.module:Class, not 'a-b:C.d'",
        "write my_package.module:MyWorkload",
    ),
    "arguments without a script": (
        "script_args: [a]",
        "script script_args workload",
        "script_args have no effect without script",
        "set script to the path of a Python file",
    ),
    "a script that is no Python": (
        "script: train",
        "script script_args workload",
        "script must be the path of a Python file, not 'train'",
        "such as train.py",
    ),
    "a script and a workload": (
        "{script: train.py, workload: 'a:B'}",
        "script script_args workload",
        "script and workload exclude each other",
        "remove one of them",
    ),
    "a script on any number of nodes": (
        "{script: train.py, cluster: {nodes: auto}}",
        "script cluster.nodes cluster.processes_per_node",
        "cluster.nodes and cluster.processes_per_node must be numbers: a script's batch depends "
        "on them",
        "such as 1",
    ),
    "a script on any number of ranks": (
        "{script: train.py, cluster: {processes_per_node: auto}}",
        "script cluster.nodes cluster.processes_per_node",
        "cluster.nodes and cluster.processes_per_node must be numbers: a script's batch depends "
        "on them",
        "such as 1",
    ),
    "options without a workload": (
        "workload_options: {width: 1, name: x}",
        "workload_options workload",
        "workload_options (width, name) have no effect: without workload the built-in language "
        "model is trained",
        "set workload to package.module:Class, or remove the options; the built-in model's are "
        "in model",
    ),
    "no region": (
        "cost: {regions: []}",
        "cost.regions",
        "cost.regions must name at least one region, or there is no capacity to choose from",
        "write [us-east-1]",
    ),
    "a zone for a region": (
        "cost: {regions: [us-west-2, us-east-1a]}",
        "cost.regions",
        "cost.regions must be names of AWS regions, not 'us-east-1a'",
        "us-east-1a is a zone; its region is us-east-1",
    ),
    "a region that is none": (
        "cost: {regions: [useast]}",
        "cost.regions",
        "cost.regions must be names of AWS regions, not 'useast'",
        "such as us-east-1",
    ),
    "a region twice": (
        "cost: {regions: [us-east-1, eu-west-1, us-east-1]}",
        "cost.regions",
        "cost.regions names us-east-1 2 times",
        "keep one of them",
    ),
    "a zone outside the regions": (
        "cost: {regions: [us-east-1, eu-west-1], zones: [use1-az1, usw2-az1]}",
        "cost.zones cost.regions",
        "cost.zones: usw2-az1 is in none of cost.regions, whose zones are use1-az… (us-east-1), "
        "euw1-az… (eu-west-1)",
        "add its region to cost.regions, or remove the zone",
    ),
    "a zone twice": (
        "cost: {zones: [use1-az1, use1-az2, use1-az1]}",
        "cost.zones cost.regions",
        "cost.zones names use1-az1 2 times",
        "keep one of them",
    ),
    "a zone's name for its id": (
        "cost: {zones: [us-east-1a]}",
        "cost.zones cost.regions",
        "cost.zones must be zone ids, not 'us-east-1a'",
        "us-east-1a is another zone in each account; aws ec2 describe-availability-zones shows "
        "its id",
    ),
    "a zone that is none": (
        "cost: {zones: [one]}",
        "cost.zones cost.regions",
        "cost.zones must be zone ids, not 'one'",
        "such as use1-az1; aws ec2 describe-availability-zones lists them",
    ),
    "empty prices": (
        "cost: {prices: ''}",
        "cost.prices",
        "cost.prices must not be empty",
        "write static, live, or a file of recorded prices such as prices.json",
    ),
    "prices on another machine": (
        "cost: {prices: 's3://bucket/p.json'}",
        "cost.prices",
        "cost.prices must be a path on this machine, not 's3://bucket/p.json'",
        "write static, live, or a file of recorded prices such as prices.json",
    ),
    "misspelt prices": (
        "cost: {prices: /home/me/statik}",
        "cost.prices",
        "cost.prices must be static, live, or a file with an ending, not 'statik'",
        "did you mean static?",
    ),
    "prices that are no file": (
        "cost: {prices: market}",
        "cost.prices",
        "cost.prices must be static, live, or a file with an ending, not 'market'",
        "write static, live, or a file of recorded prices such as prices.json",
    ),
    "an address that cannot be parsed": (
        "metrics: {push_url: 'http://host:99999'}",
        "metrics.push_url",
        "metrics.push_url is no address: Port out of range 0-65535",
        "such as http://pushgateway:9091",
    ),
    "an address that is no HTTP": (
        "metrics: {push_url: 'ftp://host'}",
        "metrics.push_url",
        "metrics.push_url must be an http:// or https:// address with a host, not 'ftp://host'",
        "such as http://pushgateway:9091",
    ),
    "an address without a host": (
        "metrics: {push_url: 'http://'}",
        "metrics.push_url",
        "metrics.push_url must be an http:// or https:// address with a host, not 'http://'",
        "such as http://pushgateway:9091",
    ),
    "an address with the port 0": (
        "metrics: {push_url: 'http://host:0'}",
        "metrics.push_url",
        "metrics.push_url must be an http:// or https:// address with a host, not 'http://host:0'",
        "such as http://pushgateway:9091",
    ),
    "an address with a user": (
        "metrics: {push_url: 'https://me@host'}",
        "metrics.push_url",
        "metrics.push_url must not hold a user or password: the configuration is written into "
        "the store",
        "let a proxy add them, and write https://host",
    ),
    "an address with a password": (
        "metrics: {push_url: 'http://:pw@host'}",
        "metrics.push_url",
        "metrics.push_url must not hold a user or password: the configuration is written into "
        "the store",
        "let a proxy add them, and write http://host",
    ),
    "an address with a query": (
        "metrics: {push_url: 'http://host/x?y'}",
        "metrics.push_url",
        "metrics.push_url must end with its path, not 'http://host/x?y'",
        "leave out what follows '?' or '#'",
    ),
    "an address with a fragment": (
        "metrics: {push_url: 'http://host/x#y'}",
        "metrics.push_url",
        "metrics.push_url must end with its path, not 'http://host/x#y'",
        "leave out what follows '?' or '#'",
    ),
    "an address that is no IP address": (
        "metrics: {address: localhost}",
        "metrics.address",
        "metrics.address must be an IP address, not 'localhost'",
        "such as 127.0.0.1, or 0.0.0.0 for all",
    ),
    "a store's region that is none": (
        "cost: {store_region: us-east}",
        "cost.store_region",
        "cost.store_region must be the name of an AWS region, not 'us-east'",
        "such as us-east-1",
    ),
    "a region of Batch that is none": (
        "batch: {region: us-east}",
        "batch.region",
        "batch.region must be the name of an AWS region, not 'us-east'",
        "such as us-east-1",
    ),
    "a light queue that is none": (
        "batch: {light_queue: a b}",
        "batch.light_queue",
        "batch.light_queue must be the name of a job queue, not 'a b'",
        "letters, digits, '-' and '_', at most 128; aws batch describe-job-queues lists them",
    ),
    "an image that is none": (
        "batch: {image: a b}",
        "batch.image",
        "batch.image must be the address of an image, not 'a b'",
        "such as 123456789012.dkr.ecr.us-east-1.amazonaws.com/ebbflow:1",
    ),
    "a role that is none": (
        "batch: {job_role: admin}",
        "batch.job_role",
        "batch.job_role must be the ARN of a role, not 'admin'",
        "such as arn:aws:iam::123456789012:role/ebbflow-job",
    ),
    "a queue's name that is none": (
        "{cluster: {nodes: 1}, batch: {queues: [{name: a b, market: spot}]}}",
        "batch.queues",
        "batch.queues: 'a b' is no name of a job queue",
        "letters, digits, '-' and '_', at most 128; aws batch describe-job-queues lists them",
    ),
    "a queue of several nodes on Spot": (
        "batch: {queues: [{name: a, market: spot, multi_node: true}]}",
        "batch.queues",
        "batch.queues: a is spot and multi_node: AWS Batch runs no job of several nodes on Spot",
        "set multi_node of a to false; several nodes on Spot need Kubernetes",
    ),
    "a queue's region that is none": (
        "{cluster: {nodes: 1}, batch: {queues: [{name: a, market: spot, region: us}]}}",
        "batch.queues",
        "batch.queues: a: region 'us' is no AWS region",
        "such as us-west-2",
    ),
    "an instance type that is none": (
        "{cluster: {nodes: 1}, batch: {queues: [{name: a, market: spot, instance_types: [g5, G5, "
        "P4]}]}}",
        "batch.queues",
        "batch.queues: a: 'G5' is no instance type nor the beginning of one",
        "such as g5 or g5.12xlarge; leave instance_types out for any",
    ),
    "a queue twice": (
        "{cluster: {nodes: 1}, batch: {queues: [{name: a, market: spot}, {name: b, market: "
        "spot}, {name: a, market: on_demand}]}}",
        "batch.queues",
        "batch.queues names a 2 times",
        "keep one of them",
    ),
    "a queue of another region than one without": (
        "{cluster: {nodes: 1}, batch: {queues: [{name: a, market: spot, region: us-west-2}, "
        "{name: b, market: spot}]}, cost: {store_region: us-west-1}}",
        "batch.queues batch.region cost.store_region",
        "batch.queues has queues in other regions (us-west-2), and no batch.region is set",
        "set batch.region to the region of the light queue, and cost.store_region to that of the "
        "bucket",
    ),
    "queues of several regions": (
        "{cluster: {nodes: 1}, batch: {queues: [{name: a, market: spot, region: us-west-2}, "
        "{name: b, market: spot, region: us-west-1}]}}",
        "batch.queues batch.region cost.store_region",
        "batch.queues has queues in other regions (us-west-2, us-west-1), and no batch.region is "
        "set",
        "set batch.region to the region of the light queue, and cost.store_region to that of the "
        "bucket",
    ),
    "an ARN of another region": (
        "{cluster: {nodes: 1}, batch: {queues: [{name: "
        "'arn:aws:batch:us-west-2:123456789012:job-queue/x', market: spot}], region: us-east-1}}",
        "batch.queues batch.region cost.store_region",
        "batch.queues has queues in other regions (us-west-2), and no cost.store_region is set",
        "set batch.region to the region of the light queue, and cost.store_region to that of the "
        "bucket",
    ),
    "a reservation of a family": (
        "cost: {reservations: [{id: cr-1, instance_type: p5, region: us-west-2}]}",
        "cost.reservations batch.queues",
        "cost.reservations: cr-1: 'p5' is no instance type",
        "such as p5.48xlarge",
    ),
    "a reservation of no instance type": (
        "cost: {reservations: [{id: cr-1, instance_type: P5.48xlarge, region: us-west-2}]}",
        "cost.reservations batch.queues",
        "cost.reservations: cr-1: 'P5.48xlarge' is no instance type",
        "such as p5.48xlarge",
    ),
    "a reservation of no region": (
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west}]}",
        "cost.reservations batch.queues",
        "cost.reservations: cr-1: region 'us-west' is no AWS region",
        "such as us-west-2",
    ),
    "a reservation in a zone of another region": (
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west-2, zone: "
        "use1-az1}]}",
        "cost.reservations batch.queues",
        "cost.reservations: cr-1: zone 'use1-az1' is no zone id of us-west-2",
        "such as usw2-az1; aws ec2 describe-availability-zones lists them",
    ),
    "a reservation in no zone": (
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west-2, zone: "
        "us-west-2a}]}",
        "cost.reservations batch.queues",
        "cost.reservations: cr-1: zone 'us-west-2a' is no zone id of us-west-2",
        "such as usw2-az1; aws ec2 describe-availability-zones lists them",
    ),
    "a reservation that starts at no time": (
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west-2, start: "
        "'2026-12-01T11:30Z'}]}",
        "cost.reservations batch.queues",
        "cost.reservations: cr-1: start '2026-12-01T11:30Z' is no time in UTC",
        "such as 2026-12-01T11:30:00Z",
    ),
    "a reservation that ends at no time in UTC": (
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west-2, end: "
        "20261201T113000+0200}]}",
        "cost.reservations batch.queues",
        "cost.reservations: cr-1: end '20261201T113000+0200' is no time in UTC",
        "such as 2026-12-01T11:30:00Z",
    ),
    "a reservation that ends in month 13": (
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west-2, end: "
        "'2026-13-01T11:30:00Z'}]}",
        "cost.reservations batch.queues",
        "cost.reservations: cr-1: end '2026-13-01T11:30:00Z' is no time in UTC",
        "such as 2026-12-01T11:30:00Z",
    ),
    "a reservation that ends at its start": (
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west-2, start: "
        "'2026-12-01T11:30:00Z', end: '2026-12-01T11:30:00Z'}]}",
        "cost.reservations batch.queues",
        "cost.reservations: cr-1 ends at 2026-12-01T11:30:00Z, before its start at "
        "2026-12-01T11:30:00Z",
        "correct one of them",
    ),
    "a reservation twice": (
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west-2}, {id: "
        "cr-1, instance_type: p5.2xlarge, region: us-west-2}]}",
        "cost.reservations batch.queues",
        "cost.reservations names cr-1 2 times",
        "keep one of them",
    ),
    "a queue of a reservation among none": (
        "batch: {queues: [{name: a, market: on_demand, multi_node: true, reservation: cr-1}]}",
        "cost.reservations batch.queues",
        "batch.queues: a: reservation cr-1 is not in cost.reservations",
        "there are: none",
    ),
    "a queue of an unknown reservation": (
        "{batch: {queues: [{name: a, market: on_demand, multi_node: true, reservation: cr-1}]}, "
        "cost: {reservations: [{id: cr-2, instance_type: p5.48xlarge, region: us-west-2}, {id: "
        "cr-3, instance_type: p5.48xlarge, region: us-west-2}]}}",
        "cost.reservations batch.queues",
        "batch.queues: a: reservation cr-1 is not in cost.reservations",
        "there are: cr-2, cr-3",
    ),
    "a Spot queue of a reservation": (
        "{cluster: {nodes: 1}, batch: {queues: [{name: a, market: spot, reservation: cr-2}]}, "
        "cost: {reservations: [{id: cr-2, instance_type: p5.48xlarge, region: us-west-2}]}}",
        "cost.reservations batch.queues",
        "batch.queues: a is spot and has a reservation, which is never Spot",
        "set its market to on_demand",
    ),
    "queues of single nodes": (
        "batch: {queues: [{name: a, market: spot}, {name: b, market: on_demand}]}",
        "cluster.nodes batch.queues cluster.plan_for",
        "cluster.nodes 2: none of batch.queues (a: spot, b: on_demand) is multi_node",
        "set multi_node of an on-demand queue to true, or cluster.nodes to 1 or auto",
    ),
    "queues of another market": (
        "{cluster: {nodes: 1, market: on_demand}, batch: {queues: [{name: a, market: spot}, "
        "{name: b, market: spot}]}}",
        "cluster.market batch.queues cluster.plan_for",
        "cluster.market on_demand: none of batch.queues (a: spot, b: spot) is on_demand",
        "add a queue of market on_demand, or set cluster.market to auto",
    ),
    "a tag with an equals sign": (
        "batch: {tags: {team: a=b}}",
        "batch.tags",
        "batch.tags: team: 'a=b' has '=' in it: Metaflow hands tags on as NAME=VALUE and splits "
        "them at each '='",
        "use letters, digits, spaces and + - . _ : / @",
    ),
    "a tag of AWS": (
        "batch: {tags: {team: 'AWS:x'}}",
        "batch.tags",
        "batch.tags: team: 'AWS:x' begins with AWS:, which AWS keeps to itself",
        "use letters, digits, spaces and + - . _ : / @",
    ),
    "a tag with a character that AWS does not take": (
        "batch: {tags: {team: 'a;b!'}}",
        "batch.tags",
        "batch.tags: team: 'a;b!' has ';' in it, which AWS does not take",
        "use letters, digits, spaces and + - . _ : / @",
    ),
}

QUEUE_ARN = "arn:aws:batch:us-west-2:123456789012:job-queue/x"


def broken(text: str) -> list[Violation]:
    """The rules that a configuration written in YAML breaks."""
    return violations(RunConfig.model_validate(yaml.safe_load(text)))


@pytest.mark.parametrize("name", BREACHES)
def test_a_rule_about_names_shows_its_keys_message_and_hint(name: str) -> None:
    text, keys, message, hint = BREACHES[name]
    assert broken(text) == [Violation(keys=tuple(keys.split()), message=message, hint=hint)]


@pytest.mark.parametrize(
    "text",
    [
        "checkpoint: {signing_key_env: JOB_KEY}",
        "notifications: {webhook_env: SLACK_URL, smtp_password_env: PASSWORD}",
        "trackers: [{type: wandb, key_env: WANDB_KEY, url: 'https://host:5000/a@b'}, {type: "
        "mlflow, url: x}]",
        "trackers: [{type: tensorboard}, {type: jsonl}]",
        "notifications: {smtp_server: 'mail:12345', mail_from: a, mail_to: [b]}",
        "notifications: {smtp_server: mail, mail_from: a, mail_to: [b], smtp_user: me, "
        "smtp_password_env: PASSWORD}",
        "notifications: {smtp_user: me}",
        "checkpoint: {keep_best: {metric: held_out_loss}}",
        "checkpoint: {keep_best: {metric: held_out_bits_per_byte}}",
        "{workload: 'mine:Own', checkpoint: {keep_best: {metric: accuracy}}}",
        "training: {ema: 0.5}",
        "store: s3://bucket",
        "store: s3://bucket/prefix",
        "store: file:///folder",
        "store: c:/folder",
        "store: /folder",
        "{data: {path: texts, tokenizer: t.json}, training: {initial_weights: w.safetensors}}",
        "workload: 'package.module:Class'",
        "workload: 'module:Class'",
        "{script: train.py, script_args: [a]}",
        "{workload: 'mine:Own', workload_options: {width: 1}}",
        "cost: {regions: [us-east-1, us-west-2], zones: [use1-az1, usw2-az1, usw2-lax1-az1]}",
        "cost: {prices: live}",
        "cost: {prices: p.json}",
        "metrics: {push_url: 'https://host:1/path', address: '::1'}",
        "metrics: {push_url: 'http://host'}",
        "metrics: {address: 0.0.0.0}",
        f"batch: {{light_queue: '{QUEUE_ARN}', image: 'a:1', job_role: "
        "'arn:aws:iam::123456789012:role/x'}",
        "{cost: {store_region: us-gov-west-1}, batch: {region: eu-central-1}}",
        "batch: {queues: [{name: a, market: spot, region: us-west-2}], tags: {team: "
        "b}}\ncluster: {nodes: auto}",
        f"batch: {{queues: [{{name: '{QUEUE_ARN}', market: spot}}]}}\ncluster: {{nodes: 1}}",
        f"batch: {{queues: [{{name: '{QUEUE_ARN}', market: spot}}], region: "
        "us-west-2}\ncluster: {nodes: 1}",
        "batch: {queues: [{name: a, market: spot, region: us-west-2}, {name: b, market: spot}], "
        "region: us-east-1}\ncluster: {nodes: 1}\ncost: {store_region: us-east-1}",
        "batch: {queues: [{name: a, market: spot, region: us-west-2}, {name: b, market: spot}], "
        "region: us-west-2}\ncluster: {nodes: 1}",
        "batch: {queues: [{name: a, market: spot, instance_types: [g5, p4d.24xlarge, "
        "g6.]}]}\ncluster: {nodes: 1}",
        "batch: {queues: [{name: a, market: spot}, {name: b, market: on_demand, multi_node: "
        "true}]}",
        "batch: {queues: [{name: a, market: spot}]}\ncluster: {plan_for: kubernetes}",
        "batch: {queues: [{name: a, market: spot}]}\ncluster: {nodes: 1, market: spot}",
        "batch: {queues: [{name: a, market: spot}]}\ncluster: {nodes: 1, market: on_demand, "
        "plan_for: kubernetes}",
        "cluster: {market: spot, nodes: 1}",
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west-2, zone: "
        "usw2-az1}]}",
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west-2, "
        "start: '2026-12-01T11:30:00Z'}]}",
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west-2, "
        "end: '2026-12-01T11:30:00Z'}]}",
        "cost: {reservations: [{id: cr-1, instance_type: p5.48xlarge, region: us-west-2, start: "
        "'2026-12-01T11:30:00Z', end: '2026-12-01T11:30:01Z'}, {id: cr-2, instance_type: "
        "p5.48xlarge, region: us-west-2}]}\nbatch: {queues: [{name: a, market: on_demand, "
        "reservation: cr-2}, {name: b, market: spot}]}\ncluster: {nodes: 1}",
    ],
)
def test_rules_about_names_accept_what_is_right(text: str) -> None:
    assert broken(text) == []


@pytest.mark.parametrize(
    ("region", "prefix"),
    [
        ("us-east-1", "use1"),
        ("eu-central-1", "euc1"),
        ("ap-southeast-2", "apse2"),
        ("ap-northeast-3", "apne3"),
        ("ca-west-1", "caw1"),
        ("us-gov-west-1", "usgw1"),
        ("mx-central-1", "mxc1"),
        ("us-east-1a", None),
        ("us-east", None),
        ("useast", None),
    ],
)
def test_the_zone_prefix_of_a_region_has_the_first_letter_of_each_direction(
    region: str, prefix: str | None
) -> None:
    assert zone_prefix(region) == prefix


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({f"t{number}": "x" for number in range(50)}, None),
        (
            {f"t{number}": "x" for number in range(51)},
            "batch.tags has 51 tags, and AWS takes at most 50",
        ),
        ({"n" * 128: "v" * 256}, None),
        (
            {"n" * 129: "v"},
            f"batch.tags: {'n' * 40} is too long: AWS takes 128 characters of name and 256 of "
            "value",
        ),
        (
            {"team": "v" * 257},
            "batch.tags: team is too long: AWS takes 128 characters of name and 256 of value",
        ),
        ({"team": "a b+c-d.e_f:g/h@ü1"}, None),
        ({"team": "laws:x"}, None),
        ({"team": ""}, None),
    ],
)
def test_tags_are_limited_in_number_and_length(tags: dict[str, str], message: str | None) -> None:
    found = violations(RunConfig.model_validate({"batch": {"tags": tags}}))
    assert [violation.message for violation in found] == ([] if message is None else [message])


@pytest.mark.parametrize(("length", "accepted"), [(1, True), (128, True), (129, False)])
def test_a_queue_name_has_at_most_128_characters(length: int, accepted: bool) -> None:
    found = violations(RunConfig.model_validate({"batch": {"light_queue": "q" * length}}))
    assert (found == []) is accepted


@pytest.mark.parametrize("key", ["cluster.nodes", "batch.queues", "cluster.plan_for"])
def test_the_rule_about_queues_for_several_nodes_waits_for_each_key(key: str) -> None:
    values: dict[str, Any] = {"batch": {"queues": [{"name": "a", "market": "spot"}]}}
    config = RunConfig.model_validate(values)
    assert [violation.keys[0] for violation in violations(config)] == ["cluster.nodes"]
    assert violations(config, without=[key]) == []
