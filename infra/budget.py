"""What the repository costs its reader, held against `budget.toml`: `python -m infra.budget`.

A bound may rise only with a decision record; `--lower` writes what is true now where it is less,
code lines rounded up to the next fifty.
Code lines are those of the syntax tree without blank lines, comments and docstrings. A field is an
annotated attribute of a class in a `config.py`. Words are those of `docs/glossary.md` that have a
better name in the field.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tasks.kernel.code_digest import imported_names

ROOT = Path(__file__).resolve().parents[1]
BUDGET = Path(__file__).with_name("budget.toml")
ROOMS_BELOW = {"tasks", "serving", "infra", "tests"}


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines that are neither blank, comment nor docstring."""
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                if isinstance(first.value.value, str):
                    prose.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = ((n, line.strip()) for n, line in enumerate(text.splitlines(), 1))
    return sum(1 for n, line in lines if line and not line.startswith("#") and n not in prose)


def measure(root: Path, words: str) -> dict[str, dict[str, int]]:
    """Numbers by table and name, as in `budget.toml`."""
    lines: Counter[str] = Counter()
    totals = Counter(dict.fromkeys(("files", "config_fields", "private_words", "widest_folder"), 0))
    folders: Counter[Path] = Counter()
    trees: dict[str, ast.Module] = {}
    private = re.compile(rf"(?:^|_)({words})(?:_|$)")
    for name in _tracked(root, "*.py"):
        path = Path(name)
        text = (root / path).read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines[_room(path)] += code_lines(text, tree)
        folders[path.parent] += path.name != "__init__.py"
        if path.parts[0] == "tests":
            continue
        trees[".".join(path.with_suffix("").parts).removesuffix(".__init__")] = tree
        totals["files"] += 1
        totals["config_fields"] += _fields(tree) if path.name == "config.py" else 0
        totals["private_words"] += sum(bool(private.search(name)) for name in _names(path, tree))
    totals["widest_folder"] = max(folders.values())
    totals["circles"] = _circles(trees)
    totals["code_lines"] = sum(n for room, n in lines.items() if not room.startswith("tests"))
    totals["test_lines"] = sum(lines.values()) - totals["code_lines"]
    totals["readme_lines"] = len((root / "README.md").read_text(encoding="utf-8").splitlines())
    return {"totals": dict(totals), "code_lines": dict(lines)}


def _tracked(root: Path, pattern: str) -> list[str]:
    line = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", pattern]
    found = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in found if (root / name).is_file()]


def _room(path: Path) -> str:
    return "/".join(path.parts[:-1][: 2 if path.parts[0] in ROOMS_BELOW else 1])


def _fields(tree: ast.Module) -> int:
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sum(isinstance(each, ast.AnnAssign) for node in classes for each in node.body)


def _names(path: Path, tree: ast.Module) -> Iterator[str]:
    """Names of a module and of what it defines, in snake case."""
    yield path.stem
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node.name).lower()


def _circles(trees: Mapping[str, ast.Module]) -> int:
    """How many circles of imports must be cut, at any level of a file, until there is none."""
    graph = {n: set(imported_names(tree)) & trees.keys() - {n} for n, tree in trees.items()}
    for cut in range(len(graph)):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as found:
            before, after = found.args[1][:2]
            print(f"circle of imports: {' < '.join(found.args[1])}")
            graph[after].discard(before)
        else:
            return cut
    raise AssertionError("more circles than modules")


def main(arguments: list[str]) -> int:
    """Print what is above its bound, and say whether anything is."""
    budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    found = measure(ROOT, budget["words"])
    over = 0
    for table, numbers in found.items():
        for name, number in sorted(numbers.items()):
            bound = budget[table].get(name, 0)
            over += number > bound
            if number > bound:
                print(f"{table} of {name}: {number}, and the budget is {bound}")
    if "--lower" in arguments:
        BUDGET.write_text(_lowered(budget, found), encoding="utf-8")
    totals = ", ".join(f"{name} {number}" for name, number in sorted(found["totals"].items()))
    print(f"{totals}; {over} above budget")
    return int(over > 0)


def _lowered(budget: dict[str, dict[str, int]], found: dict[str, dict[str, int]]) -> str:
    words = json.dumps(budget["words"])
    lines = [f"words = {words}"]
    for table, numbers in found.items():
        lines += ["", f"[{table}]"]
        known = budget[table]
        rounded = {name: _rounded(name, number) for name, number in numbers.items()}
        bounds = {name: min(bound, known.get(name, bound)) for name, bound in rounded.items()}
        lines += [f'"{name}" = {bound}' for name, bound in sorted(bounds.items())]
    return "\n".join(lines) + "\n"


def _rounded(name: str, number: int) -> int:
    exact = name in ("circles", "private_words", "widest_folder")
    return number if exact else -(-number // 50) * 50


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
