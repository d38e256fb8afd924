"""Write the pages of the reference, and the exit codes in manifests, that follow from the code:
`python docs/generate.py`.

A test compares them.
"""

import ast
import inspect
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
MANIFESTS = [
    DOCS.parent / "ebbflow" / "infra" / "kubernetes" / name
    for name in ("supervisor.yaml", "cronjob.yaml")
]
_EXIT_CODES = re.compile(r"(?<=operator: In\n)(?P<indent> +)values: \[[\d, ]*\]")
HEAD = """# All configuration keys

Written by `python docs/generate.py` from `ebbflow/core/config/schema.py`; do not edit. [Configuration](configuration.md)
explains files, overrides and errors.
"""

SYMPTOMS_HEAD = """# Symptoms, causes and fixes

Written by `python docs/generate.py` from the rules in `ebbflow/diagnose/rules/`; do not edit. `ebbflow diagnose` finds
these symptoms in logs, and `ebbflow explain ID` prints one of them. The numbers of guides are those of the five guides
that this project answers.
"""

METRICS_HEAD = """# All metrics and alerts

Written by `python docs/generate.py` from `ebbflow/core/metrics.py` and `ebbflow/observe/rules.yaml`; do not edit. [Metrics and
logs](observability.md) explains how to get them.

## Of a running node

At `/metrics` of each node. Constant labels: `job`, `node`.
"""


# The page that explains a command, where there is more to say than its help does
_GUIDES = {
    "run": "start",
    "resume": "faults",
    "supervise": "faults",
    "plan": "money",
    "preflight": "preflight",
    "config": "configuration",
    "jobs": "bill",
    "watch": "bill",
    "logs": "observability",
    "stop": "questions",
    "track": "trackers",
    "observe": "observability",
    "report": "bill",
    "card": "metaflow",
    "checkpoints": "checkpoints",
    "diagnose": "troubleshoot",
    "explain": "symptoms",
    "trace": "observability",
    "bundle": "troubleshoot",
    "reconcile": "bill",
    "new": "your-model",
    "examine": "your-model",
    "doctor": "attach",
    "prices": "prices",
    "deploy": "aws",
    "adopt": "configuration",
    "kubernetes": "kubernetes",
    "export": "skypilot",
    "certify": "faults",
    "compare": "parallel",
    "replay": "bill",
    "catalogue": "prices",
    "bench": "benchmarks",
    "soak": "benchmarks",
}

EVENTS_HEAD = """# All events

Written by `python docs/generate.py` from `ebbflow/core/events.py` and `ebbflow/core/event_payloads.py`; do not edit. [Store
layout](store-layout.md) says where the event log is. A line of it is one event in JSON: the fields below, and in `data` those of
its name.
"""

CHECKS_HEAD = """# All preflight checks

Written by `python docs/generate.py` from the checks and from `ebbflow/infra/checks/environment.py`; do not edit.
[Preflight](preflight.md) explains the columns.
"""

EXIT_CODES_HEAD = """# Exit codes

Written by `python docs/generate.py` from `ebbflow/flows/run_help.py`; do not edit. `ebbflow run`, `ebbflow supervise` and
`torchrun -m ebbflow.training` end with one of these. Their meaning never changes. Other commands use 0 for success, 1 for a
negative result (`checkpoints verify` found damage, `reconcile` disagrees, `logs` found no line), 2 for wrong usage, 75 after
Ctrl-C and 141 if the reader of a pipe closed it.
"""

COMMANDS_HEAD = """# Commands

Written by `python docs/generate.py` from `ebbflow/command.py` and `ebbflow/flows/run_help.py`; do not edit. `ebbflow COMMAND
--help` lists all options of a command, and `ebbflow lab` the tools for maintainers, which work without `lab` too. The older spellings `python
flows/train_flow.py run`, `python -m infra …`, `python -m cost …` and `python -m training …` still work in a checkout;
`torchrun … -m ebbflow.training FILE` trains without Metaflow.
"""


