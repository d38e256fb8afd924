"""A Kubernetes cluster on one machine: the API server over HTTP, and controllers whose pods really
run.

It follows the published OpenAPI schemas (through `kubernetes-validate`), the JobSet and Kueue API
references and Karpenter's concepts. Pods are processes in PID, mount and host-name namespaces of
their own. It is no proof of how a cluster behaves.
"""
