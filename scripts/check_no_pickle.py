"""The no-pickle rule: nothing in the tree may turn bytes from a peer or a file into code (F48).

    python scripts/check_no_pickle.py runtime transport …

Reads the syntax tree of every Python file below the given folders, resolves import aliases, and prints one line for
each violation. Exit code 0: none, 1: some.

Refused: modules that unpickle or unmarshal, `torch.load` and its relatives, pandas' and numpy's pickling readers,
`yaml.load`, pyzmq's pickling sends, and the built-ins that run text. A comment cannot silence it: whoever needs an
exception has to change this file, where a reviewer sees it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MODULES = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "pickletools", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
)
CALLS = frozenset(
    {
        "torch.load",
        "torch.jit.load",
        "torch.hub.load",
        "torch.package.PackageImporter",
        "torch.serialization.load",
        "pandas.read_pickle",
        "yaml.load",
        "yaml.load_all",
        "yaml.full_load",
        "yaml.unsafe_load",
        "builtins.eval",
        "builtins.exec",
        "builtins.compile",
    }
)
BUILTINS = frozenset({"eval", "exec", "compile"})
METHODS = frozenset({"recv_pyobj", "send_pyobj", "read_pickle", "to_pickle"})
DYNAMIC_IMPORTS = frozenset({"__import__", "importlib.import_module", "builtins.__import__"})


class Violation(NamedTuple):
    """One refused construct."""

    path: Path
    line: int
    what: str


class _Visitor(ast.NodeVisitor):
    """Collects violations; `aliases` maps a local name to the dotted name that it stands for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.aliases: dict[str, str] = {}
        self.violations: list[Violation] = []

    def refuse(self, node: ast.AST, what: str) -> None:
        self.violations.append(Violation(self.path, getattr(node, "lineno", 0), what))

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            root = name.name.partition(".")[0]
            self.aliases[name.asname or root] = name.name if name.asname else root
            if root in MODULES:
                self.refuse(node, f"import of {name.name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if module.partition(".")[0] in MODULES and node.level == 0:
            self.refuse(node, f"import from {module}")
        for name in node.names:
            full = f"{module}.{name.name}"
            self.aliases[name.asname or name.name] = full
            if full in CALLS:
                self.refuse(node, f"import of {full}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        if name in CALLS:
            self.refuse(node, name)
        elif node.attr in METHODS:
            self.refuse(node, f".{node.attr}")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in BUILTINS and isinstance(node.ctx, ast.Load) and node.id not in self.aliases:
            self.refuse(node, f"built-in {node.id}")

    def visit_Call(self, node: ast.Call) -> None:
        name = self.dotted(node.func)
        if name in DYNAMIC_IMPORTS:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and str(first.value).partition(".")[0] in MODULES:
                self.refuse(node, f"import of {first.value}")
        for keyword in node.keywords:
            allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg == "allow_pickle" and not allowed:
                self.refuse(node, "allow_pickle")
            if keyword.arg == "weights_only" and allowed:
                self.refuse(node, "weights_only=False")
        self.generic_visit(node)

    def dotted(self, node: ast.AST) -> str:
        """`t.load` → `torch.load` after `import torch as t`; an empty string for what is no plain dotted name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.aliases.get(node.id, node.id), *reversed(parts)])


def check_source(source: str, path: Path = Path("<source>")) -> list[Violation]:
    """Violations in one file's text, in the order of the text."""
    visitor = _Visitor(path)
    visitor.visit(ast.parse(source, str(path)))
    return sorted(visitor.violations, key=lambda violation: violation.line)


def python_files(roots: list[Path]) -> Iterator[Path]:
    """Every Python file at or below `roots`, sorted; hidden folders and dependencies of other languages are left out."""
    for root in roots:
        if root.is_file():
            yield root
        for path in sorted(root.rglob("*.py")):
            if not any(part.startswith(".") or part == "node_modules" for part in path.relative_to(root).parts):
                yield path


def main(arguments: list[str]) -> int:
    """Check the folders and files named on the command line."""
    roots = [Path(argument) for argument in arguments]
    missing = [root for root in roots if not root.exists()]
    if missing or not roots:
        print(f"no such path: {', '.join(map(str, missing))}" if missing else __doc__, file=sys.stderr)
        return 2
    files = list(python_files(roots))
    violations = [violation for path in files for violation in check_source(path.read_text("utf-8"), path)]
    for path, line, what in violations:
        print(f"{path}:{line}: {what} is refused here (see {Path(__file__).name})")
    if not violations:
        print(f"no pickle: {len(files)} files, none refused")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
