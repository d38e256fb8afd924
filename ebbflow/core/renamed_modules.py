"""Old import paths of modules that have moved; they work for one more release, with a warning."""

import importlib
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

# Packages stand for what is in them; the longest prefix decides.
RENAMED = {
    "ebbflow.compare": "ebbflow.tryout.compare",
    "ebbflow.cost.allocation": "ebbflow.cost.finance.allocation",
    "ebbflow.cost.bill": "ebbflow.cost.finance.bill",
    "ebbflow.cost.bill_matching": "ebbflow.cost.finance.bill_matching",
    "ebbflow.cost.focus": "ebbflow.cost.finance.focus",
    "ebbflow.cost.reconcile": "ebbflow.cost.finance.reconcile",
    "ebbflow.cost.replay": "ebbflow.cost.finance.replay",
    "ebbflow.cost.team": "ebbflow.cost.finance.team",
    "ebbflow.cost.watch": "ebbflow.observe.watch",
    "ebbflow.doctor": "ebbflow.tryout.doctor",
    "ebbflow.infra.bundle": "ebbflow.diagnose.bundle",
    "ebbflow.infra.config": "ebbflow.core.config",
    "ebbflow.infra.diagnose": "ebbflow.diagnose",
    "ebbflow.infra.errors": "ebbflow.core.errors",
    "ebbflow.infra.event_log": "ebbflow.core.event_log",
    "ebbflow.infra.events": "ebbflow.core.events",
    "ebbflow.infra.footprint": "ebbflow.core.footprint",
    "ebbflow.infra.grouping": "ebbflow.core.grouping",
    "ebbflow.infra.keeper": "ebbflow.core.keeper",
    "ebbflow.infra.launchers": "ebbflow.core.launchers",
    "ebbflow.infra.layout": "ebbflow.core.layout",
    "ebbflow.infra.metrics": "ebbflow.core.metrics",
    "ebbflow.infra.multipart": "ebbflow.core.store.multipart",
    "ebbflow.infra.observe": "ebbflow.observe",
    "ebbflow.infra.observe.tracking_process": "ebbflow.core.observer_process",
    "ebbflow.infra.preflight": "ebbflow.core.preflight",
    "ebbflow.infra.process": "ebbflow.core.process",
    "ebbflow.infra.program": "ebbflow.core.program",
    "ebbflow.infra.ranges": "ebbflow.core.store.ranges",
    "ebbflow.infra.rank_logs": "ebbflow.core.rank_logs",
    "ebbflow.infra.reliability": "ebbflow.core.reliability",
    "ebbflow.infra.requirements": "ebbflow.core.requirements",
    "ebbflow.infra.retry": "ebbflow.core.retry",
    "ebbflow.infra.script_folder": "ebbflow.training.attach.script_folder",
    "ebbflow.infra.segments": "ebbflow.core.segments",
    "ebbflow.infra.signing_key": "ebbflow.core.signing_key",
    "ebbflow.infra.store": "ebbflow.core.store",
    "ebbflow.infra.terms": "ebbflow.core.terms",
    "ebbflow.infra.untrusted_text": "ebbflow.core.untrusted_text",
    "ebbflow.integrations.float8": "ebbflow.training.engine.float8",
    "ebbflow.integrations.inductor": "ebbflow.training.engine.inductor",
    "ebbflow.integrations.skypilot": "ebbflow.flows.skypilot",
    "ebbflow.script_copy": "ebbflow.tryout.script_copy",
    "ebbflow.script_tracer": "ebbflow.tryout.script_tracer",
    "ebbflow.tracking": "ebbflow.observe",
    "ebbflow.tracking.profiler": "ebbflow.training.engine.profiler",
    "ebbflow.training.attached_folder": "ebbflow.training.attach.folder",
    "ebbflow.training.attached_guards": "ebbflow.training.attach.guards",
    "ebbflow.training.attached_job": "ebbflow.training.attach.job",
    "ebbflow.training.attached_state": "ebbflow.training.attach.state",
    "ebbflow.training.certify": "ebbflow.tryout.certify",
    "ebbflow.training.guards": "ebbflow.training.engine.guards",
    "ebbflow.training.optimizer": "ebbflow.training.engine.optimizer",
    "ebbflow.training.parallel": "ebbflow.training.engine.parallel",
    "ebbflow.training.parallel_limits": "ebbflow.training.engine.parallel_limits",
    "ebbflow.training.script": "ebbflow.training.attach.script",
    "ebbflow.training.standalone": "ebbflow.training.attach.standalone",
    "ebbflow.training.tensor_parallel": "ebbflow.training.engine.tensor_parallel",
    "ebbflow.training.trainer": "ebbflow.training.engine.trainer",
    "ebbflow.training.trainer_setup": "ebbflow.training.engine.trainer_setup",
    "ebbflow.training.workloads": "ebbflow.workloads",
    "ebbflow.training.workloads.examine": "ebbflow.tryout.examine",
    "ebbflow.training.workloads.language_model": "ebbflow.workloads.language.language_model",
    "ebbflow.training.workloads.loader": "ebbflow.training.workload_loader",
    "ebbflow.training.workloads.trial": "ebbflow.tryout.trial",
    "ebbflow.workloads.chat_data": "ebbflow.workloads.language.chat_data",
    "ebbflow.workloads.datasets": "ebbflow.workloads.readers.datasets",
    "ebbflow.workloads.diffusion": "ebbflow.workloads.points.diffusion",
    "ebbflow.workloads.documents": "ebbflow.workloads.language.language_model",
    "ebbflow.workloads.hugging_face": "ebbflow.workloads.language.hugging_face",
    "ebbflow.workloads.loader_processes": "ebbflow.workloads.readers.loader_processes",
    "ebbflow.workloads.model_folder": "ebbflow.workloads.language.model_folder",
    "ebbflow.workloads.multiple_choice": "ebbflow.workloads.language.multiple_choice",
    "ebbflow.workloads.offloaded_adam": "ebbflow.workloads.language.offloaded_adam",
    "ebbflow.workloads.point_clouds": "ebbflow.workloads.points.point_clouds",
    "ebbflow.workloads.point_data": "ebbflow.workloads.points.point_data",
    "ebbflow.workloads.point_metrics": "ebbflow.workloads.points.point_metrics",
    "ebbflow.workloads.point_model": "ebbflow.workloads.points.point_model",
    "ebbflow.workloads.policy_folder": "ebbflow.workloads.policy.policy_folder",
    "ebbflow.workloads.policy_math": "ebbflow.workloads.policy.policy_math",
    "ebbflow.workloads.policy_model": "ebbflow.workloads.policy.policy_model",
    "ebbflow.workloads.policy_optimization": "ebbflow.workloads.policy.policy_optimization",
    "ebbflow.workloads.policy_options": "ebbflow.workloads.policy.policy_options",
    "ebbflow.workloads.policy_prompts": "ebbflow.workloads.policy.policy_prompts",
    "ebbflow.workloads.policy_rewards": "ebbflow.workloads.policy.policy_rewards",
    "ebbflow.workloads.policy_rollouts": "ebbflow.workloads.policy.policy_rollouts",
    "ebbflow.workloads.reward_model": "ebbflow.workloads.language.reward_model",
    "ebbflow.workloads.rows": "ebbflow.workloads.readers.rows",
    "ebbflow.workloads.sandbox": "ebbflow.workloads.policy.sandbox",
    "ebbflow.workloads.timm_models": "ebbflow.workloads.vision.timm_models",
    "ebbflow.workloads.vllm_engine": "ebbflow.workloads.policy.vllm_engine",
}


