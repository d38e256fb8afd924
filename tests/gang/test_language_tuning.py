"""Supervised fine-tuning of a folder: conversations by its chat template, and a multiple-choice
test.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.store import Store
from ebbflow.training.data import open_tokens
from ebbflow.training.errors import TrainingError
from ebbflow.training.gang import Gang
from ebbflow.training.workload import Cursor, WorkloadContext
from ebbflow.training.workload_loader import workload_context
from ebbflow.tryout.trial import try_workload
from ebbflow.workloads.language.hugging_face import HuggingFace
from ebbflow.workloads.language.multiple_choice import ChoiceTest, Question
from tests.gang.test_hugging_face import settings_for
from tests.gang.test_policy_folders import CHAT, make_folder

QUESTIONS = [
    {
        "prompt": "the tide",
        "choices": [" comes in", " goes out", " sleeps", " number"],
        "answer": 1,
    },
    {"prompt": "and the tide goes", "choices": [" out again", " in"], "answer": " in"},
    {"prompt": "number", "choices": [" 1", " 2", " 12"], "answer": 2},
]

MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ "
    "m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
FRESH_ONLY = CHAT.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | length }}")


def prepared(config: RunConfig) -> Any:
    own = workload_context(config, Gang(), store=Store.open(config.store))
    return replace(own, prepared=HuggingFace.prepare(own))


def test_choices_are_scored_as_transformers_scores_them_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path, chat=True)
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    config = settings_for(folder, choices=str(tmp_path / "questions.jsonl"))
    context = prepared(config)
    workload = HuggingFace(context)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = {"choice_accuracy": 0, "choice_accuracy_per_byte": 0}
    for question in QUESTIONS:
        scores = []
        for choice in question["choices"]:
            begin = len(tokenizer(question["prompt"])["input_ids"])
            tokens = tokenizer(question["prompt"] + choice, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                spread = model(tokens).logits[0, :-1].log_softmax(-1)
            scores.append(float(spread.gather(1, tokens[0, 1:, None])[begin - 1 :].sum()))
        answer = question["answer"]
        if isinstance(answer, str):
            answer = question["choices"].index(answer)
        right["choice_accuracy"] += int(np.argmax(scores)) == answer
        lengths = [len(choice) for choice in question["choices"]]
        right["choice_accuracy_per_byte"] += int(np.argmax(np.array(scores) / lengths)) == answer
    with torch.no_grad():
        found = workload.evaluate(model)
    assert {name: found[name] for name in right} == {
        name: count / 3 for name, count in right.items()
    }
    assert "choice_accuracy" in try_workload(config, context).text
    test: Any = workload._choices
    rows: dict[int, torch.Tensor] = {}

    def gather(rank: int) -> Any:
        def both(row: torch.Tensor) -> torch.Tensor:
            rows[rank] = row
            return torch.stack([rows.get(0, row), rows.get(1, row)])

        return both

    def logits_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens).logits

    split = [
        test.evaluate(logits_of, replace(context, rank=rank, world_size=2, gather=gather(rank)), 2)
        for rank in (0, 1)
    ]
    assert split[1] == {name: found[name] for name in right}, "the second rank has seen both rows"


def test_a_model_that_knows_the_answers_has_all_of_them() -> None:
    """A model that gives each token's successor all probability, and a choice that is a word too
    long.
    """

    class Bytes:
        def encode(self, piece: bytes) -> np.ndarray:
            return np.frombuffer(piece, dtype=np.uint8)

    def successor(tokens: torch.Tensor) -> torch.Tensor:
        return 20.0 * torch.nn.functional.one_hot(tokens + 1, 256)

    questions = [Question("ab", ["cde", "xyz"], 0), Question("kl", ["lmn", "mn", "m"], 2)]
    found = ChoiceTest(questions, Bytes(), 8).evaluate(successor, _alone(), 3)  # type: ignore[arg-type]
    assert found["choice_accuracy"] == 1.0
    with pytest.raises(
        TrainingError, match=r"question 1 has 5 tokens with its choice 'cde', more than .* 4; fix"
    ):
        ChoiceTest(questions, Bytes(), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("not json", r"questions.jsonl:1: Expecting value"),
        ('{"prompt": "a", "choices": ["b", "c"]}', "1: there is no 'answer'; fix: {"),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', "choices must be two texts or more"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "answer 2 is none of 2 choices"),
        ('{"prompt": "", "choices": ["b", "c"], "answer": 0}', "the prompt is no text"),
        ("", "has no questions; fix: another file"),
    ],
)
def test_a_bad_question_is_named_with_its_line(row: str, problem: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (tmp_path / "questions.jsonl").write_text(row)
    with pytest.raises(TrainingError, match=problem):
        prepared(settings_for(folder, choices=str(tmp_path / "questions.jsonl")))


def test_conversations_become_text_by_the_folders_template(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat=True)
    talk = [{"role": "user", "content": "tide?"}, {"role": "assistant", "content": "comes in"}]
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 300)
    config = settings_for(folder, dataset=str(tmp_path / "talk.jsonl"), chat=True)
    context = prepared(config)
    tokens = open_tokens(context.store, context.prepared["fingerprint"])
    text = (
        AutoTokenizer.from_pretrained(folder)
        .decode(tokens.train[:40].tolist())
        .replace(" ", "")
        .replace("Ġ", "")
    )
    assert text.startswith("<user>tide?<assistant>comesin<|endoftext|><user>tide?")
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": [{"content": "x"}, "y"]}) + "\n")
    with pytest.raises(
        TrainingError, match=r"row 1: the chat template of .* refuses the messages: .*; fix: \["
    ):
        prepared(config)


@pytest.mark.parametrize("template", [CHAT, MARKED], ids=["plain", "generation"])
def test_only_the_assistants_tokens_count(template: str, tmp_path: Path) -> None:
    """Against labels that are made from the places of the answers in the decoded text."""
    folder = make_folder(tmp_path, chat=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    answers = ["comes in", "and the tide goes out, number 12"]
    talk = []
    for text in answers:
        talk += [{"role": role, "content": text} for role in ("user", "assistant")]
    talk[0]["content"] = "tide? é"
    talk[2]["content"] = "and then the tide, which tide, the tide of number 300?"
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 60)
    config = settings_for(folder, dataset=str(tmp_path / "talk.jsonl"), chat=True)
    context = prepared(config)
    workload = HuggingFace(context)
    model = AutoModelForCausalLM.from_pretrained(folder)
    whole = "".join(f"<{message['role']}>{message['content']}" for message in talk)
    # Bytes of the answers
    counted = set()
    for text in answers:
        counted |= set(
            range(
                len(whole[: whole.rindex(text)].encode()),
                len(whole[: whole.rindex(text) + len(text)].encode()),
            )
        )
    ids = tokenizer(whole)["input_ids"]
    labels = []
    at = 0
    for token in ids:
        # Byte-level: one character for each byte
        size = len(tokenizer.convert_ids_to_tokens(token))
        labels.append(token if counted & set(range(at, at + size)) else -100)
        at += size
    assert at == len(whole.encode())
    end = tokenizer.eos_token_id
    ids = [*ids, end] * 60
    labels = [*labels, end] * 60
    expected = {}
    for number in range((54 * len(ids) // 60 - 1) // 16):  # a tenth is held out
        inputs = ids[16 * number :][:16]
        targets = labels[16 * number + 1 :][:16]
        expected[tuple(inputs)] = targets
    order = [workload.next_batch(model, Cursor(first, 4)) for first in range(0, 40, 4)]
    for batch in order:
        for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            assert expected[tuple(inputs)] == targets and max(targets) >= 0
        assert (
            batch.weight
            == int((batch.targets >= 0).sum())
            == sum(part.weight for part in batch.split(3))
        )
    batch = order[0]
    loss = workload.loss(model, batch)
    spread = model(batch.inputs).logits.log_softmax(-1)
    kept = batch.targets >= 0
    theirs = -spread.gather(2, batch.targets.clamp(min=0)[..., None])[..., 0][kept].sum()
    assert loss.weight == kept.sum() and loss.sum.item() == pytest.approx(float(theirs), rel=1e-5)
    assert set(workload.evaluate(model)) == {"held_out_loss"}
    again = config.model_copy(
        update={"workload_options": config.workload_options | {"assistant_only_loss": False}}
    )
    assert HuggingFace(prepared(again)).next_batch(model, Cursor(0, 4)).weight == 64
    tokenizer.chat_template = FRESH_ONLY
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        TrainingError, match=r"the chat template of .* writes message 2 differently .*; fix: \{% g"
    ):
        prepared(config)


def _alone() -> WorkloadContext:
    return WorkloadContext(config=RunConfig(), store=Store.open("/tmp"), project_root=Path())
