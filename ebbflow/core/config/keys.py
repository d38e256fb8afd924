"""Dotted configuration keys such as model.num_heads, and the values that the user gave for them."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from ebbflow.core.config.problems import ConfigError, Problem, SourceSpan
from ebbflow.core.config.schema import RENAMED_KEYS, RunConfig
from ebbflow.core.config.yaml_values import (
    SourceText,
    closest_match,
    describe_node,
    empty_node,
    is_empty,
    parse,
)

Origin = Literal["file", "environment", "set"]

OPTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

# EBBFLOW__MODEL__NUM_LAYERS=6: two underscores stand for the dot, because keys contain single ones.
PREFIX = "EBBFLOW__"
_ONE_UNDERSCORE = "EBBFLOW_"
_NEAR = 0.9  # similarity above which a variable's name is a mistyped key
ENVIRONMENT = f"environment {PREFIX}"  # prefix of sources and messages

# Names of the same setting in other tools, by their last part
_SYNONYMS = {
    "lr": "training.learning_rate",
    "steps": "training.max_steps",
    "num_steps": "training.max_steps",
    "max_iters": "training.max_steps",
    "epochs": "training.max_steps",
    "num_train_epochs": "training.max_steps",
    "bs": "training.batch_size",
    "global_batch_size": "training.batch_size",
    "per_device_train_batch_size": "training.batch_size",
    "grad_accum": "training.gradient_accumulation_steps",
    "accumulate_grad_batches": "training.gradient_accumulation_steps",
    "wd": "training.weight_decay",
    "grad_clip": "training.gradient_clip_norm",
    "max_grad_norm": "training.gradient_clip_norm",
    "warmup": "training.scheduler.warmup_steps",
    "bf16": "fsdp.use_mixed_precision",
    "fp16": "fsdp.use_mixed_precision",
    "precision": "fsdp.use_mixed_precision",
    "gradient_checkpointing": "parallel.recompute",
    "activation_checkpointing": "parallel.recompute",
    "n_layer": "model.num_layers",
    "n_layers": "model.num_layers",
    "num_hidden_layers": "model.num_layers",
    "n_head": "model.num_heads",
    "num_attention_heads": "model.num_heads",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "block_size": "model.sequence_length",
    "context_length": "model.sequence_length",
    "seq_len": "model.sequence_length",
    "gpus": "cluster.processes_per_node",
    "num_gpus": "cluster.processes_per_node",
    "nproc_per_node": "cluster.processes_per_node",
    "num_nodes": "cluster.nodes",
    "nnodes": "cluster.nodes",
    "save_steps": "checkpoint.interval_steps",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "training.evaluation_interval_steps",
    "budget": "cost.budget_usd",
    "deadline": "cost.deadline_hours",
}


@dataclass(frozen=True)
class Entry:
    """A value given for one key in the configuration file, an environment variable or --set."""

    # Dotted key; in a free mapping it ends with the name that the user chose
    # ("workload_options.width")
    key: str
    node: Node  # YAML node of the value
    place: SourceSpan  # location of the value; location of the key if the value is empty
    origin: Origin
    source: SourceText  # text that contains the value
    given_key: str  # key as the user wrote it; differs from `key` if the key was renamed

    def place_of(self, part: Node | None) -> SourceSpan:
        """Return the location of `part`, a YAML node inside the value, such as a list item.

        Without `part`, return the location of the whole value.
        """
        if part is None:
            return self.place
        return self.source.span_of(part)


@dataclass
class Given:
    """Values and problems collected from a file, the environment and --set.

    The last value of a key wins.
    """

    entries: dict[str, Entry] = field(default_factory=dict)  # by dotted key
    problems: list[Problem] = field(default_factory=list)

    def complain(
        self, message: str, key: str = "", place: SourceSpan | None = None, hint: str | None = None
    ) -> None:
        self.problems.append(Problem(message=message, key=key, place=place, hint=hint))

    def add_section(
        self, node: Node | None, section: str, source: SourceText, origin: Origin
    ) -> None:
        """Add the values of a section from its YAML node.

        section: dotted name of the section; "" for the whole configuration.
        """
        if node is None or is_empty(node):
            return
        short = getattr(sections().get(section), "SHORT_FORM", None)
        if short is not None and isinstance(node, ScalarNode):
            key = f"{section}.{short}"
            self.entries[key] = Entry(key, node, source.span_of(node), origin, source, section)
            return
        if not isinstance(node, MappingNode):
            what = (
                f"{section or source.name} must be a section of 'key: value' lines, not "
                f"{describe_node(node)}"
            )
            self.complain(what, section, source.span_of(node), _what_goes_into(section))
            return
        first: dict[str, SourceSpan] = {}
        for key_node, value in node.value:
            place = source.span_of(key_node)
            if not isinstance(key_node, ScalarNode):
                self.complain("a key must be a name", section, place)
                continue
            given = f"{section}.{key_node.value}" if section else key_node.value
            key = RENAMED_KEYS.get(given, given)
            name = key_node.value if key == given else key.rpartition(".")[2]
            if name in first:
                what = f"{key} is given twice; the first is at {first[name]}"
                self.complain(what, key, place, "keep one of the two")
            first.setdefault(name, place)
            if key in (sections().keys() | free_mappings()) and name and "." not in name:
                self.add_section(value, key, source, origin)
            elif (key in leaf_fields() and "." not in name) or mapping_of(key) == section:
                empty = value.start_mark.index == value.end_mark.index
                self.entries[key] = Entry(
                    key, value, place if empty else source.span_of(value), origin, source, given
                )
            else:
                self.add_unknown(key, place)

    def add_unknown(self, key: str, place: SourceSpan) -> None:
        """Report a key that the schema does not have, with a hint such as the most similar key."""
        if key.isprintable() and len(key) <= 80:
            shown = key
        else:
            shown = repr(key[:80])
        if key.rpartition(".")[2] == "<<":
            self.complain(
                f"{shown}: YAML's merge key << is not read",
                key,
                place,
                "write the keys of the anchor here",
            )
        else:
            self.complain(f"unknown key {shown}", key, place, _meant(key))

    def add_environment(self, environment: Mapping[str, str]) -> None:
        """Add values from environment variables: EBBFLOW__MODEL__NUM_HEADS=8 sets model.num_heads.

        A variable that looks like a misspelled key, such as one with too few underscores, is
        reported as a problem, because it would otherwise be ignored silently.
        """
        for name in sorted(environment):
            intended = _intended_variable(name)
            if intended:
                self.complain(
                    f"the environment variable {name} sets nothing", hint=f"write {intended}"
                )
            elif name.startswith(PREFIX):
                key = name.removeprefix(PREFIX).replace("__", ".").lower()
                self._add(key, name, environment[name], f"environment {name}", "environment")

    def add_override(self, override: str) -> None:
        """Add one --set option, either "key=value" or a whole section as in "model={num_heads: 8}"."""
        key, equals, value = override.partition("=")
        stripped = key.strip()
        if equals and stripped:
            return self._add(stripped, key, value, override_name(override), "set")
        hint = f"for example {stripped or 'model.num_heads'}=8"
        return self.complain(
            "an override is written key=value",
            "",
            _place(override_name(override), key, override),
            hint,
        )

    def _add(self, key: str, written: str, value: str, name: str, origin: Origin) -> None:
        """Parse the value of one key or section, and add it.

        Args:
            written: the text before the equals sign, as the user wrote it.
            value: the text after the equals sign.
            name: name of the source in problem messages.
        """
        source = SourceText(name, value, first_column=len(written) + 1, before=f"{written}=")
        is_section = key in sections() or key in free_mappings()
        given = key
        if not is_section:
            key = RENAMED_KEYS.get(key, key)
        if not is_section and key not in leaf_fields() and mapping_of(key) is None:
            return self.add_unknown(key, _place(name, written, f"{written}={value}"))
        try:
            node = parse(source)
        except ConfigError as error:
            self.problems += [
                replace(problem, key="" if is_section else key) for problem in error.problems
            ]
            return None
        if is_section:
            return self.add_section(node, key, source, origin)
        node = node or empty_node()
        self.entries[key] = Entry(key, node, source.span_of(node), origin, source, given)
        return None


@cache
def leaf_fields() -> dict[str, FieldInfo]:
    """Map each dotted key that holds a value, rather than a section, to its schema field, in the
    schema's order.
    """
    return dict(_walk(RunConfig, ""))


@cache
def free_mappings() -> frozenset[str]:
    """Return the keys of mappings in which the user chooses the names, such as workload_options."""
    return frozenset(
        key for key, field in leaf_fields().items() if get_origin(field.annotation) is dict
    )


def mapping_of(key: str) -> str | None:
    """Return the mapping with free names (see `free_mappings`) that contains a dotted key, or None.

    For example, workload_options contains workload_options.width.
    """
    parent, dot, name = key.rpartition(".")
    if dot and parent in free_mappings() and OPTION_NAME.fullmatch(name):
        return parent
    return None


def annotation_of(key: str) -> Any:
    mapping = mapping_of(key)
    if mapping is None:
        return leaf_fields()[key].annotation
    return get_args(leaf_fields()[mapping].annotation)[1]


@cache
def sections() -> dict[str, type[BaseModel]]:
    """Map each section's dotted name to its pydantic model; "" names the whole configuration."""
    found: dict[str, type[BaseModel]] = {"": RunConfig}
    pending = [""]
    while pending:
        parent = pending.pop()
        for name, info in found[parent].model_fields.items():
            if section := _section_of(info):
                if parent:
                    key = f"{parent}.{name}"
                else:
                    key = name
                found[key] = section
                pending.append(key)
    return found


