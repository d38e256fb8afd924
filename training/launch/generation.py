"""One node's part of one generation: its ranks, from their start to the gang's verdict."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ebbflow.infra.config.schema import ClusterConfig, RunConfig
from ebbflow.infra.errors import InfraError
from ebbflow.infra.event_log import EventLog
from ebbflow.infra.events import NODE_ENDED, NODE_HEARTBEAT, NODE_STARTED, EndReason, Origin
from ebbflow.infra.instance import identify_machine
from ebbflow.infra.keeper import Keeper
from ebbflow.infra.layout import generation_name
from ebbflow.infra.store import Store
from ebbflow.infra.terms import Terms
from ebbflow.training.errors import AgentFailure, RankNotStarted, TrainingError, describe_exception, describe_traceback
from ebbflow.training.launch.devices import NodeGpuCheck
from ebbflow.training.launch.evidence import WorkerFailure, parse_traceback
from ebbflow.training.launch.heartbeat import STORE_PHASE, HangLimits
from ebbflow.training.launch.logs import RankOutput, print_line, show_failed_logs
from ebbflow.training.launch.membership import Peers, StickyFlag
from ebbflow.training.launch.messages import GangSpec, GenerationEnd, GenerationStart, WorkerSpec
from ebbflow.training.launch.preemption import Drain
from ebbflow.training.launch.watch import GpuCounters, RankWatch
from ebbflow.training.launch.workers import Standby, WorkerGroup

_BEAT_SECONDS = 1.0
_CLOSE_SECONDS = 6.0
_POLL_SECONDS = 0.05
_WAITING_SECONDS = 1.0  # between two words that a rank here waits for the store


class NodeGeneration:
    """spec: of this node, with the number that it has in this generation. None of its ranks is left when it returns.

    gpus, gpu_check: the agent's, over all its generations.
    """

    def __init__(
        self,
        spec: GangSpec,
        start: GenerationStart,
        peers: Peers,
        drain: Drain,
        log: NodeLog,
        job_store: Store,
        *,
        gpus: GpuCounters | None = None,
        gpu_check: NodeGpuCheck | None = None,
    ) -> None:
        self._spec, self._start, self._peers, self._drain, self._log = spec, start, peers, drain, log
        self._job_store, self._gpus, self._gpu_check = job_store, gpus, gpu_check
        self._told = time.monotonic()
        self._store_wait_reported = StickyFlag(_WAITING_SECONDS)
        self._cluster = ClusterConfig(**spec.config["cluster"])
        self.folder = Path(spec.log_folder) / generation_name(start.generation, start.generation_id)

    def run(self, standby: Standby | None, kept: Path, keeper: Keeper | None = None) -> GenerationEnd:
        """standby: forks the ranks, as soon as it can; without one, or when it is lost, they are started cold.

        kept: the folder of the agent's first generation, for what need not be measured again. keeper: starts and reaps.
        """
        if (verdict := self._await(standby)) is not None:
            return verdict
        if self._gpu_check is not None and (refusal := self._gpu_check.refusal):
            return self._not_started(refusal)
        rendezvous = (self._spec.main_address, self._start.rendezvous_port)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            spec = self._worker_spec(kept)
            group = WorkerGroup(self._spec.ranks, self._spec.world_size, self.folder, spec, rendezvous, standby, keeper)
        except OSError as error:
            return self._not_started(RankNotStarted(f"its ranks cannot be started: {error}"))
        verdict = output = None
        try:
            output = RankOutput(group, self._spec, self._start.generation, self._job_store)
            verdict = self._watch(group, output)
        except (TrainingError, InfraError):
            raise
        except Exception as error:
            verdict = self._agent_failed(error)
        finally:
            stuck = group.end(verdict.ranks if verdict is not None else (), meanwhile=self._keep_in_touch)
            for rank in stuck:
                print_line(
                    f"node {self._spec.node}: rank {rank}: SIGKILL sent; stuck in uninterruptible sleep (state D)"
                )
            if output is not None:
                output.close()
        return self._without_device(verdict, {rank: group.device_held_by(rank) for rank in stuck})

    def _keep_in_touch(self) -> None:
        """What goes on while ranks end."""
        self._peers.keep_in_touch()
        self._log.beat()

    def _without_device(self, verdict: GenerationEnd, held: Mapping[int, str]) -> GenerationEnd:
        """A rank in state D that holds a GPU keeps the next one from it: this node leaves, and the job goes on
        elsewhere. Without a device the gang goes on here and the rank is left to the kernel."""
        devices = [f"rank {rank} is in state D and holds {device}" for rank, device in held.items() if device]
        if not devices or not verdict.again:
            return verdict
        culprit = f"node {self._spec.node} cannot go on: {'; '.join(devices)}; fix: reboot the machine"
        print_line(culprit)
        return GenerationEnd(culprit=culprit, reason=EndReason.NODE_LOST)

    def _not_started(self, error: TrainingError) -> GenerationEnd:
        return self._report_own(type(error).__name__, f"{type(error).__name__}: {error}")

    def _agent_failed(self, error: Exception) -> GenerationEnd:
        """An exception of the agent itself. It counts as a failure, in the crash loop too, and loses no machine."""
        print_line(describe_traceback(error))
        place = parse_traceback(describe_traceback(error))
        message = f"{AgentFailure.__name__}: the agent of node {self._spec.node} raised {describe_exception(error)}"
        return self._report_own(AgentFailure.__name__, message, where=place)

    def _report_own(self, error: str, message: str, where: str = "") -> GenerationEnd:
        """Report it like any failure of a rank, so that all nodes learn the cause; the verdict comes in any case."""
        print_line(f"node {self._spec.node}: {message}")
        self._peers.report(
            WorkerFailure(
                rank=self._spec.ranks[0],
                node=self._spec.node,
                message=message,
                error=error,
                where=where,
                timestamp=time.time(),
            )
        )
        while (verdict := self._peers.poll()) is None:
            self._drain.forward_orders(self._peers, self._log.emit)
            self._log.beat()
            time.sleep(_POLL_SECONDS)
        return verdict

    def _await(self, standby: Standby | None) -> GenerationEnd | None:
        """Wait for the standby's imports and the check of the GPUs: seconds at the first start, and none later."""
        limit = time.monotonic() + self._cluster.start_deadline_seconds
        while not self._ready_to_start(standby) and time.monotonic() < limit:
            if (verdict := self._peers.poll()) is not None:
                return verdict
            self._drain.forward_orders(self._peers, self._log.emit)
            self._log.beat()
            time.sleep(_POLL_SECONDS)
        return None

    def _ready_to_start(self, standby: Standby | None) -> bool:
        checked = self._gpu_check is None or self._gpu_check.done
        return checked and (standby is None or standby.is_settled)

    def _worker_spec(self, kept: Path) -> WorkerSpec:
        spec, start = self._spec, self._start
        return WorkerSpec(
            job=spec.job,
            run=spec.run,
            attempt=spec.attempt,
            node=spec.node,
            generation=start.generation,
            generation_id=start.generation_id,
            candidates=start.candidates,
            config=spec.config,
            store_uri=spec.store_uri,
            prepared=spec.prepared,
            terms=self._terms_now(),
            rehearse=start.rehearse,
            overrides=start.overrides,
            promised_gpus=spec.promised_gpus,
            colocated_ranks=start.colocated_nodes(spec.node) * spec.processes_per_node,
            kept_path=str(kept),
            control_path=str(self._drain.create_order_record(self.folder)),
            notice_path=str(self._drain.rehearsal_path),
            agent_pid=os.getpid(),
        )

    def _terms_now(self) -> dict | None:
        """The lead's count, and what the gang has cost since: the ranks count from their own beginning."""
        if self._start.terms is None:
            return None
        terms = Terms.from_json(self._start.terms)
        waited_usd = (time.monotonic() - self._told) * terms.usd_per_rank_second * self._spec.world_size
        return replace(terms, spent_usd=terms.spent_usd + waited_usd).to_json()

    def _watch(self, group: WorkerGroup, output: RankOutput) -> GenerationEnd:
        """Until the gang's verdict: report this node's news, hear the others'."""
        reported: dict[int, WorkerFailure] = {}
        finished = False
        deadlines = HangLimits.of(RunConfig.model_validate(self._spec.config))
        watch = RankWatch(group.workers, deadlines, self.folder, node=self._spec.node, gpus=self._gpus)
        try:
            while (verdict := self._peers.poll()) is None:
                if self._peers.take_witness_request():
                    watch.request_witnesses()
                patient = self._check_store_wait(group)
                for failure in watch.look(patient=patient) + self._drain.find_overstaying_ranks(group):
                    if failure.witness:
                        self._peers.report(failure)
                    elif failure.rank not in reported:
                        reported[failure.rank] = failure
                        print_line(f"node {self._spec.node}: rank {failure.rank}: {failure.headline}")
                        self._peers.report(failure)
                if not finished and not reported and group.all_succeeded():
                    finished = True
                    self._peers.report_results(group.results())
                self._drain.forward_orders(self._peers, self._log.emit)
                self._log.beat(watch.sample)
                output.follow()
                time.sleep(_POLL_SECONDS)
        finally:
            watch.close()
        if verdict.culprit:
            show_failed_logs(group, list(reported.values()), job=self._spec.job, generation=self._start.generation)
        return verdict

    def _check_store_wait(self, group: WorkerGroup) -> bool:
        """For the store, anywhere in the gang. The others stand in a collective then and are silent through no fault of
        theirs; the wait itself ends at the save's deadline."""
        here = any(worker.beat.phase == STORE_PHASE for worker in group.workers)
        if here and not self._store_wait_reported.holds:
            self._store_wait_reported.mark()
            self._peers.waiting()
        return self._peers.store_wait_active


