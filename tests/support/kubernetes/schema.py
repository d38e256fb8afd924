"""What the API server refuses: fields and values that the published schemas do not have.

Core kinds are held against Kubernetes' own OpenAPI; JobSet (v1alpha2) and Kueue by the schemas
written here from their API references. A custom resource prunes unknown fields or refuses them
("strict decoding"); here they are refused.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import jsonschema.exceptions
import kubernetes_validate

VERSION = "1.34"
_CORE = {"Pod", "Job", "Node", "Namespace", "Service", "ServiceAccount", "ConfigMap", "Event"}

_TEXT = {"type": "string"}
_INT = {"type": "integer", "minimum": 0}
_FLAG = {"type": "boolean"}
_TEXTS = {"type": "array", "items": _TEXT}
_MAP = {"type": "object", "additionalProperties": _TEXT}


class Invalid(Exception):
    """Refused with 422, or 400 for an unknown field."""


def jobset_schema() -> dict[str, Any]:
    """Of a JobSet: config/components/crd of kubernetes-sigs/jobset, compared with v0.8 to v0.12 and
    main of 2026-08.
    """
    rule = _closed(
        ["name", "action"],
        name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        action={
            "enum": [
                "FailJobSet",
                "RestartJobSet",
                "RestartJobSetAndIgnoreMaxRestarts",  # RestartJob: an alpha feature, off
            ]
        },
        onJobFailureReasons=_TEXTS,
        onJobFailureMessagePatterns=_TEXTS,
        targetReplicatedJobs=_TEXTS,
    )
    policy = _closed(
        maxRestarts=_INT,
        restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
        rules={"type": "array", "items": rule},
    )
    replicated = _closed(
        ["name", "template"],
        name=_TEXT,
        groupName=_TEXT,
        replicas=_INT,
        template={"type": "object"},
        dependsOn={"type": "array"},
    )
    spec = _closed(
        replicatedJobs={"type": "array", "items": replicated},
        network=_null_or(
            _closed(enableDNSHostnames=_FLAG, subdomain=_TEXT, publishNotReadyAddresses=_FLAG)
        ),
        successPolicy=_null_or(
            _closed(["operator"], operator={"enum": ["All", "Any"]}, targetReplicatedJobs=_TEXTS)
        ),
        failurePolicy=_null_or(policy),
        startupPolicy=_null_or(
            _closed(["startupPolicyOrder"], startupPolicyOrder={"enum": ["InOrder", "AnyOrder"]})
        ),
        suspend=_FLAG,
        managedBy=_TEXT,
        ttlSecondsAfterFinished=_INT,
        coordinator={"type": "object"},
    )
    return _closed(
        ["apiVersion", "kind"],
        apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
        kind={"const": "JobSet"},
        metadata=_METADATA,
        spec=spec,
        status=_null_or({"type": "object"}),
    )


def check(document: dict[str, Any]) -> None:
    """Raises Invalid."""
    kind = document.get("kind")
    if kind == "JobSet":
        _hold(document, jobset_schema())
        for replicated_job in document["spec"].get("replicatedJobs") or []:
            _core(
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "metadata": {"name": "x"},
                    "spec": replicated_job["template"]["spec"],
                }
            )
    elif kind in _CORE:
        _core(document)


def _closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required or [],
        "additionalProperties": False,
    }


def _null_or(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "null"}, schema]}


_METADATA = _closed(
    name=_TEXT,
    generateName=_TEXT,
    namespace=_TEXT,
    labels=_null_or(_MAP),
    annotations=_null_or(_MAP),
    uid=_TEXT,
    resourceVersion=_TEXT,
    generation=_INT,
    creationTimestamp=_null_or(_TEXT),
    deletionTimestamp=_TEXT,
    deletionGracePeriodSeconds=_INT,
    finalizers=_TEXTS,
    managedFields={"type": "array"},
    ownerReferences={"type": "array"},
)


def _hold(document: dict[str, Any], schema: dict[str, Any]) -> None:
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(document)
    )
    if error is not None:
        raise Invalid(
            f"{'.'.join(map(str, error.absolute_path)) or 'object'}: {error.message[:300]}"
        )


def _core(document: dict[str, Any]) -> None:
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Invalid(
            f"{'.'.join(map(str, error.path)) or 'object'}: {error.message[:300]}"
        ) from None