def environment_source(key: str) -> str:
    return ENVIRONMENT + key.replace(".", "__").upper()


def override_name(override: str) -> str:
    """Format an override for messages: "--set key=value", with unprintable characters escaped."""
    if override.isprintable():
        return f"--set {override}"
    return f"--set {override!r}"


def _what_goes_into(section: str) -> str:
    if section in free_mappings():
        texts = get_args(leaf_fields()[section].annotation)[1] is str
        if texts:
            return "any names, each with a text"
        return "any names, each with a number, a text, true or false"
    return f"known keys: {', '.join(sections()[section].model_fields)}"


def _intended_variable(name: str) -> str:
    """Return the variable meant by a misspelled name such as EBBFLOW_TRAINING__MAX_STEPS.

    Return "" if no variable is similar enough.
    """
    upper = name.upper()
    if not upper.startswith(_ONE_UNDERSCORE):
        return ""
    variables = {_plain(variable): variable for variable in map(_variable_of, leaf_fields())}
    written = _plain(upper)
    intended = variables.get(written)
    if intended is None and any(
        written.startswith(_plain(f"{_ONE_UNDERSCORE}{section}_"))
        for section in sections()
        if section
    ):
        close = difflib.get_close_matches(written, variables, n=1, cutoff=_NEAR)
        intended = variables[close[0]] if close else None
    if (
        intended is None
        or intended == name
        or (name.startswith(PREFIX) and written != _plain(intended))
    ):
        return ""  # an unknown key below EBBFLOW__ is reported where it is added
    return intended