def keys_page() -> str:
    """The page with every key, its type, its default and its description."""
    from ebbflow.core.config.json_schema import json_schema

    tree = json_schema()["properties"]
    top = {name: node for name, node in tree.items() if "properties" not in node}
    parts = [HEAD, "## Top level\n", _table("", top)]
    for name, node in tree.items():
        if "properties" in node:
            parts += [
                f"## {name}\n",
                f"{node.get('description', '')}\n",
                _table(f"{name}.", node["properties"]),
            ]
    return "\n".join(parts)


def symptoms_page() -> str:
    """The page with every symptom, its causes with their likelihood, and its fixes."""
    from ebbflow.diagnose.rules import load_rules

    book = load_rules()
    parts = [SYMPTOMS_HEAD]
    for family in book.families:
        parts += [
            f"## {family.title} ({family.name})\n",
            "| id | symptom | causes | fixes | guides |",
            "|---|---|---|---|---|",
        ]
        for rule in (candidate for candidate in book.rules if candidate.family == family.name):
            causes = "; ".join(f"{cause} ({share:.0%})" for cause, share in rule.causes.items())
            keys = [change.describe() for change in rule.keys]
            fixes = "; ".join((*rule.fix, *keys))
            cells = (rule.id, rule.title, causes, fixes, "; ".join(rule.guides))
            parts.append("| " + " | ".join(_plain(cell) for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def metrics_page() -> str:
    """The page with every metric, every recorded series, and every alert with its runbook."""
    import yaml

    from ebbflow.core.metrics import JOB_METRICS, NODE_METRICS
    from ebbflow.observe.command import RULES

    def rows(metrics: Any) -> list[str]:
        found = ["| name | type | labels | meaning |", "|---|---|---|---|"]
        for metric in metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
            found.append(
                f"| `{metric.name}` | {metric.kind.value} | {labels} | "
                f"{metric.help.removesuffix('.')} |"
            )
        return [*found, ""]

    recorded, alerts = (
        group["rules"] for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    )
    parts = [
        METRICS_HEAD,
        *rows(NODE_METRICS),
        "## Of a whole job\n",
        "In `metrics.prom`. Constant label: `job`.\n",
    ]
    parts += [*rows(JOB_METRICS), "## Recorded series\n", "| series | expression |", "|---|---|"]
    parts += [f"| `{rule['record']}` | `{rule['expr']}` |" for rule in recorded]
    parts.append("\n## Alerts\n\nThe text below each alert says what to do.\n")
    for rule in alerts:
        if "for" in rule:
            lasting = f" for {rule['for']}"
        else:
            lasting = ""
        fires = f"`{rule['expr']}`{lasting}. Severity: {rule['labels']['severity']}."
        parts += [f"### {rule['alert']}\n", fires + "\n", rule["annotations"]["description"] + "\n"]
    return "\n".join(parts).rstrip() + "\n"


def checks_page() -> str:
    """The page with every preflight check, and every variable that one of them warns of."""
    from ebbflow.core.preflight import TROUBLES, render_checks
    from ebbflow.flows.checks import all_checks
    from ebbflow.infra.checks.environment import ADVICE

    parts = [
        CHECKS_HEAD,
        render_checks(all_checks()),
        "\n## Misleading variables\n",
        "The check `advice` warns of these if they are set.\n",
        "| variable | why not | instead |",
        "|---|---|---|",
    ]
    for advice in ADVICE:
        parts.append(f"| `{advice.variable}` | {advice.why} | {advice.instead} |")
    parts += ["\n## What they catch\n", "| id | trouble |", "|---|---|"]
    parts += [f"| {trouble} | {text} |" for trouble, text in TROUBLES.items()]
    return "\n".join(parts) + "\n"


def events_page() -> str:
    """The page with every event by its writer, and the fields of its data."""
    from ebbflow.core import event_payloads, events

    payloads = _read_fields(Path(event_payloads.__file__))
    fields = _read_fields(Path(events.__file__))["Event"]
    parts = [EVENTS_HEAD, "## Fields of every event\n", *_field_rows(fields)]
    for writer, names in _events_by_writer(Path(events.__file__)):
        parts.append(f"## {writer}\n")
        for name in names:
            payload = events.PAYLOADS[name]
            parts += [f"### {name}\n", f"{inspect.getdoc(payload)}\n"]
            if payloads[payload.__name__]:
                parts += _field_rows(payloads[payload.__name__])
    parts.append("## Parts of data\n")
    used = {payload.__name__ for payload in events.PAYLOADS.values()}
    for kind, kind_fields in payloads.items():
        if kind_fields and kind not in used:
            described = inspect.getdoc(getattr(event_payloads, kind))
            parts += [f"### {kind}\n", f"{described}\n", *_field_rows(kind_fields)]
    for kind in (event_payloads.LedgerClass, event_payloads.GuardAction):
        values = ", ".join(f"`{member}`" for member in kind)
        parts += [f"### {kind.__name__}\n", f"{values}\n"]
    return "\n".join(parts).rstrip() + "\n"


@dataclass(frozen=True)
class EventField:
    """Field of an event or of its data."""

    name: str
    kind: str
    meaning: str


def _field_rows(fields: list[EventField]) -> list[str]:
    rows = ["| field | type | meaning |", "|---|---|---|"]
    rows += [f"| `{field.name}` | {field.kind} | {field.meaning} |" for field in fields]
    return [*rows, ""]


def _read_fields(path: Path) -> dict[str, list[EventField]]:
    """Read the fields of each class of a module, with the comments as their meaning.

    A comment above a field belongs to it. One that begins with "Of" belongs to the fields below too.
    """
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    classes: dict[str, list[EventField]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        group = ""
        fields = classes.setdefault(node.name, [])
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or statement.end_lineno is None:
                continue
            kind, alias = _event_type(statement.annotation)
            if kind == "ClassVar":
                continue
            above = _comment_above(lines, statement.lineno - 1)
            if above.startswith("Of ") and not above.endswith("`"):
                group = f"{above[0].lower()}{above[1:]}"
                above = ""
            beside = lines[statement.end_lineno - 1].partition("  # ")[2]
            meaning = "; ".join(part for part in (above, beside, group) if part)
            name = alias or ast.unparse(statement.target)
            fields.append(EventField(name, kind, meaning.replace("|", "\\|")))
    return classes


def _comment_above(lines: list[str], number: int) -> str:
    """The comment in the lines right above line `number`, counted from 0."""
    words: list[str] = []
    while lines[number - 1].lstrip().startswith("# "):
        number -= 1
        words.insert(0, lines[number].strip().removeprefix("# "))
    return " ".join(words)


# Names of the types of event_payloads, as JSON values
_EVENT_TYPES = {
    "Text": "text",
    "AnyText": "text",
    "TextElement": "text",
    "Integer": "integer",
    "AnyInteger": "integer",
    "IntegerElement": "integer",
    "Number": "number",
    "AnyNumber": "number",
    "NumberElement": "number",
    "Measurement": "number",
    "Loss": "number",
    "Dollars": "dollars, as number or text",
    "PricePart": "number, or dollars as text",
    "Flag": "true or false",
    "Any": "any",
    "str": "text",
    "OptionalAction": "GuardAction",
    "SecondsByClass": "object of numbers by LedgerClass",
}


def _event_type(annotation: ast.expr) -> tuple[str, str]:
    """The type of a field in words, and the field's name in JSON if it is another; else ""."""
    if isinstance(annotation, ast.BinOp):  # `| None`
        return _event_type(annotation.left)
    if isinstance(annotation, ast.Subscript):
        outer = ast.unparse(annotation.value)
        parts = (
            annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        )
        last = _event_type(parts[-1])[0]
        if outer == "Annotated":
            alias = ast.unparse(parts[-1]).partition("validation_alias='")[2].partition("'")[0]
            return _event_type(parts[0])[0], alias
        if outer == "ClassVar":
            return outer, ""
        return (f"list of {last}" if outer == "list" else f"object of {last} by name"), ""
    name = ast.unparse(annotation)
    if name.startswith("Required"):
        bare = name.removeprefix("Required")
        known = {"Class": "LedgerClass", "Outcome": "[outcome](exit-codes.md)"}
        return f"{_EVENT_TYPES.get(bare) or known[bare]}, required", ""
    return _EVENT_TYPES.get(name, {"int": "integer"}.get(name, name)), ""


def _events_by_writer(path: Path) -> list[tuple[str, list[str]]]:
    """The names of the events below each comment "Written by …" of the module."""
    found: list[tuple[str, list[str]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# Written by"):
            found.append((line.removeprefix("# "), []))
        constant = re.fullmatch(r'[A-Z_]+ = "([a-z_]+)"', line)
        if constant and found:
            found[-1][1].append(constant[1])
    return found


def exit_codes_page() -> str:
    """The page with every exit code of a job, its meaning and what to do."""
    from ebbflow.flows.run_help import EXIT_CODE_HELP

    parts = [EXIT_CODES_HEAD, "| code | outcome | meaning | what to do |", "|---|---|---|---|"]
    for outcome, (meaning, advice) in EXIT_CODE_HELP.items():
        parts.append(f"| {outcome.exit_code} | `{outcome}` | {meaning} | {advice} |")
    return "\n".join(parts) + "\n"


def commands_page() -> str:
    """The page with every command by its purpose, and the options of `ebbflow run`."""
    from ebbflow.command import COMMANDS, Group
    from ebbflow.flows.run_help import SECTIONS

    parts = [COMMANDS_HEAD]
    for group in Group:
        parts += [f"## {_headline(group.value)}\n", "| command | does | more |", "|---|---|---|"]
        prefix = "ebbflow lab" if group is Group.LAB else "ebbflow"
        for name, command in COMMANDS.items():
            if command.group is group:
                guide = f"[{_GUIDES[name]}]({_GUIDES[name]}.md)" if name in _GUIDES else ""
                parts.append(f"| `{prefix} {name}` | {_plain(command.help)} | {guide} |")
        parts.append("")
    parts.append("## Options of `ebbflow run`\n")
    for heading, options in SECTIONS.items():
        parts += [f"| {heading} | |", "|---|---|"]
        for option, text in options.items():
            cell = option.replace("|", "\\|")
            parts.append(f"| `{cell}` | {_plain(text)} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def manifest(text: str) -> str:
    """The text of a manifest with the exit codes after which its supervisor is not started again."""
    from ebbflow.core.errors import Outcome

    codes = sorted(outcome.exit_code for outcome in Outcome if outcome.is_final)
    return _EXIT_CODES.sub(rf"\g<indent>values: {codes}", text)


def _table(prefix: str, nodes: dict[str, Any]) -> str:
    rows = ["| key | type | default | what it does |", "|---|---|---|---|"]
    for key, node in _leaves(prefix, nodes):
        if "default" in node:
            default = json.dumps(node["default"])
        else:
            default = "required"
        cells = (f"`{key}`", _type(node), f"`{default}`", node.get("description", ""))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _leaves(prefix: str, nodes: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for name, node in nodes.items():
        if node.get("deprecated"):
            continue
        if "properties" in node:
            found += _leaves(f"{prefix}{name}.", node["properties"])
        else:
            found.append((f"{prefix}{name}", node))
            if "properties" in node.get("items", {}):
                found += _leaves(f"{prefix}{name}[].", node["items"]["properties"])
    return found


def _type(node: dict[str, Any]) -> str:
    """The kind and range of a value, such as "integer ≥ 1"."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type(part) for part in node["anyOf"]))
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    kind = node.get("type", "any")
    if isinstance(kind, list):
        kind = " or ".join(kind)
    if kind == "array":
        return f"list of {_type(node['items'])}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return " ".join(
        [kind, *(f"{sign} {node[name]:g}" for name, sign in signs.items() if name in node)]
    )


def _headline(text: str) -> str:
    """The heading of a group of commands, without the command that some name."""
    title = text.partition(":")[0]
    return title[0].upper() + title[1:]


def _plain(text: str) -> str:
    """The text with what Markdown would interpret escaped."""
    for mark in "\\|<>*_[]`":
        text = text.replace(mark, f"\\{mark}")
    return text


PAGES = {
    "configuration-keys.md": keys_page,
    "symptoms.md": symptoms_page,
    "metrics.md": metrics_page,
    "preflight-checks.md": checks_page,
    "commands.md": commands_page,
    "exit-codes.md": exit_codes_page,
    "events.md": events_page,
}

if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))
    for page_name, render in PAGES.items():
        (DOCS / page_name).write_text(render(), encoding="utf-8")
    for path in MANIFESTS:
        path.write_text(manifest(path.read_text(encoding="utf-8")), encoding="utf-8")
