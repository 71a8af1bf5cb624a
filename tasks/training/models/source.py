"""Where the code of a user's module is, and what it is: found without running any of it."""

import ast
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import content_key

HELP = "docs/how-to/own-model.md shows one that works. Nothing was trained"


def check_source(model: str, project: Path | None) -> None:
    """Refuse a name that leads to no function, without running any of its code.

    Raises:
        ConfigurationError: there is no such module, it does not bind the name, or its function
            cannot be called with two arguments.
    """
    module, _, name = model.partition(":")
    file = Path(_spec_of(module, project).origin or "")
    try:
        tree = ast.parse(file.read_bytes(), file.name)
    except SyntaxError as exc:
        raise ConfigurationError(f"{file}, line {exc.lineno}: {exc.msg}. {HELP}") from exc
    bound: dict[str, ast.stmt] = {}
    for statement in tree.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.alias):
                bound[node.asname or node.name] = statement
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound[node.id] = statement
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            bound[statement.name] = statement
    if name not in bound:
        raise ConfigurationError(
            f"model: {model!r} names {name!r}, and {file} binds no such name; it has "
            f"{', '.join(sorted(bound)) or 'none'}. {HELP}"
        )
    found = bound[name]
    if isinstance(found, ast.FunctionDef):
        plain = len(found.args.posonlyargs) + len(found.args.args)
        needed = plain - len(found.args.defaults)
        if needed > 2 or (plain < 2 and found.args.vararg is None):
            raise ConfigurationError(
                f"{file}, line {found.lineno}: {name} takes {plain} argument(s), expected "
                f"{name}(columns, config). {HELP}"
            )


def _spec_of(module: str, project: Path | None) -> ModuleSpec:
    """Where a module is, without importing what is around it; the project folder comes last."""
    places = [*sys.path, *([str(project)] if project else [])]
    path: list[str] = places
    spec = None
    for part in range(1, module.count(".") + 2):
        spec = PathFinder.find_spec(".".join(module.split(".")[:part]), path)
        if spec is None:
            break
        path = list(spec.submodule_search_locations or [])
    if spec is None or not (spec.origin or "").endswith(".py"):
        raise ConfigurationError(
            f"there is no Python module {module!r} in the project folder "
            f"{project or '(none is named)'}, and none is installed; write {module.split('.')[0]}"
            f".py there, or change `model:`. {HELP}"
        )
    return spec


def source_digest(model: str, project: Path | None) -> str:
    """Digest of the module's code: all of its package, or all Python files beside it."""
    top = _spec_of(model.partition(":")[0].partition(".")[0], project)
    file = Path(top.origin or "")
    is_package = top.submodule_search_locations is not None
    files = file.parent.rglob("*.py") if is_package else file.parent.glob("*.py")
    kept = sorted(files) if is_package or file.parent == project else [file]
    return content_key([(str(f.relative_to(file.parent)), digest_of(f)) for f in kept])