def _variable_of(key: str) -> str:
    return PREFIX + key.replace(".", "__").upper()


def _plain(variable: str) -> str:
    """Reduce a variable's name to its letters and digits."""
    return re.sub(r"[^A-Z0-9]", "", variable.upper())


def _meant(key: str) -> str:  # noqa: PLR0911 (one return for each mistake, in the order of their precedence)
    """Return a hint for an unknown key, such as a similar key, its right section, or the known
    keys.
    """
    mapping = next((name for name in free_mappings() if key.startswith(f"{name}.")), None)
    if mapping is not None and mapping_of(key):
        return (
            f"write {key.removeprefix(f'{mapping}.')} on a line of its own in the section {mapping}"
        )
    if mapping is not None:
        return f"a name in {mapping} has letters, digits, '_' and '-' and begins with a letter"
    known = [*leaf_fields(), *(section for section in sections() if section)]
    if key in known:  # wrong nesting: `model.hidden_size: 64` as one key of the file
        parent, _, leaf = key.rpartition(".")
        return f"write {leaf} on a line of its own in the section {parent}"
    section, _, name = key.rpartition(".")
    while section not in sections():  # an override `modle.hidden_size`: only `modle` is wrong
        section, _, name = section.rpartition(".")
    siblings = list(sections()[section].model_fields)
    if section:
        prefix = f"{section}."
    else:
        prefix = ""
    synonym = _SYNONYMS.get(key.rpartition(".")[2])
    if synonym is not None:
        return f"did you mean {synonym}?"
    sibling = closest_match(name, siblings)
    mended = f"{prefix}{sibling}{key[len(prefix + name) :]}"
    if sibling and mended.count(".") > prefix.count(".") and mended in known:
        return f"did you mean {mended}?"
    wanted = key.rpartition(".")[2]
    elsewhere = [other for other in known if other.rpartition(".")[2] == wanted]
    if elsewhere:
        return "it belongs to " + " or to ".join(
            f"{_parent(other)}: {other}" for other in elsewhere
        )
    if sibling:
        return f"did you mean {prefix}{sibling}?"
    leaf = closest_match(wanted, sorted({other.rpartition(".")[2] for other in known}))
    if leaf:
        return (
            "did you mean "
            + " or ".join(other for other in known if other.rpartition(".")[2] == leaf)
            + "?"
        )
    return f"known keys{' of ' + section if section else ''}: {', '.join(siblings)}"


def _parent(key: str) -> str:
    return key.rpartition(".")[0] or "the top level"


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        if section := _section_of(info):
            yield from _walk(section, f"{prefix}{name}.")
        else:
            yield prefix + name, info


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _place(name: str, written: str, text: str) -> SourceSpan:
    return SourceSpan(
        source=name, line=1, column=1, length=max(1, len(written)), text=text.split("\n")[0]
    )
