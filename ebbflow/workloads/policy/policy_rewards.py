"""Rewards of completions, such as exact match, a unit test or a model, and their weighted sums."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ebbflow.training.errors import WorkloadError
from ebbflow.training.time_limit import TimeIsUp, at_most
from ebbflow.training.workload_loader import describe_mistake
from ebbflow.workloads.policy import sandbox
from ebbflow.workloads.policy.policy_prompts import Prompt

if TYPE_CHECKING:
    from ebbflow.workloads.language.reward_model import RewardModel

# A function of the prompt's text, the completion's text and the prompt's row.
RewardFunction = Callable[[str, str, Mapping[str, Any]], float]
_BUILT_IN = ("exact_match", "shared_start", "unit_test")
_MODEL = "model"  # model:FOLDER
_LARGEST_FILE_BYTES = 1 << 20  # that a unit test may write
_UNIT_TEST_ENDS_SECONDS = 60.0  # to start the process of a unit test, and to end it after its time


class Reward:
    """A weighted sum of rewards.

    Args:
        written: names and weights, such as "exact_match" or "exact_match=1,
            package.module:function=0.2".
        seconds: time limit of one reward of one completion.
        memory_mib: memory limit of a unit test.
        root: folder to which relative paths of models refer.
        device: where models compute.
    """

    def __init__(
        self,
        written: str,
        *,
        seconds: float,
        memory_mib: int,
        root: Path | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._seconds = seconds
        self._memory_mib = memory_mib
        self._root = root or Path()
        self._device = device or torch.device("cpu")
        self.model_bytes = 0  # of the weights of all models
        self._models: dict[str, RewardModel] = {}
        self._parts: list[tuple[str, float, RewardFunction]] = []
        for part in filter(None, (word.strip() for word in written.split(","))):
            name, _, weight = part.partition("=")
            self._parts.append((name.strip(), self._weight(part, weight), self._find(name.strip())))
        if not self._parts:
            raise WorkloadError(
                f"workload_options.reward: nothing is named; fix: {', '.join(_BUILT_IN)}, or a "
                "function"
            )

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """Return the reward of one completion.

        Raises WorkloadError if a function raises, takes too long or returns no finite number.
        """
        return sum(
            weight * self._call(name, function, prompt, completion)
            for name, weight, function in self._parts
        )

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        """Return the rewards of many completions. Models score them in batches.

        Raises the errors of `__call__`.
        """
        pairs = list(zip(prompts, completions, strict=True))
        rewards = [0.0] * len(pairs)
        for name, weight, function in self._parts:
            model = self._models.get(name)
            if model is not None:
                texts = [(prompt.text, completion) for prompt, completion in pairs]
                found = self._score_many(name, model, texts)
            else:
                found = [self._call(name, function, *pair) for pair in pairs]
            rewards = [
                before + weight * score for before, score in zip(rewards, found, strict=True)
            ]
        return rewards

    def _score_many(
        self, name: str, model: RewardModel, texts: Sequence[tuple[str, str]]
    ) -> list[float]:
        model.load()  # once and without the limit
        try:
            with at_most(self._seconds * max(1, len(texts))):
                found = model.score(texts)
        except TimeIsUp:
            raise WorkloadError(
                f"reward {name} took longer than {self._seconds:g} s for each of {len(texts)} "
                "completions; fix: a faster reward, or a larger workload_options.reward_seconds"
            ) from None
        except WorkloadError:
            raise
        except Exception as error:
            raise WorkloadError(describe_mistake(error, f"reward {name}")) from error
        for (prompt, completion), number in zip(texts, found, strict=True):
            if not math.isfinite(number):
                raise WorkloadError(
                    f"reward {name} returned {number!r} for prompt {prompt[:60]!r}, completion "
                    f"{completion[:60]!r}; fix: a finite number"
                )
        return found

    def _call(self, name: str, function: RewardFunction, prompt: Prompt, completion: str) -> float:
        about = f"prompt {prompt.text[:60]!r}, completion {completion[:60]!r}"
        getattr(function, "load", int)()  # a model, once and without the limit
        # A unit test ends its program itself, which fails. On a busy machine that takes longer than
        # the limit.
        if name == "unit_test":
            own = _UNIT_TEST_ENDS_SECONDS
        else:
            own = 0.0
        try:
            with at_most(self._seconds + own):
                found = function(prompt.text, completion, prompt.row)
        except TimeIsUp:
            raise WorkloadError(
                f"reward {name} took longer than {self._seconds:g} s for {about}; "
                "fix: a faster reward, or a larger workload_options.reward_seconds"
            ) from None
        except WorkloadError:
            raise
        except Exception as error:
            raise WorkloadError(f"{describe_mistake(error, f'reward {name}')} ({about})") from error
        try:
            number = float(found)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise WorkloadError(
                f"reward {name} returned {found!r} for {about}; fix: a finite number"
            )
        return number

    @staticmethod
    def _weight(part: str, weight: str) -> float:
        try:
            number = float(weight or 1)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise WorkloadError(
                f"workload_options.reward: {part!r}: {weight!r} is no weight; fix: NAME=NUMBER"
            )
        return number

    def _find(self, name: str) -> RewardFunction:
        if name == "exact_match":
            return exact_match
        if name == "shared_start":
            return shared_start
        if name == "unit_test":
            if missing := sandbox.find_missing():
                print(
                    f"reward unit_test: nothing keeps programs from {' and '.join(missing)} here",
                    flush=True,
                )
            return partial(run_unit_test, seconds=self._seconds, memory_mib=self._memory_mib)
        module, _, attribute = name.partition(":")
        if not attribute:
            raise WorkloadError(
                f"workload_options.reward: {name!r} is unknown; fix: {', '.join(_BUILT_IN)}, "
                "package.module:function, or model:FOLDER"
            )
        if module == _MODEL:
            from ebbflow.workloads.language.reward_model import RewardModel

            model = RewardModel(self._root / Path(attribute).expanduser(), self._device)
            self.model_bytes += model.bytes
            self._models[name] = model
            return model
        try:
            function = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # an import may raise anything
            raise WorkloadError(
                f"workload_options.reward: {name} cannot be imported: {type(error).__name__}: "
                f"{' '.join(str(error).split())}; fix: its name, or PYTHONPATH"
            ) from error
        if not callable(function):
            raise WorkloadError(
                f"workload_options.reward: {name} is a {type(function).__name__}; fix: a function"
            )
        return cast(RewardFunction, function)


def exact_match(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return 1.0 if the completion equals the row's `answer`, else 0.0.

    White space at both ends is ignored.
    """
    if "answer" not in row:
        raise WorkloadError(
            f"reward exact_match: the row of prompt {prompt[:60]!r} has no answer; fix: add it"
        )
    return float(completion.strip() == str(row["answer"]).strip())


