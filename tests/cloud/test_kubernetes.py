"""Kubernetes without a cluster: the manifests are valid, and a placement becomes pods that say
where they belong.

Validated against the API's own schemas (kubernetes-validate). Of Karpenter, JobSet and the
Prometheus operator, whose schemas are not in there, the fields that are used here are written by
hand.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from ebbflow.core.config.load import load_config
from ebbflow.cost.capacity import Placement
from ebbflow.flows.attempts.order import SubmitOrder
from ebbflow.flows.attempts.pod_submission import PodSubmission
from ebbflow.flows.pods import node_selector, pod_markets, pod_memory_mib
from ebbflow.flows.remote import refusal_reason
from ebbflow.flows.supervising.options import read_options
from ebbflow.infra.aws.deploy import TEMPLATE, read_template
from ebbflow.infra.kubernetes.cluster import AttemptWatch, PodState
from ebbflow.infra.kubernetes.pod_shape import GPU_TAINT, TAINT
from ebbflow.observe.command import RULES
from tests.support.capacity import JobLog, batch_config, placed_now
from tests.support.kubernetes import schema

kubernetes_validate = pytest.importorskip("kubernetes_validate")
pytest.importorskip("kubernetes")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "ebbflow/infra" / "kubernetes"
EKS_ROLES = ROOT / "ebbflow/infra/aws/eks-roles.yaml"
VERSIONS = ("1.31", "1.34", "1.37")
OTHERS = {"karpenter.sh/v1": {"NodePool"}, "karpenter.k8s.aws/v1": {"EC2NodeClass"}}
OTHERS |= {"monitoring.coreos.com/v1": {"ServiceMonitor"}}
PLACEMENT = {
    "queue": "spot",
    "market": "spot",
    "instance_type": "g5.12xlarge",
    "region": "us-east-1",
    "zone": "use1-az1",
    "nodes": 2,
    "processes_per_node": 4,
    "cpu": 48,
    "gpu": 4,
    "memory_mib": 180000,
    "wall_seconds": 7200,
    "runnable_seconds": 60,
    "usd_per_hour": 0.4,
    "quoted_usd_per_hour": "0.4",
    "price_kind": "estimated",
    "expected_hours": 1.0,
    "expected_usd": 1.0,
    "reason": "",
}
PLACED = Placement.from_json(PLACEMENT)
SETTINGS: dict[str, Any] = {
    "store": "s3://bucket/prefix",
    "batch": {"image": "ebbflow:1", "shared_memory_mib": 4096},
    "metrics": {"port": 9400},
    "checkpoint": {"stop_seconds": 110.0},
}


def documents() -> list[tuple[str, dict[str, Any]]]:
    named = []
    for path in sorted(FOLDER.glob("*.yaml")):
        named += [(path.name, document) for document in yaml.safe_load_all(path.read_text())]
    return named


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [document for _, document in documents() if document["kind"] == kind]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_strictly(version: str) -> None:
    checked = [document for _, document in documents() if document["apiVersion"] not in OTHERS]
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)
    kinds = {checked_document["kind"] for checked_document in checked}
    assert kinds == {
        "Namespace",
        "ConfigMap",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "ClusterRole",
        "ClusterRoleBinding",
        "NetworkPolicy",
        "Job",
        "CronJob",
        "LimitRange",
        "Service",
    }
    broken = json.loads(json.dumps(of_kind("NetworkPolicy")[0]))
    broken["spec"]["ingres"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


# Fields of custom resources that the manifests use, with their types. All manifests were validated
# in 2026-11, unknown fields refused, against the published definitions of Karpenter 1.0 to 1.14
# (karpenter.sh/v1, karpenter.k8s.aws/v1) and of the Prometheus operator 0.70 to 0.93
# (monitoring.coreos.com/v1): look up there what you add here.
_TAINT = {"key": str, "value": str, "effect": str}
_LABELS = {"*": str}
_TAGS = [{"tags": {"*": str}}]
_NODE = {
    "nodeClassRef": {"group": str, "kind": str, "name": str},
    "taints": [_TAINT],
    "requirements": [{"key": str, "operator": str, "values": [str]}],
    "expireAfter": str,
    "terminationGracePeriod": str,
}
FIELDS: dict[str, Any] = {
    "NodePool": {
        "template": {"metadata": {"labels": _LABELS}, "spec": _NODE},
        "disruption": {"consolidationPolicy": str, "consolidateAfter": str},
        "limits": {"*": str},
    },
    "EC2NodeClass": {
        "role": str,
        "amiSelectorTerms": [{"alias": str}],
        "subnetSelectorTerms": _TAGS,
        "securityGroupSelectorTerms": _TAGS,
        "tags": _LABELS,
        "kubelet": {"maxPods": int},
        "metadataOptions": {"httpEndpoint": str, "httpTokens": str, "httpPutResponseHopLimit": int},
        "blockDeviceMappings": [
            {
                "deviceName": str,
                "ebs": {
                    "volumeSize": str,
                    "volumeType": str,
                    "encrypted": bool,
                    "deleteOnTermination": bool,
                },
            }
        ],
    },
    "ServiceMonitor": {
        "selector": {"matchLabels": _LABELS},
        "podTargetLabels": [str],
        "jobLabel": str,
        "endpoints": [{"port": str, "interval": str, "path": str, "honorLabels": bool}],
    },
}


def unknown_fields(value: Any, known: Any, path: str = "spec") -> list[str]:
    if isinstance(known, type):
        if type(value) is known:
            return []
        return [f"{path}: {value!r}"]
    if type(value) is not type(known):
        return [f"{path}: {value!r}"]
    if isinstance(known, list):
        fields = []
        for at, element in enumerate(value):
            fields += unknown_fields(element, known[0], f"{path}[{at}]")
        return fields
    kinds = {name: known.get(name, known.get("*")) for name in value}
    return [
        unknown
        for name, kind in kinds.items()
        for unknown in (
            [f"{path}.{name}"]
            if kind is None
            else unknown_fields(value[name], kind, f"{path}.{name}")
        )
    ]


def test_custom_resources_have_only_fields_of_their_published_definitions() -> None:
    found = [document for _, document in documents() if document["apiVersion"] in OTHERS]
    assert {document["kind"] for document in found} == set(FIELDS)
    for document in found:
        assert document["kind"] in OTHERS[document["apiVersion"]] and set(document) == {
            "apiVersion",
            "kind",
            "metadata",
            "spec",
        }
        assert unknown_fields(document["spec"], FIELDS[document["kind"]]) == []
    wrong = {**of_kind("ServiceMonitor")[0]["spec"], "endpoint": [], "podTargetLabels": [5]}
    assert unknown_fields(wrong, FIELDS["ServiceMonitor"]) == [
        "spec.podTargetLabels[0]: 5",
        "spec.endpoint",
    ]


def test_scraped_pods_keep_their_job_and_the_target_has_the_label_that_the_rules_select() -> None:
    monitor = of_kind("ServiceMonitor")[0]["spec"]
    services = [service["metadata"]["labels"] for service in of_kind("Service")]
    [labels] = [
        service
        for service in services
        if service.items() >= monitor["selector"]["matchLabels"].items()
    ]
    assert [endpoint["honorLabels"] for endpoint in monitor["endpoints"]] == [True]
    assert f'up{{job="{labels[monitor["jobLabel"]]}"}}' in RULES.read_text()


def test_node_pools_make_nodes_that_pods_of_a_placement_select() -> None:
    [node_class] = of_kind("EC2NodeClass")
    pod_markets = set()
    for pool in of_kind("NodePool"):
        spec = pool["spec"]["template"]["spec"]
        assert spec["nodeClassRef"] == {
            "group": "karpenter.k8s.aws",
            "kind": "EC2NodeClass",
            "name": node_class["metadata"]["name"],
        }
        taints = [taint["key"] for taint in spec["taints"]]
        assert taints == [GPU_TAINT], "what the NVIDIA plugin's chart tolerates, and no more"
        labels = pool["spec"]["template"]["metadata"]["labels"]
        assert labels["nvidia.com/gpu.present"] == "true", "what it selects without NFD"
        wanted = {requirement["key"]: requirement["values"] for requirement in spec["requirements"]}
        assert all(requirement["operator"] == "In" for requirement in spec["requirements"])
        assert len(wanted["topology.kubernetes.io/zone"]) == 1, "a gang never spans zones"
        assert pool["spec"]["disruption"]["consolidationPolicy"] in (
            "WhenEmpty",
            "WhenEmptyOrUnderutilized",
        )
        pod_markets |= set(wanted["karpenter.sh/capacity-type"])
    chosen = [node_selector(replace(PLACED, market=market)) for market in ("spot", "on_demand")]
    placed = {selector["karpenter.sh/capacity-type"] for selector in chosen}
    assert pod_markets == placed == {"spot", "on-demand"}
    assert node_class["spec"]["metadataOptions"]["httpPutResponseHopLimit"] == 2
    assert node_class["spec"]["metadataOptions"]["httpTokens"] == "required"


def test_prometheus_finds_the_training_pods_where_the_network_policy_lets_it() -> None:
    [service] = of_kind("Service")
    [monitor] = of_kind("ServiceMonitor")
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    [endpoint] = monitor["spec"]["endpoints"]
    [port] = service["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    [policy] = [
        policy
        for policy in of_kind("NetworkPolicy")
        if policy["metadata"]["name"] == "ebbflow-training"
    ]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"]
    ports = []
    for rule in policy["spec"]["ingress"]:
        ports += [port["port"] for port in rule.get("ports", [])]
    assert port["port"] in ports


def test_training_pods_ask_the_api_for_nothing_and_the_head_for_what_metaflow_calls() -> None:
    accounts = {account["metadata"]["name"]: account for account in of_kind("ServiceAccount")}
    assert accounts["ebbflow-job"]["automountServiceAccountToken"] is False
    [binding] = of_kind("RoleBinding")
    [role] = of_kind("Role")
    assert [subject["name"] for subject in binding["subjects"]] == ["ebbflow-head"]
    resources = set()
    for rule in role["rules"]:
        resources |= set(rule["resources"])
    assert resources == {
        "jobs",
        "jobs/status",
        "jobsets",
        "jobsets/status",
        "pods",
        "pods/eviction",
        "localqueues",
        "events",
        "localqueues/pendingworkloads",
    }
    [nodes] = of_kind("ClusterRole")
    assert nodes["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]
    assert not any("*" in rule["verbs"] + rule["resources"] for rule in role["rules"])


def test_tasks_reach_the_metadata_service_that_the_supervisor_names() -> None:
    policies = of_kind("NetworkPolicy")
    assert [network_policy["metadata"]["name"] for network_policy in policies] == [
        "ebbflow-training",
        "ebbflow-head",
    ]
    [supervisor] = [
        job for job in of_kind("Job") if job["metadata"]["name"] == "ebbflow-supervisor"
    ]
    [container] = supervisor["spec"]["template"]["spec"]["containers"]
    [settings] = of_kind("ConfigMap")
    assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    address = urlsplit(settings["data"]["METAFLOW_SERVICE_URL"])
    namespace = {
        "namespaceSelector": {
            "matchLabels": {"kubernetes.io/metadata.name": address.hostname.split(".")[1]}
        }
    }
    ports = {"protocol": "TCP", "port": address.port}
    for policy in policies:
        assert [
            rule
            for rule in policy["spec"]["egress"]
            if namespace in rule["to"] and ports in rule["ports"]
        ]
    command = container["command"]
    assert command[command.index("--set") + 1] == "cluster.plan_for=kubernetes", (
        "the file names another"
    )


def test_the_supervisors_settings_send_its_pods_to_the_store_with_an_image_and_a_region(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [settings] = of_kind("ConfigMap")
    for name, value in settings["data"].items():
        monkeypatch.setenv(name, value.replace("BUCKET", "bucket").replace("REGION", "us-east-1"))
    config = load_config(
        ROOT / "ebbflow/configs/aws.yaml", ["cluster.plan_for=kubernetes"], project_root=ROOT
    ).config
    assert config.store == "s3://bucket/ebbflow"
    assert refusal_reason(config, "kubernetes", ["--with", "kubernetes"]) is None
    accounts = {account["metadata"]["name"] for account in of_kind("ServiceAccount")}
    assert settings["data"]["METAFLOW_KUBERNETES_SERVICE_ACCOUNT"] in accounts
    assert settings["data"]["AWS_DEFAULT_REGION"]


def test_each_service_account_has_an_aws_role_that_its_pods_may_assume() -> None:
    template = read_template(EKS_ROLES.read_text())
    resources = template["Resources"].values()
    associations = [
        resource["Properties"]
        for resource in resources
        if resource["Type"] == "AWS::EKS::PodIdentityAssociation"
    ]
    names = {association["ServiceAccount"] for association in associations}
    assert names == {account["metadata"]["name"] for account in of_kind("ServiceAccount")}
    roles = [
        resource["Properties"]["AssumeRolePolicyDocument"]["Statement"]
        for resource in resources
        if resource["Type"] == "AWS::IAM::Role"
    ]
    assert len(roles) == len(names)
    for [statement] in roles:
        assert statement["Principal"] == {"Service": "pods.eks.amazonaws.com"}
        assert statement["Action"] == ["sts:AssumeRole", "sts:TagSession"]
    batch = json.dumps(read_template(TEMPLATE.read_text())["Resources"]["StepAccess"])
    for statement in template["Resources"]["BucketAccess"]["Properties"]["PolicyDocument"][
        "Statement"
    ]:
        assert all(f'"{action}"' in batch for action in statement["Action"]), "no more than there"


@pytest.mark.parametrize(("address", "port"), [("169.254.170.23/32", 80), ("169.254.20.10/32", 53)])
def test_pods_reach_pod_identity_and_nodelocal_dns(address: str, port: int) -> None:
    for policy in of_kind("NetworkPolicy"):
        [ports] = [
            [entry["port"] for entry in rule["ports"]]
            for rule in policy["spec"]["egress"]
            if {"ipBlock": {"cidr": address}} in rule["to"]
        ]
        assert set(ports) == {port}


def test_a_schedule_starts_what_the_supervisor_starts_under_a_name_of_each_execution() -> None:
    [scheduled] = of_kind("CronJob")
    [once] = of_kind("Job")
    job = json.loads(json.dumps(scheduled["spec"]["jobTemplate"]["spec"]))
    [container] = job["template"]["spec"]["containers"]
    execution = container["env"].pop(0)
    assert (
        execution["valueFrom"]["fieldRef"]["fieldPath"]
        == "metadata.labels['batch.kubernetes.io/job-name']"
    )
    words = [word.replace("$(EXECUTION)", "NAME") for word in container["command"]]
    container["command"] = words
    assert job == once["spec"] and execution["name"] == "EXECUTION"
    options = read_options(words[2:], project_root=ROOT)
    assert (options.job, options.config.cluster.plan_for) == ("NAME", "kubernetes")


def test_the_supervisor_has_no_rights_on_its_node_and_nothing_reaches_it() -> None:
    [supervisor] = of_kind("Job")
    pod = supervisor["spec"]["template"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    user = pod["spec"]["securityContext"]["runAsUser"]
    assert (
        f"--uid {user} ebbflow" in (ROOT / "ebbflow/infra" / "docker" / "Dockerfile").read_text()
    ), "the image's own user"
    [container] = pod["spec"]["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container["volumeMounts"]}
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    for name in ("HOME", "EBBFLOW_RUNS", "METAFLOW_DATASTORE_SYSROOT_LOCAL"):
        assert any(Path(environment[name]).is_relative_to(folder) for folder in writable), name
    [policy] = [
        policy
        for policy in of_kind("NetworkPolicy")
        if policy["metadata"]["name"] == "ebbflow-head"
    ]
    assert policy["spec"]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert "Ingress" in policy["spec"]["policyTypes"] and "ingress" not in policy["spec"]


def test_the_zone_is_selected_by_its_id_or_by_its_name_and_only_where_it_is_known() -> None:
    assert node_selector(PLACED)["topology.k8s.aws/zone-id"] == "use1-az1"
    named = node_selector(replace(PLACED, zone="us-east-1a"))
    assert (
        named["topology.kubernetes.io/zone"] == "us-east-1a"
        and "topology.k8s.aws/zone-id" not in named
    )
    assert set(node_selector(replace(PLACED, zone=None))) == {
        "karpenter.sh/capacity-type",
        "node.kubernetes.io/instance-type",
    }


def test_a_cluster_takes_several_nodes_on_spot_which_batch_does_not() -> None:
    config = batch_config(
        "cluster.nodes=2", "cluster.plan_for=kubernetes", "training.max_steps=20000"
    )
    found = placed_now(config, JobLog(), 0.0, where=pod_markets())
    assert (found.market, found.nodes, found.queue) == ("spot", 2, "spot")
    assert placed_now(config, JobLog(), 0.0).market == "on_demand", "in AWS Batch"
    assert config.changed("cluster", nodes=3).cluster.nodes == 3 and config.cluster.nodes == 2


def rendered(
    tmp_path: Path, *, efa: int = 0, **changes: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options, manifest) as Metaflow renders them for a placement."""
    settings = {**SETTINGS, "batch": {**SETTINGS["batch"], "efa_interfaces": efa}}
    config = tmp_path / "kubeconfig"
    cluster = {"name": "none", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "none", "context": {"cluster": "none", "user": "none"}}
    user = {"name": "none", "user": {}}
    config.write_text(
        json.dumps(
            {
                "clusters": [cluster],
                "contexts": [context],
                "users": [user],
                "current-context": "none",
            }
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.pod_manifest"],
        input=json.dumps({"placement": {**PLACEMENT, **changes}, "settings": settings}),
        cwd=ROOT,
        env={**os.environ, "KUBECONFIG": str(config), "METAFLOW_USER": "tester"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["options"], answer["manifest"]


def assert_placed(pod: dict[str, Any], annotations: dict[str, str]) -> None:
    assert pod["nodeSelector"] == node_selector(PLACED)
    assert {toleration["key"] for toleration in pod["tolerations"]} == {TAINT, GPU_TAINT}
    assert pod["terminationGracePeriodSeconds"] == 110, (
        "the time that a last save has, which Metaflow sets to 0"
    )
    [shared] = [volume for volume in pod["volumes"] if volume["name"] == "dhsm"]
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "4096Mi"}
    [container] = pod["containers"]
    assert (
        "trap" in container["command"][2] and "train_flow.py step train" in container["command"][-1]
    )
    requests = container["resources"]["requests"]
    assert requests["cpu"] == "47" and requests["memory"] == f"{pod_memory_mib(180000)}M"
    assert pod["activeDeadlineSeconds"] == PLACEMENT["wall_seconds"]
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"
    assert annotations["prometheus.io/port"] == "9400"


@pytest.fixture(scope="module")
def manifests(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """By the number of nodes."""
    return {nodes: rendered(tmp_path_factory.mktemp("manifest"), nodes=nodes) for nodes in (1, 2)}


def test_several_spot_nodes_become_a_jobset_with_labelled_pods(
    manifests: dict[int, Any],
) -> None:
    manifest = json.loads(json.dumps(manifests[2][1]))
    assert manifest["kind"] == "JobSet"
    order = SubmitOrder(
        job="job",
        run="1",
        step="train",
        task="5",
        attempt=0,
        store="s3://bucket/prefix",
        node_replacements=1,
        kueue="team",
    )
    PodSubmission(order)._complete(manifest, "jobsets")
    schema.check(manifest)
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert manifest["spec"]["startupPolicy"]["startupPolicyOrder"] == "AnyOrder", (
        "all machines boot at once"
    )
    assert {
        replicated_job["template"]["spec"]["podReplacementPolicy"]
        for replicated_job in manifest["spec"]["replicatedJobs"]
    } == {"Failed"}
    assert [
        replicated_job["template"]["spec"]["backoffLimit"]
        for replicated_job in manifest["spec"]["replicatedJobs"]
    ] == [0, 1]
    replicated = {
        replicated_job["name"]: replicated_job
        for replicated_job in manifest["spec"]["replicatedJobs"]
    }
    assert {name: replicated_job["replicas"] for name, replicated_job in replicated.items()} == {
        "control": 1,
        "worker": 1,
    }
    for replicated_job in replicated.values():
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "x"},
            "spec": replicated_job["template"]["spec"],
        }
        for version in VERSIONS:
            kubernetes_validate.validate(job, version, strict=True)
        template = replicated_job["template"]["spec"]["template"]
        assert template["metadata"]["labels"]["ebbflow/training"] == "true"
        assert_placed(template["spec"], template["metadata"]["annotations"])


def test_one_node_is_a_plain_job(manifests: dict[int, Any]) -> None:
    options, manifest = manifests[1]
    assert options["num-parallel"] is None, "Metaflow refuses a JobSet of one"
    assert manifest["kind"] == "Job"
    kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    template = manifest["spec"]["template"]
    assert_placed(template["spec"], template["metadata"]["annotations"])


@pytest.mark.parametrize(
    ("kind", "nodes", "devices"),
    [
        ("p4d.24xlarge", 2, "4"),
        ("g5.48xlarge", 2, "1"),
        ("g5.xlarge", 2, None),
        ("p4d.24xlarge", 1, None),
    ],
)
def test_pods_of_a_gang_ask_for_the_fabric_adapters_of_their_type(
    tmp_path: Path, kind: str, nodes: int, devices: str | None
) -> None:
    """Pinned memory needs IPC_LOCK then.

    Without a gang, or without adapters, nothing is asked for.
    """
    _, manifest = rendered(tmp_path, efa=32, instance_type=kind, nodes=nodes)
    jobs = [
        replicated_job["template"]["spec"]
        for replicated_job in manifest["spec"].get("replicatedJobs", [])
    ] or [manifest["spec"]]
    assert len(jobs) == nodes
    for job in jobs:
        [container] = job["template"]["spec"]["containers"]
        resources = container["resources"]
        assert resources["limits"].get("vpc.amazonaws.com/efa") == devices
        assert resources["requests"].get("vpc.amazonaws.com/efa") in (None, devices)
        assert container["securityContext"]["capabilities"].get("add") == (
            ["IPC_LOCK"] if devices else None
        )


def violations(pod: dict[str, Any], *, shipped: bool) -> set[str]:
    """Rules of the restricted pod security profile, and some of checkov's, that a pod's
    specification does not keep.

    Of a training pod the image names the user, Metaflow writes into the working directory, and
    limits are left out.
    """
    [container] = pod["containers"]
    security = {**(pod.get("securityContext") or {}), **(container.get("securityContext") or {})}
    capabilities = security.get("capabilities") or {}
    resources = container["resources"]
    kept = {
        "no host namespaces": not {"hostNetwork", "hostPID", "hostIPC"} & set(pod),
        "no host paths": not any("hostPath" in volume for volume in pod.get("volumes") or []),
        "no privileges": not security.get("privileged")
        and security.get("allowPrivilegeEscalation") is False,
        "no capabilities": capabilities.get("drop") == ["ALL"]
        and set(capabilities.get("add") or []) <= {"IPC_LOCK"},
        "seccomp": (security.get("seccompProfile") or {}).get("type") == "RuntimeDefault",
        "requests": {"cpu", "memory"} <= set(resources["requests"]),
        "no restart": pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] > 30,
        "a tag": ":" in container["image"] and not container["image"].endswith(":latest"),
    }
    if shipped:
        user = security.get("runAsUser") or 0
        kept |= {
            "not root": security.get("runAsNonRoot") is True and user >= 10000,
            "read-only root": security.get("readOnlyRootFilesystem") is True,
            "limits": {"cpu", "memory"} <= set(resources.get("limits") or {}),
        }
    else:
        kept["no token"] = pod.get("automountServiceAccountToken") is False
    return {rule for rule, holds in kept.items() if not holds}


