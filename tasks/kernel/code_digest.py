"""Digest of a stage's code as far as it decides results: what runs, not what is said about it.

From the module that asks, imports are followed through its room, the contracts and `tasks.stats`.
Of each module that is reached the statements count, without comments, docstrings, descriptions of
fields, log lines and the words of errors.
"""

import ast
import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import cache_from_source
from pathlib import Path
from threading import Lock

PARSING = Lock()
"""Two threads that parse at once are a SystemError of Python 3.11 where a collection falls in."""
ROOMS = "tasks"
SHARED = (f"{ROOMS}.contracts", f"{ROOMS}.stats")


def statements_digest(
    module: Path, root: Path, also: Iterable[str] = (), without: Collection[str] = ()
) -> str:
    """Digest of all statements that `module` reaches by import.

    A module that is named by a string alone, such as that of a rank or of a strategy, is reached
    too.

    Args:
        module: a Python file of a room, or of a folder outside the rooms, which is then a room.
        root: folder that dotted names begin at.
        also: dotted names of modules that are reached in other ways.
        without: dotted names of modules and packages that change no result.

    Raises:
        FileNotFoundError: a module of `also` does not exist.
    """
    start = ".".join(module.resolve().relative_to(root.resolve()).with_suffix("").parts)
    followed = (_room_of(start), *SHARED)
    reached: dict[str, str] = {}
    waiting = [start, *also]
    for name in waiting:
        if _file_of(name, root) is None:
            raise FileNotFoundError(f"{name} is no module below {root}; name one that is there")
    while waiting:
        name = waiting.pop()
        if name in reached or (name != start and not _is_below(name, followed)):
            continue
        path = None if _is_below(name, without) else _file_of(name, root)
        if path is None:
            continue
        stat = path.stat()
        reached[name], named = _read(path, stat.st_mtime_ns, stat.st_size)
        waiting += named
    text = "".join(f"{statements}  {name}\n" for name, statements in sorted(reached.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=4096)
def _read(path: Path, _modified_ns: int, _num_bytes: int) -> tuple[str, tuple[str, ...]]:
    """Digest of a module's statements, and the dotted names in it that may be modules.

    Kept in the process, which asks many times, as long as the file bears the same time and size,
    and beside Python's own compiled file as long as it has the same content.
    """
    content = path.read_bytes()
    is_of = [_parsed_by(), hashlib.sha256(content).hexdigest()]
    kept = Path(cache_from_source(str(path))).with_suffix(".statements")
    with suppress(OSError, ValueError, TypeError):
        found, digest, names = json.loads(kept.read_text(encoding="utf-8"))
        if found == is_of:
            return str(digest), tuple(names)
    digest, named = _parsed(content)
    if sys.dont_write_bytecode:
        return digest, named
    with suppress(OSError):  # the code may lie where this user cannot write
        aside = kept.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps([is_of, digest, named]), encoding="utf-8")
        aside.replace(kept)
    return digest, named


@cache
def _parsed_by() -> str:
    """Digest of this module: another way to parse keeps other results."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def _parsed(content: bytes) -> tuple[str, tuple[str, ...]]:
    with PARSING:
        tree = ast.parse(content)
    named = tuple(sorted(set(_named_modules(tree))))
    statements = ast.unparse(_WithoutWords().visit(tree))
    return hashlib.sha256(statements.encode()).hexdigest(), named


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports, at any level: modules, and what may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _named_modules(tree: ast.Module) -> Iterator[str]:
    yield from imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith(f"{ROOMS}."):
                yield node.value.partition(":")[0]


class _WithoutWords(ast.NodeTransformer):
    """Takes away what is read by people alone."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Docstrings, also those of attributes, and log lines."""
        value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            owner = value.func.value
            if isinstance(owner, ast.Name) and owner.id == "LOGGER":
                return None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Descriptions of fields."""
        if isinstance(node.func, ast.Name) and node.func.id == "Field":
            node.keywords = [key for key in node.keywords if key.arg != "description"]
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """The sentence of an error."""
        if isinstance(node.exc, ast.Call):
            node.exc.args = [arg for arg in node.exc.args if not _is_text(arg)]
        return self.generic_visit(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_below(name: str, packages: Collection[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _room_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] == ROOMS else parts[:-1])


def _file_of(name: str, root: Path) -> Path | None:
    path = root.joinpath(*name.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)