def shared_start(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return the length of the common start of completion and `answer`, as a share of the longer
    one.

    White space at both ends is ignored.
    """
    if exact_match(prompt, completion, row):
        return 1.0
    answer = str(row["answer"]).strip()
    completion = completion.strip()
    pairs = enumerate(zip(answer, completion, strict=False))
    same = next((place for place, (a, b) in pairs if a != b), min(len(answer), len(completion)))
    return same / (max(len(answer), len(completion)) or 1)


def run_unit_test(
    prompt: str, completion: str, row: Mapping[str, Any], *, seconds: float, memory_mib: int
) -> float:
    """Return 1.0 if the completion, followed by the row's `test`, runs to its end in Python, else
    0.0.

    A program that ends itself before its test, even with exit code 0, has not passed. It runs in an
    empty folder and without the environment's variables, with limits of memory, file size and
    processor time: half of `seconds`, rounded up. A program that waits is ended after `seconds`.
    `sandbox` keeps it from processes, network and files. A program that searches the interpreter
    for the runner can still claim that it passed.
    """
    if not isinstance(row.get("test"), str):
        raise WorkloadError(
            f"reward unit_test: the row of prompt {prompt[:60]!r} has no test; fix: add Python code"
        )

    limits = {"RLIMIT_CPU": math.ceil(seconds / 2), "RLIMIT_AS": memory_mib << 20, "RLIMIT_CORE": 0}
    limits["RLIMIT_FSIZE"] = _LARGEST_FILE_BYTES
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="ebbflow-test-") as folder:
            for name, text in (("completion.py", completion), ("test.py", row["test"])):
                Path(folder, name).write_text(text, encoding="utf-8", errors="replace")
            command = [
                sys.executable,
                "-s",
                "-P",
                "-B",
                sandbox.__file__,
                str(writer),
                json.dumps(limits),
            ]
            quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            own = {"PYTHONHASHSEED": "0"}  # the order of a set does not decide
            with subprocess.Popen(
                command, cwd=folder, env=own, pass_fds=[writer], start_new_session=True, **quiet
            ) as process:
                try:
                    process.wait(timeout=seconds)
                except subprocess.TimeoutExpired:
                    return 0.0
                finally:
                    process.kill()
                    # Its children too, where it can have some
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError):
            return float(os.read(reader, 16) == sandbox.PASSED)
        return 0.0
    finally:
        os.close(reader)
        os.close(writer)