class RenamedModules:
    """Import hook that finds and loads moved modules under their old names.

    Both names give the same module object, so that a class has one identity. It comes before
    Python's own finders: those would find `ebbflow.infra.store.folder` in the moved package
    `ebbflow.infra.store` and load it a second time.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - Python passes it
        target: types.ModuleType | None = None,  # noqa: ARG002 - Python passes it
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("ebbflow.") or current_name(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        current = current_name(spec.name)
        assert current is not None  # find_spec has asked
        module = importlib.import_module(current)
        warnings.warn(
            f"{spec.name} is now {current}; fix: import {current} (the old name works for one "
            "more release)",
            FutureWarning,
            stacklevel=2,
        )
        spec.loader_state = module.__spec__
        return module

    def get_code(self, fullname: str) -> types.CodeType:
        """Refuse `python -m OLDNAME` with an error that names the new module."""
        current = current_name(fullname)
        raise ImportError(f"{fullname} is now {current}; fix: python -m {current}")

    def exec_module(self, module: types.ModuleType) -> None:
        # The import system has put the spec of the old name into the module.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def current_name(name: str) -> str | None:
    """Return the current name of a module that has moved, or None if `name` has not moved."""
    prefix = name
    while prefix:
        if prefix in RENAMED:
            return RENAMED[prefix] + name.removeprefix(prefix)
        prefix = prefix.rpartition(".")[0]
    return None


def install_old_names() -> None:
    """Install the import hook for old import paths."""
    if not any(isinstance(finder, RenamedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, RenamedModules())
