"""One node's part in a generation: the node's ranks, from their start to their end, and the node's
event log.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbflow.core.errors import InfraError
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import NODE_ENDED, NODE_HEARTBEAT, NODE_STARTED, STALL, EndReason, Origin
from ebbflow.core.keeper import Keeper
from ebbflow.core.layout import generation_name
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.infra.instance import identify_machine
from ebbflow.training import errors
from ebbflow.training.launch.devices import NodeGpuCheck
from ebbflow.training.launch.evidence import WorkerFailure, parse_traceback
from ebbflow.training.launch.gpus import GpuMonitor, fault_from_error
from ebbflow.training.launch.heartbeat import STORE_PHASES, HangLimits
from ebbflow.training.launch.logs import RankOutput, print_line, show_failed_logs
from ebbflow.training.launch.membership import Peers
from ebbflow.training.launch.messages import (
    GangSpec,
    GenerationEnd,
    GenerationStart,
    NewTerms,
    WorkerSpec,
    find_differences,
)
from ebbflow.training.launch.preemption import Drain
from ebbflow.training.launch.roster import StickyFlag
from ebbflow.training.launch.watch import RankWatch
from ebbflow.training.launch.workers import Standby, WorkerGroup

_HEARTBEAT_SECONDS = 1.0
_CLOSE_SECONDS = 6.0
_POLL_SECONDS = 0.05
_GPU_ANSWER_SECONDS = 2.0
_GPU_RELEASE_SECONDS = 20.0
_WAITING_SECONDS = 1.0  # between two reports that a rank of this node waits for the store


class NodeGeneration:
    """Ranks of one node in one generation. All of these ranks have ended when `run` returns.

    `spec` covers only the nodes that take part in this generation, and renumbers them
    (`NodeRuntime.spec_among`).
    """

    # The parts of a node's runtime that a generation uses
    def __init__(  # noqa: PLR0913
        self,
        spec: GangSpec,
        start: GenerationStart,
        peers: Peers,
        drain: Drain,
        log: NodeLog,
        job_store: Store,
        *,
        gpus: GpuMonitor | None = None,
        gpu_check: NodeGpuCheck | None = None,
        take_new_terms: Callable[[], Terms | None] = lambda: None,
    ) -> None:
        self._spec = spec
        self._start = start
        self._peers = peers
        self._drain = drain
        self._log = log
        self._job_store = job_store
        self._gpus = gpus
        self._gpu_check = gpu_check
        self._take_new_terms = take_new_terms
        self._usd_per_rank_second = start.terms.usd_per_rank_second if start.terms else 0.0
        if gpus is None:
            self._faults_before = 0
        else:
            self._faults_before = len(gpus.faults)
        self._created = time.monotonic()
        self._store_wait_reported = StickyFlag(_WAITING_SECONDS)
        self._cluster = spec.config.cluster
        self.folder = Path(spec.log_folder) / generation_name(start.generation, start.generation_id)

    def run(
        self, standby: Standby | None, kept: Path, keeper: Keeper | None = None
    ) -> GenerationEnd:
        """Start the ranks, watch them until the generation ends, and return its result.

        `kept` is the folder in which ranks store measurements that later generations reuse.
        """
        end = self._await_readiness(standby)
        if end is not None:
            return end
        if self._gpu_check is not None and self._gpu_check.refusal:
            return self._report_own(self._gpu_check.refusal)
        texts, fatal = find_differences(self._spec, self._start.node_0)
        difference = f"node {self._spec.node} differs from node 0 in {'; '.join(texts)}"
        if fatal:
            fix = "fix: start all nodes from one image, named by its digest, with one configuration"
            return self._report_own(errors.NodesDiffer(f"{difference}; {fix}"))
        if texts:
            print_line(difference)
        if self._gpus is not None:
            self._gpus.note_idle()
        rendezvous = (self._spec.main_address, self._start.rendezvous_port)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            spec = self._worker_spec(kept)
            group = WorkerGroup(
                self._spec.ranks,
                self._spec.world_size,
                self.folder,
                spec,
                rendezvous,
                standby,
                keeper,
            )
        except OSError as error:
            return self._report_own(errors.RankNotStarted(f"its ranks cannot be started: {error}"))
        end = None
        output = None
        stuck = {}
        try:
            output = RankOutput(group, self._spec, self._start.generation, self._job_store)
            end = self._watch(group, output)
        except (errors.TrainingError, InfraError):
            raise
        except Exception as error:
            text = errors.describe_traceback(error)
            print_line(text)
            cause = f"the agent of node {self._spec.node} raised {errors.describe_exception(error)}"
            end = self._report_own(errors.AgentFailure(cause), where=parse_traceback(text))
        finally:
            self._drain.announce_end()
            stuck = group.end(end.ranks if end is not None else (), meanwhile=self._keep_in_touch)
            # A killed rank has recorded none of its last steps.
            trained = max((worker.beat.trained for worker in group.workers), default=0)
            self._log.emit(NODE_HEARTBEAT, seconds=self._log.seconds, trained=trained)
            place = f"node {self._spec.node}: rank"
            for rank in stuck:
                print_line(
                    f"{place} {rank}: SIGKILL sent; stuck in uninterruptible sleep (state D)"
                )
            if output is not None:
                output.close(self._keep_in_touch)
        assert end is not None
        return self._after_ranks(end, stuck)

    def _after_ranks(self, end: GenerationEnd, stuck: Mapping[int, str]) -> GenerationEnd:
        """After the ranks have ended, wait until the memory of the GPUs is free.

        Return `end`, or a NODE_LOST result if this node's GPUs are unusable.
        """
        if not end.again:
            return end
        # The rank of the next generation would need that GPU.
        if devices := [
            f"rank {rank} is in state D and holds {device}"
            for rank, device in stuck.items()
            if device
        ]:
            return self._leave_for("; ".join(devices), "fix: reboot the machine")
        if self._gpus is not None:
            self._gpus.refresh(_GPU_ANSWER_SECONDS)
            fault = self._gpus.fatal_fault
            if fault is not None:
                return self._leave_for(str(fault), "fix: reset or replace the GPU")
            if held := self._gpus.await_release(_GPU_RELEASE_SECONDS, self._keep_in_touch):
                print_line(f"node {self._spec.node}: {held}; its next rank may run out of memory")
        return end

    def _leave_for(self, cause: str, fix: str) -> GenerationEnd:
        culprit = f"node {self._spec.node} cannot continue: {cause}; {fix}"
        print_line(culprit)
        return GenerationEnd(culprit=culprit, reason=EndReason.NODE_LOST, known_cause=True)

    def _keep_in_touch(self) -> None:
        self._peers.keep_in_touch()
        self._log.beat()

    def _report_own(self, error: errors.TrainingError, where: str = "") -> GenerationEnd:
        """Report an error of this node as a failure of its first rank, and return the generation's
        result.
        """
        name = type(error).__name__
        node = self._spec.node
        message = errors.redact_secrets(f"{name}: {error}")
        print_line(f"node {node}: {message}")
        failure = WorkerFailure(
            rank=self._spec.ranks[0], node=node, message=message, error=name, where=where
        )
        self._peers.report(replace(failure, timestamp=time.time()))
        end = self._peers.poll()
        while end is None:
            self._turn()
            end = self._peers.poll()
        return end

    def _turn(self) -> None:
        self._drain.forward_orders(self._peers, self._log.emit)
        self._log.beat()
        time.sleep(_POLL_SECONDS)

    def _await_readiness(self, standby: Standby | None) -> GenerationEnd | None:
        """Wait until the standby and the GPU check are ready, or until the start deadline.

        If the generation ends while this method waits, return its result, else None.
        """
        limit = time.monotonic() + self._cluster.start_deadline_seconds
        while time.monotonic() < limit:
            checked = self._gpu_check is None or self._gpu_check.done
            if checked and (standby is None or standby.is_settled):
                break
            end = self._peers.poll()
            if end is not None:
                return end
            self._turn()
        return None

    def _worker_spec(self, kept: Path) -> WorkerSpec:
        spec = self._spec
        start = self._start
        return WorkerSpec(
            job=spec.job,
            run=spec.run,
            attempt=spec.attempt,
            node=spec.node,
            config=spec.config,
            store_uri=spec.store_uri,
            prepared=spec.prepared,
            promised_gpus=spec.promised_gpus,
            generation=start.generation,
            generation_id=start.generation_id,
            candidates=start.candidates,
            overrides=start.overrides,
            terms=self._terms_now(),
            rehearse=start.rehearse,
            colocated_ranks=start.colocated_nodes(spec.node) * spec.processes_per_node,
            kept_path=str(kept),
            keys_path=self._make_keys_path(),
            control_path=str(self._drain.create_order_record(self.folder)),
            notice_path=str(self._drain.rehearsal_path),
            agent_pid=os.getpid(),
        )

    def _make_keys_path(self) -> str | None:
        """Make a private folder for the file of the gang's key-value store, and return the file's
        path.

        Only this user can enter the folder. Return None for a gang on several machines.
        """
        if not self._start.keys_path:
            return None
        path = Path(self._start.keys_path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        return str(path)

    def _terms_now(self) -> Terms | None:
        """Return the job's budget, price and spending until now.

        To the returned spending, each rank adds only the cost of the time after its own start.
        """
        terms = self._start.terms
        if terms is None:
            return None
        waited_usd = (
            (time.monotonic() - self._created) * terms.usd_per_rank_second * self._spec.world_size
        )
        return replace(terms, spent_usd=terms.spent_usd + waited_usd)

    def _watch(self, group: WorkerGroup, output: RankOutput) -> GenerationEnd:
        reported: dict[int, WorkerFailure] = {}
        finished = False
        limits = HangLimits.from_config(self._spec.config)
        watch = RankWatch(group.workers, limits, self.folder, node=self._spec.node, gpus=self._gpus)
        try:
            end = self._peers.poll()
            while end is None:
                if self._peers.take_witness_request():
                    watch.request_witnesses()
                reports = watch.check(store_wait=self._check_store_wait(group))
                reports += self._drain.find_overstaying_ranks(group)
                self._report_failures(reports, reported)
                self._report_stall()
                if not finished and not reported and group.all_exited():
                    results = group.results()
                    if len(results) == len(group.workers):
                        finished = True
                        self._peers.report_results(results)
                self._drain.forward_orders(self._peers, self._log.emit)
                self._hand_over_terms()
                self._log.beat(watch.sample)
                output.follow()
                time.sleep(_POLL_SECONDS)
                end = self._peers.poll()
        finally:
            watch.close()
        if end.culprit:
            show_failed_logs(
                group,
                list(reported.values()),
                job=self._spec.job,
                generation=self._start.generation,
            )
        return end

    def _hand_over_terms(self) -> None:
        """Pass changed cost terms on to the ranks, and print a changed price."""
        terms = self._take_new_terms()
        if terms is None:
            return
        self._drain.hand_over_terms(NewTerms(terms=terms, at=time.monotonic()))
        ranks = self._spec.world_size
        before = self._usd_per_rank_second
        self._usd_per_rank_second = terms.usd_per_rank_second
        if before != terms.usd_per_rank_second:
            print_line(
                f"this pool now costs ${3600 * terms.usd_per_rank_second * ranks:.4f} per "
                f"hour, before ${3600 * before * ranks:.4f}; ${terms.spent_usd:.4f} spent so far"
            )

    def _report_failures(
        self, reports: Sequence[WorkerFailure], reported: dict[int, WorkerFailure]
    ) -> None:
        """Report the positions of ranks, and failures that were not reported before, to node 0.

        `reported` has the failures reported so far, by rank; new ones are added.
        """
        for report in reports:
            if report.witness:
                self._peers.report(report)
            elif report.rank not in reported:
                failure = self._add_gpu_fault(report)
                reported[failure.rank] = failure
                print_line(f"node {self._spec.node}: rank {failure.rank}: {failure.headline}")
                self._peers.report(failure)

    def _report_stall(self) -> None:
        """Print and record an idle rank for which all others wait, if one was found."""
        stall = self._peers.stall
        self._peers.stall = None
        if stall is not None:
            text = (
                f"rank {stall.rank}: {stall.message}, uses no CPU time; the other ranks wait for it"
            )
            print_line(text)
            self._log.emit(STALL, **stall.details() | {"culprit": text})

    def _add_gpu_fault(self, failure: WorkerFailure) -> WorkerFailure:
        """If a GPU fault explains a failure, add the fault to it.

        So the user's program is not blamed.
        """
        if self._gpus is None or failure.stopped:
            return failure
        self._gpus.refresh(_GPU_ANSWER_SECONDS)
        of_cuda = failure.hung or failure.killed_by or "cuda" in failure.message.lower()
        since_start = self._gpus.faults[self._faults_before :]
        recent = [fault for fault in since_start if fault.fatal or of_cuda]
        shown = fault_from_error(failure.message)
        if shown is not None:
            self._gpus.add(shown)
            recent.append(shown)
        if not recent:
            return failure
        fault = recent[0]
        return replace(failure, gpu_fault=str(fault), message=f"{fault}; {failure.message}")

    def _check_store_wait(self, group: WorkerGroup) -> bool:
        """Return whether a rank of any node waits for the store.

        If a rank of this node waits, tell the other nodes.

        While a rank waits for the store, all other ranks wait for it in a collective. This must not
        count as a hang.
        """
        here = any(worker.beat.phase in STORE_PHASES for worker in group.workers)
        if here and not self._store_wait_reported.holds:
            self._store_wait_reported.mark()
            self._peers.waiting()
        return self._peers.store_wait_active


class NodeLog:
    """Event log of one node, which records the node's paid time per generation.

    In this log, a generation ends when the node's next generation begins. Every second from the
    start to the exit of the agent therefore belongs to exactly one generation.
    """

    def __init__(self, job_store: Store, host: str) -> None:
        self._job_store = job_store
        self._host = host
        self._since = (time.time(), time.monotonic())
        self._log: EventLog | None = None
        self._machine: dict | None = None
        self._last_beat = 0.0
        self.turns = 0  # iterations of the agent's loop so far
        self._closing: list[threading.Thread] = []

    @property
    def seconds(self) -> float:
        """Seconds since the node's current generation began, or since the agent started if there is
        none yet.
        """
        return time.monotonic() - self._since[1]

    @property
    def since(self) -> float:
        return self._since[1]

    def open(self, spec: GangSpec, generation: int, *, left_for: str = "") -> None:
        """Record the end of the previous generation (if any), with the reason `left_for`, and the
        start of the next.
        """
        if self._log is not None and self._log.origin.generation == generation:
            return
        if self._log is not None:
            now = (time.time(), time.monotonic())
            self.emit(NODE_ENDED, at=now, seconds=now[1] - self._since[1], reason=left_for)
            self._since = now
            # Upload the rest of its events while the next generation starts.
            self._closing = [thread for thread in self._closing if thread.is_alive()]
            self._closing.append(
                threading.Thread(target=self._log.close, name="events-close", daemon=True)
            )
            self._closing[-1].start()
        origin = Origin(
            job=spec.job,
            run=spec.run,
            attempt=spec.attempt,
            generation=generation,
            node=spec.node,
            process="agent",
        )
        self._log = EventLog(self._job_store, origin)
        if self._machine is None:
            machine = identify_machine()
            if machine.problem:
                print_line(f"node {spec.node}: instance type unknown: {machine.problem}")
            self._machine = machine.to_json()
        self.emit(
            NODE_STARTED, at=self._since, ranks=list(spec.ranks), host=self._host, **self._machine
        )

    @property
    def is_open(self) -> bool:
        return self._log is not None

    def emit(self, name: str, **data: Any) -> None:
        if self._log:
            self._log.emit(name, **data)

    def beat(self, sample: Callable[[], dict] = dict) -> None:
        """Count one iteration of the agent's loop.

        Once per second, record a heartbeat with the data of `sample()`.
        """
        self.turns += 1
        now = time.monotonic()
        if now - self._last_beat >= _HEARTBEAT_SECONDS:
            self._last_beat = now
            self.emit(NODE_HEARTBEAT, seconds=self.seconds, **sample())

    def close(self, reason: str) -> None:
        """Record that this node's part of the job has ended, and try for at most 6 s to upload all
        events.
        """
        self.emit(NODE_ENDED, seconds=self.seconds, reason=reason)
        if self._log:
            self._log.close()
            self._log = None
        limit = time.monotonic() + _CLOSE_SECONDS
        for thread in self._closing:
            thread.join(max(0.0, limit - time.monotonic()))
