"""Rules of the house that no linter knows: short modules, short functions.

Run by ``make lint``; exits 1 and names what is too long.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES = 400
LONGER = {"src/scodkit/monitor.py": 495}  # one noun, one class
FUNCTION_LINES = 60
NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
)
ROOT = Path(__file__).parent.parent


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and docstring."""
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        if len(function.body) == 1:
            return 0
        first = function.body[1]
    assert function.end_lineno is not None
    return function.end_lineno - first.lineno + 1


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    documentation: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documentation)


def too_long(path: Path) -> Iterator[str]:
    text = path.read_text()
    name = path.relative_to(ROOT)
    tree = ast.parse(text)
    lines = code_lines(text, tree)
    most = LONGER.get(str(name), MODULE_LINES)
    if lines > most:
        yield f"{name}: {lines} code lines, at most {most}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = body_lines(node)
            if length > FUNCTION_LINES:
                where = f"{name}:{node.lineno}: {node.name}"
                yield f"{where} has {length} lines, at most {FUNCTION_LINES}"


def main() -> None:
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    complaints = [complaint for path in files for complaint in too_long(path)]
    sys.exit("\n".join(complaints) if complaints else 0)


if __name__ == "__main__":
    main()