def test_shipped_and_generated_pods_keep_the_policies(manifests: dict[int, Any]) -> None:
    shipped = [job["spec"]["template"]["spec"] for job in of_kind("Job")]
    shipped += [
        cron_job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        for cron_job in of_kind("CronJob")
    ]
    generated = [manifests[1][1]["spec"]["template"]["spec"]]
    generated += [
        manifest["template"]["spec"]["template"]["spec"]
        for manifest in manifests[2][1]["spec"]["replicatedJobs"]
    ]
    assert len(shipped) == 2 and len(generated) == 3
    assert [violations(pod, shipped=True) for pod in shipped] == [set()] * 2
    assert [violations(pod, shipped=False) for pod in generated] == [set()] * 3
    assert violations(generated[0], shipped=True) == {"not root", "read-only root", "limits"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_submitter_ends_its_pods_when_it_is_asked_to_leave(
    number: signal.Signals, tmp_path: Path
) -> None:
    """As Metaflow does: in a handler of `atexit`, here a slow one that is interrupted again."""
    program = """
import atexit, os, pathlib, signal, sys, time
from ebbflow.core.process import exit_when_interrupted
exit_when_interrupted()
from ebbflow.flows import launcher
from ebbflow.flows.command_line import CommandLine
launcher._install_handlers(CommandLine.parse(["train_flow.py", "kubernetes", "step"]))
def end_pods():
    for again in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), again)
    pathlib.Path(sys.argv[1]).write_text("ended")
atexit.register(end_pods)
print("submitted", flush=True)
while True:
    time.sleep(0.1)  # one long sleep would not end if the signal came just before it
"""
    command = [sys.executable, "-c", program, str(tmp_path / "pods")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "submitted\n"
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "pods").read_text() == "ended"


@pytest.mark.parametrize(
    ("worker", "cause"),
    [
        ({"ended": 70.0, "exit_code": 1}, "user_code"),
        ({"ended": 70.0}, "unknown"),  # its node may be lost: the cluster tells so minutes later
        ({"ended": 70.0, "lost": True}, "reclaimed"),
        ({}, "unknown"),
    ],
)
def test_a_gang_fails_by_its_code_only_if_every_container_has_an_exit_code(
    worker: dict[str, Any], cause: str
) -> None:
    watch = AttemptWatch("ebbflow/jobsets/js-1", 2)
    told = [{"ended": 69.0, "exit_code": 1}, worker]
    for node, values in enumerate(told):
        name = f"pod-{node}"
        watch.pods[name] = PodState(
            name=name,
            node=node,
            machine=f"node-{node}",
            phase="Running",
            created=0.0,
            started=9.0,
            **values,
        )
    watch.failed = True
    assert watch.attempt(now=80.0).cause == cause
    assert watch.over == ("ended" in worker)


@pytest.mark.parametrize(
    ("roll_call_seconds", "late", "cause"),
    [
        (60.0, None, "never_started"),
        (61.0, None, "user_code"),
        (60.0, 70.0, "never_started"),
        (60.0, 12.0, "user_code"),
    ],
)
def test_a_gang_that_got_no_machine_does_not_fail_by_its_code(
    roll_call_seconds: float, late: float | None, cause: str
) -> None:
    """late: when node 1's pod started, after 69 on the machine that node 0 left."""
    watch = AttemptWatch("ebbflow/jobsets/js-1", 2, roll_call_seconds)
    common: dict[str, Any] = {"machine": "node", "phase": "Failed", "created": 0.0}
    watch.pods["a"] = PodState(name="a", node=0, started=9.0, ended=69.0, exit_code=1, **common)
    watch.pods["b"] = PodState(
        name="b",
        node=1,
        started=late,
        ended=71.0,
        exit_code=None if late is None else 143,
        waiting="Unschedulable: 0/1 nodes are available",
        **common,
    )
    watch.failed = True
    attempt = watch.attempt(now=80.0)
    assert attempt.cause == cause
    assert late or attempt.node_times == ((9.0, 69.0), (None, None))
    assert attempt.reason == "a: exit code 1; b: Unschedulable: 0/1 nodes are available"
