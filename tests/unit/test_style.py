"""Style rules that ruff cannot check. Each has its reason, and snippets that it allows and finds."""

from __future__ import annotations

import ast
import enum
import functools
import io
import re
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard, TypeVar, cast

import pytest

ROOT = Path(__file__).resolve().parents[2]
AREAS = {
    "product": ("ebbflow",),
    "tests": ("tests",),
    "other": ("benchmarks", "docs", "examples"),
}

# Rules that an area does not keep yet, with the number of findings that it may have until it does.
# After an improvement, lower the number or remove the line; never raise one.
AT_MOST = {
    ("product", "walrus-in-expression"): 29,
    ("product", "nested-conditional-expression"): 1,
    ("product", "nested-comprehension"): 55,
    ("product", "named-lambda"): 8,
    ("product", "argument-dict"): 37,
    ("product", "empty-loop-name"): 95,
    ("product", "constants-first"): 44,
    ("product", "public-first"): 77,
    ("tests", "walrus-in-expression"): 16,
    ("tests", "named-lambda"): 4,
    ("tests", "argument-dict"): 145,
    ("tests", "empty-loop-name"): 9,
    ("tests", "constants-first"): 12,
    ("tests", "public-first"): 9,
    ("other", "argument-dict"): 3,
}

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (ast.Module, *FUNCTIONS)
Node = TypeVar("Node", bound=ast.AST)
# `item`, `each` and `found` are no better than `one`: they name the loop and not what it goes over.
EMPTY_NAMES = {"one", "it", "each", "item", "own", "found"}
# Kept apart, so that a search for such comments does not find the snippets below.
FMT = "fmt"
FORMATTER_COMMENT = re.compile(r"#\s*fmt:\s*(skip|off)")
OWN_MODULES = {"ebbflow", "flows", "training", "cost", "infra", "benchmarks", "tests"}


class Source:
    """A parsed file, with its nodes by their type."""

    def __init__(self, text: str) -> None:
        self.text = text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            self.tree = ast.parse(text)
        self._nodes: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        for node in ast.walk(self.tree):
            self._nodes[type(node)].append(node)

    def nodes(self, *types: type[Node]) -> Iterator[Node]:
        for node_type in types:
            yield from cast(list[Node], self._nodes[node_type])

    def count_code_lines(self) -> int:
        """The number of lines that are neither blank, comment nor docstring."""
        documented: set[int] = set()
        for node in self.nodes(ast.Module, ast.ClassDef, *FUNCTIONS):
            documented.update(_docstring_lines(node))
        count = 0
        for number, line in enumerate(self.text.splitlines(), start=1):
            stripped = line.strip()
            if stripped and not stripped.startswith("#") and number not in documented:
                count += 1
        return count


class Kind(enum.IntEnum):
    """Kinds of top-level statements, in their order in a file."""

    CONSTANT = 0
    PUBLIC_TYPE = 1
    PUBLIC_FUNCTION = 2
    PRIVATE = 3


@dataclass(frozen=True)
class Statement:
    """A top-level statement.

    Args:
        node: The statement.
        place: Its number in the file.
        kind: What it is. Statements that define nothing count as constants.
        defines: The names that it defines.
        needs: The names that it reads when the file is imported.
    """

    node: ast.stmt
    place: int
    kind: Kind
    defines: frozenset[str]
    needs: frozenset[str]

    @classmethod
    def of(cls, node: ast.stmt, place: int) -> Statement:
        defines: frozenset[str] = frozenset()
        kind = Kind.CONSTANT
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defines = frozenset([node.name])
            is_private = node.name.startswith("_") and not node.name.startswith("__")
            if is_private:
                kind = Kind.PRIVATE
            elif isinstance(node, ast.ClassDef):
                kind = Kind.PUBLIC_TYPE
            else:
                kind = Kind.PUBLIC_FUNCTION
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            defines = frozenset(_names(node, ast.Store))
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_main_block(node):
            needs: frozenset[str] = frozenset()
        else:
            needs = frozenset(_names_needed_at_import(node))
        return cls(node=node, place=place, kind=kind, defines=defines, needs=needs)


@dataclass(frozen=True)
class Rule:
    """A style rule.

    Args:
        name: The rule's id in a test's parameters and in `AT_MOST`.
        reason: Why the rule exists, in one line.
        find: Returns the lines of a file that break the rule.
        allowed: A snippet that keeps the rule.
        broken: Snippets that break it, each once.
        per_thousand: Findings that 1,000 code lines may have.
        areas: The areas in which the rule holds.
    """

    name: str
    reason: str
    find: Callable[[Source], Iterable[int]]
    allowed: str
    broken: tuple[str, ...]
    per_thousand: float = 0
    areas: tuple[str, ...] = tuple(AREAS)