class NodeLog:
    """The node is paid for from the agent's first moment, which is when this is made, not from its first generation."""

    def __init__(self, job_store: Store, host: str) -> None:
        self._job_store, self._host = job_store, host
        self._since = (time.time(), time.monotonic())
        self._log: EventLog | None = None
        self._machine: dict | None = None
        self._last_beat = 0.0
        self.turns = 0  # of the agent's loop
        self._closing: list[threading.Thread] = []

    @property
    def seconds(self) -> float:
        """Of this node in the generation that is open, or until the first one is."""
        return time.monotonic() - self._since[1]

    @property
    def since(self) -> float:
        """time.monotonic() at which this node's part of the generation began."""
        return self._since[1]

    def open(self, spec: GangSpec, generation: int, *, left_for: str = "") -> None:
        """Begin a generation, unless it has begun; the one before, if there was one, ends now, for the reason given."""
        if self._log is not None and self._log.origin.generation == generation:
            return
        if self._log is not None:
            now = (time.time(), time.monotonic())
            self.emit(NODE_ENDED, at=now, seconds=now[1] - self._since[1], reason=left_for)
            self._since = now
            self._close_behind(self._log)
        origin = Origin(
            job=spec.job, run=spec.run, attempt=spec.attempt, generation=generation, node=spec.node, process="agent"
        )
        self._log = EventLog(self._job_store, origin)
        self.emit(NODE_STARTED, at=self._since, ranks=list(spec.ranks), host=self._host, **self._known(spec.node))

    @property
    def is_open(self) -> bool:
        """Whether a generation has begun and not ended."""
        return self._log is not None

    def emit(self, name: str, **data: object) -> None:
        if self._log:
            self._log.emit(name, **data)

    def beat(self, sample: Callable[[], dict] = dict) -> None:
        """sample: what is seen of the node besides, asked for when a heartbeat is due."""
        self.turns += 1
        now = time.monotonic()
        if now - self._last_beat >= _BEAT_SECONDS:
            self._last_beat = now
            self.emit(NODE_HEARTBEAT, seconds=self.seconds, **sample())

    def close(self, reason: str) -> None:
        """The end of this node's part of the job, and of its last generation."""
        self.emit(NODE_ENDED, seconds=self.seconds, reason=reason)
        if self._log:
            self._log.close()
            self._log = None
        limit = time.monotonic() + _CLOSE_SECONDS
        for thread in self._closing:
            thread.join(max(0.0, limit - time.monotonic()))

    def _close_behind(self, log: EventLog) -> None:
        """What is left of a generation is put while the next one starts; its deadline is the log's own."""
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        thread = threading.Thread(target=log.close, name="events-close", daemon=True)
        thread.start()
        self._closing.append(thread)

    def _known(self, node: int) -> dict:
        if self._machine is None:
            machine = identify_machine()
            if machine.problem:
                print_line(f"node {node}: which instance this is stays unknown: {machine.problem}")
            self._machine = machine.to_json()
        return self._machine