@dataclass
class Findings:
    """The violations of all rules in an area, as `path:line` by the rule's name."""

    code_lines: int
    places: dict[str, list[str]]


def find_tuple_assignments(source: Source) -> Iterator[int]:
    for node in source.nodes(ast.Assign):
        target = node.targets[0]
        value = node.value
        if not isinstance(target, ast.Tuple | ast.List):
            continue
        if not isinstance(value, ast.Tuple | ast.List):
            continue
        names = sorted(ast.unparse(element) for element in target.elts)
        values = sorted(ast.unparse(element) for element in value.elts)
        is_swap = names == values
        if not is_swap:
            yield node.lineno


def find_walrus(source: Source) -> Iterator[int]:
    for node in source.nodes(ast.NamedExpr):
        yield node.lineno


def find_walrus_in_expressions(source: Source) -> Iterator[int]:
    whole_tests = {node.test for node in source.nodes(ast.If, ast.While)}
    for node in source.nodes(ast.NamedExpr):
        if node not in whole_tests:
            yield node.lineno


def find_conditional_expressions(source: Source) -> Iterator[int]:
    for node in source.nodes(ast.IfExp):
        yield node.lineno


def find_nested_conditional_expressions(source: Source) -> Iterator[int]:
    for node in source.nodes(ast.IfExp):
        if _contains(node, (ast.IfExp,)):
            yield node.lineno


def find_nested_comprehensions(source: Source) -> Iterator[int]:
    for node in source.nodes(*COMPREHENSIONS):
        if len(node.generators) > 1 or _contains(node, COMPREHENSIONS):
            yield node.lineno


def find_formatter_comments(source: Source) -> Iterator[int]:
    if FORMATTER_COMMENT.search(source.text) is None:
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and FORMATTER_COMMENT.match(token.string):
            yield token.start[0]


def find_named_lambdas(source: Source) -> Iterator[int]:
    for node in source.nodes(ast.Assign, ast.AnnAssign, ast.NamedExpr):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Lambda):
            yield node.lineno


def find_argument_dicts(source: Source) -> Iterator[int]:
    """Find dicts of constant keys that are only passed with `**`, in place or by a name."""
    passed: set[ast.AST] = set()
    for keyword in source.nodes(ast.keyword):
        if keyword.arg is None:
            passed.add(keyword.value)
            if _replaces_arguments(keyword.value):
                yield keyword.value.lineno
    if not passed:
        return
    for scope in source.nodes(*SCOPES):
        yield from _find_named_argument_dicts(scope, passed)


def find_empty_loop_names(source: Source) -> Iterator[int]:
    for node in source.nodes(ast.comprehension, ast.For, ast.AsyncFor):
        for target in ast.walk(node.target):
            if isinstance(target, ast.Name) and target.id in EMPTY_NAMES:
                yield target.lineno


def find_own_imports_by_string(source: Source) -> Iterator[int]:
    constants: dict[str, ast.expr] = {}
    for statement in source.tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            constants[statement.targets[0].id] = statement.value
    for node in source.nodes(ast.Call):
        function = ast.unparse(node.func).rpartition(".")[2]
        if function not in {"import_module", "__import__"} or not node.args:
            continue
        module = node.args[0]
        if isinstance(module, ast.Name):
            module = constants.get(module.id, module)
        if _names_own_module(module):
            yield node.lineno


def find_late_constants(source: Source) -> Iterator[int]:
    for statement in _out_of_order(source):
        if statement.kind is Kind.CONSTANT:
            yield statement.node.lineno


def find_late_definitions(source: Source) -> Iterator[int]:
    for statement in _out_of_order(source):
        if statement.kind is not Kind.CONSTANT:
            yield statement.node.lineno


def find_any(source: Source) -> Iterator[int]:
    for node in source.nodes(ast.Name):
        if node.id == "Any":
            yield node.lineno


RULES = (
    Rule(
        "tuple-assignment",
        "Values that have nothing in common are read one after the other.",
        find_tuple_assignments,
        allowed="a, b = b, a\nc, d = load()\ne = 1\n",
        broken=("a, b = 1, load()\n", "[a, b] = [1, 2]\n", "(a, b), c = (1, 2), 3\n"),
        per_thousand=1,
    ),
    Rule(
        "walrus",
        "An assignment is looked for at the start of a line.",
        find_walrus,
        allowed="size = len(names)\nif size > 1:\n    pass\n",
        broken=("if size := len(names):\n    pass\n",),
        per_thousand=2,
    ),
    Rule(
        "walrus-in-expression",
        "An assignment inside a larger expression is easily missed.",
        find_walrus_in_expressions,
        allowed="if size := len(names):\n    pass\nwhile block := read():\n    pass\n",
        broken=(
            "if ready and (size := len(names)):\n    pass\n",
            "if (size := len(names)) > 1:\n    pass\n",
            "sizes = [size for name in names if (size := len(name))]\n",
        ),
    ),
    Rule(
        "conditional-expression",
        "Only two short values are as easy to read on one line as in an if statement.",
        find_conditional_expressions,
        allowed="if ready:\n    state = 1\nelse:\n    state = 2\n",
        broken=("state = 1 if ready else 2\n",),
        per_thousand=12,
    ),
    Rule(
        "nested-conditional-expression",
        "A reader has to match every else with its if.",
        find_nested_conditional_expressions,
        allowed="state = 1 if ready else 2\nother = 1 if late else 2\n",
        broken=(
            "state = 1 if ready else 2 if late else 3\n",
            "state = 1 if (a if b else c) else 2\n",
            "state = 1 if ready else max(2, 3 if late else 4)\n",
        ),
    ),
    Rule(
        "nested-comprehension",
        "Two loops in one expression are read from the middle to both ends.",
        find_nested_comprehensions,
        allowed="a = [f(x) for x in xs]\nb = {x: 1 for x in xs if x}\n",
        broken=(
            "a = [y for x in xs for y in x]\n",
            "a = [list(y for y in x) for x in xs]\n",
            "a = {x: 1 for x in {y for y in ys}}\n",
        ),
        per_thousand=0.8,
    ),
    Rule(
        "formatter-comment",
        "The formatter decides alone, so that a layout is never discussed.",
        find_formatter_comments,
        allowed=f'text = "# {FMT}: skip"  # a comment\n',
        broken=(f"a = [1,2]  # {FMT}: skip\n", f"# {FMT}: off\na = 1\n"),
    ),
    Rule(
        "named-lambda",
        "A def has a name in tracebacks and room for types.",
        find_named_lambdas,
        allowed="rows.sort(key=lambda row: row.name)\nclock.now = lambda: 0\n",
        broken=("f = lambda x: x\n", "f: Callable = lambda x: x\n"),
    ),
    Rule(
        "argument-dict",
        "Arguments that are passed by name are found by a search and checked by pyright.",
        find_argument_dicts,
        allowed=(
            "known = {'a': 1}\nf(**known)\nprint(known)\n"
            "fields = {key: 1}\nf(**fields)\n"
            "def g(**options):\n    f(**options)\n    f(**{name: 1})\n"
        ),
        broken=(
            "parts = {'a': 1}\nf(**parts)\n",
            "def g():\n    parts = dict(a=1)\n    f(**parts)\n    h(**parts)\n",
            "parts = {}\nparts['a'] = 1\nf(**parts)\n",
            "f(**{'a': 1})\n",
            "f(**({'a': 1} if ready else {}))\n",
        ),
    ),
    Rule(
        "empty-loop-name",
        "A loop variable says what it holds.",
        find_empty_loop_names,
        allowed="for pool in pools:\n    pass\na = [item.name for entry in entries]\n",
        broken=(
            "for one in pools:\n    pass\n",
            "a = [it for it in pools]\n",
            "for place, each in enumerate(pools):\n    pass\n",
        ),
    ),
    Rule(
        "constants-first",
        "A reader looks for a file's constants at its top.",
        find_late_constants,
        allowed="import a\nA = 1\nB: int = 2\ndef c(): pass\nif a:\n    c()\n",
        broken=(
            "def c(): pass\nA = 1\n",
            "class B: pass\nA: int = 1\n",
            "def c(): pass\nif __name__ == '__main__':\n    c()\nA = 1\n",
        ),
    ),
    Rule(
        "public-first",
        "A file is read from what it offers to how that works: types, functions, private ones.",
        find_late_definitions,
        allowed="A = 1\nclass B: pass\ndef c(): pass\ndef _d(): pass\nclass _E: pass\n",
        broken=(
            "def c(): pass\nclass B: pass\n",
            "def _d(): pass\ndef c(): pass\n",
            "class _B: pass\nclass B: pass\n",
        ),
    ),
    Rule(
        "import-by-string",
        "Types and searches end at a module that is named in a string.",
        find_own_imports_by_string,
        allowed="import_module('numpy')\nimport_module(name)\nimport ebbflow.tryout.doctor\n",
        broken=(
            "import_module('ebbflow.tryout.doctor')\n",
            "def f():\n    return importlib.import_module(f'ebbflow.{name}')\n",
            "MODULE = 'ebbflow.tryout.doctor'\nimportlib.import_module(MODULE)\n",
            "import_module(f'{__name__}.{name}')\n",
            "__import__('tests.support')\n",
        ),
    ),
    Rule(
        "any",
        "pyright checks nothing of what is Any.",
        find_any,
        allowed="def f(a: int) -> int:\n    return a\n",
        broken=("a: Any = 1\n",),
        per_thousand=8,
        areas=("product",),
    ),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_allows_and_finds_its_snippets(rule: Rule) -> None:
    assert list(rule.find(Source(rule.allowed))) == []
    for snippet in rule.broken:
        assert len(list(rule.find(Source(snippet)))) == 1, snippet


@pytest.mark.parametrize(
    "text",
    [
        "def f(): pass\nCHECKS = (f,)\n",
        "def f(): return _g()\ndef _g(): pass\nTABLE = f()\nSIZE = len(TABLE)\n",
        "def _register(f): return f\n@_register\ndef f(): pass\n",
        "def _g(): pass\ndef f(): _g()\nTABLE = f()\nclass A: pass\ndef h(): pass\n",
        "class _Base: pass\nclass A(_Base): pass\nclass B: pass\n",
        "class _Part: pass\nclass A:\n    part: _Part\n",
        "def _default(): pass\nclass A:\n    def f(self, a=_default()): pass\n",
        "def f(): pass\nfor name in f():\n    print(name)\n",
    ],
)
def test_file_order_follows_what_is_needed_at_import(text: str) -> None:
    assert list(_out_of_order(Source(text))) == []


@pytest.mark.parametrize(
    "text",
    [
        # What is only used when it is called may be below.
        "def _g(): pass\ndef f(): return _g()\n",
        "def f(): pass\ndef g(): f()\nSIZE = 1\n",
        # What another statement needs excuses no third one.
        "def f(): pass\nTABLE = f()\ndef _g(): pass\ndef h(): pass\n",
    ],
)
def test_file_order_does_not_follow_what_is_needed_later(text: str) -> None:
    assert len(list(_out_of_order(Source(text)))) == 1


def test_code_lines_are_those_with_code() -> None:
    text = '"""Doc."""\n\n# why\nA = """a\n\n# text\n"""\ndef f():\n    """Doc\n\n    more"""\n'
    text += "    return 1  # why\n"

    # Like the formatter's, the count does not know that a line of a text begins with "#".
    assert Source(text).count_code_lines() == 4


@pytest.mark.parametrize("area", AREAS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_code_keeps_the_style_rule(rule: Rule, area: str) -> None:
    if area not in rule.areas:
        pytest.skip(f"{rule.name} is no rule for this area")
    findings = find_violations(area)
    limit = int(rule.per_thousand * findings.code_lines / 1000)
    limit = AT_MOST.get((area, rule.name), limit)

    places = findings.places[rule.name]

    assert len(places) <= limit, (
        f"{rule.name}: {rule.reason} {len(places)} findings, at most {limit}:\n" + "\n".join(places)
    )


@functools.cache
def find_violations(area: str) -> Findings:
    """Read each file of an area once for all rules."""
    findings = Findings(code_lines=0, places=defaultdict(list))
    for folder in AREAS[area]:
        for path in list_python_files(ROOT / folder):
            source = Source(path.read_text(encoding="utf-8"))
            findings.code_lines += source.count_code_lines()
            name = path.relative_to(ROOT)
            for rule in RULES:
                lines = sorted(rule.find(source))
                findings.places[rule.name] += [f"{name}:{line}" for line in lines]
    return findings


def list_python_files(folder: Path) -> list[Path]:
    """List the Python files below a folder. Links are not followed, so that each counts once."""
    paths: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name.startswith("."):
            continue
        if path.is_dir():
            paths += list_python_files(path)
        elif path.suffix == ".py":
            paths.append(path)
    return paths


def _docstring_lines(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> range:
    if ast.get_docstring(node, clean=False) is None:
        return range(0)
    docstring = node.body[0]
    return range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)


def _contains(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(isinstance(child, kinds) for child in ast.walk(node) if child is not node)


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    names: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, context):
            names.add(child.id)
    return names


def _is_main_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in _names(node.test, ast.Load)


def _names_needed_at_import(node: ast.stmt) -> set[str]:
    """Names that a statement reads when it runs. A function's body does not run, a class's does."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [default for default in node.args.kw_defaults if default is not None]
        parts: list[ast.AST] = [*node.decorator_list, *node.args.defaults, *defaults]
        return set().union(*(_names(part, ast.Load) for part in parts))
    if isinstance(node, ast.ClassDef):
        names: set[str] = set()
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            names |= _names(part, ast.Load)
        for statement in node.body:
            names |= _names_needed_at_import(statement)
        return names
    return _names(node, ast.Load)


def _out_of_order(source: Source) -> Iterator[Statement]:
    """Yield top-level statements that follow one of a later kind without needing to.

    A statement may follow what it needs when the file is imported, such as a table of functions
    or a class with a private base. What an earlier kind needs in this way may come before it,
    together with all that it uses in turn.
    """
    statements = [Statement.of(node, place) for place, node in enumerate(source.tree.body)]
    definitions: dict[str, Statement] = {}
    for statement in statements:
        for name in statement.defines:
            definitions[name] = statement
    needed_early: set[int] = set()
    follows_need: set[int] = set()
    for statement in statements:
        for name in statement.needs:
            needed = definitions.get(name)
            if needed is None or needed.place >= statement.place:
                continue
            if needed.kind > statement.kind:
                follows_need.add(statement.place)
                needed_early.add(needed.place)
                needed_early |= _places_used_above(statement.place, needed, definitions)
            elif needed.place in follows_need:
                follows_need.add(statement.place)
    latest = Kind.CONSTANT
    for statement in statements:
        if not statement.defines:
            continue
        if statement.kind < latest and statement.place not in follows_need:
            yield statement
        if statement.place not in needed_early:
            latest = max(latest, statement.kind)


def _places_used_above(
    place: int, statement: Statement, definitions: dict[str, Statement]
) -> set[int]:
    """Places of all definitions above a place that a statement uses, directly or by others."""
    places: set[int] = set()
    pending = [statement]
    while pending:
        for name in _names(pending.pop().node, ast.Load):
            used = definitions.get(name)
            if used is not None and used.place < place and used.place not in places:
                places.add(used.place)
                pending.append(used)
    return places


def _replaces_arguments(value: ast.expr) -> bool:
    """True for a dict whose keys could be written as the names of arguments."""
    if isinstance(value, ast.IfExp):
        return _replaces_arguments(value.body) or _replaces_arguments(value.orelse)
    if isinstance(value, ast.Dict):
        keys = [key.value for key in value.keys if isinstance(key, ast.Constant)]
        return len(keys) == len(value.keys) > 0
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "dict" and not value.args
    return False


def _builds_arguments(value: ast.expr | None) -> bool:
    is_empty_dict = isinstance(value, ast.Dict) and not value.keys
    return value is not None and (is_empty_dict or _replaces_arguments(value))


def _fills_dict(node: ast.AST) -> TypeGuard[ast.Subscript]:
    """True for the target of `parts["name"] = value`."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Store):
        return False
    return isinstance(node.slice, ast.Constant)


def _loads_name(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _find_named_argument_dicts(scope: ast.AST, passed: set[ast.AST]) -> Iterator[int]:
    """Find the names of a scope that hold a dict whose only use is among those with `**`."""
    built: dict[str, int] = {}
    for node in _own_nodes(scope):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and _builds_arguments(node.value):
            built[target.id] = node.lineno
    if not built:
        return
    uses = [node for node in ast.walk(scope) if _loads_name(node)]
    filled = {node.value for node in ast.walk(scope) if _fills_dict(node)}
    used_otherwise = {node.id for node in uses if node not in passed | filled}
    used = {node.id for node in uses if node in passed}
    for name in used - used_otherwise:
        if name in built:
            yield built[name]


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the functions and classes inside it."""
    pending = list(ast.iter_child_nodes(scope))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)


def _names_own_module(value: ast.expr) -> bool:
    """True for a text whose first part is the name of one of our packages."""
    if isinstance(value, ast.JoinedStr):
        value = value.values[0]
    if isinstance(value, ast.FormattedValue):
        return "__name__" in _names(value, ast.Load)
    if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
        return False
    return value.value.split(".")[0] in OWN_MODULES
