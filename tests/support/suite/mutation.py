"""Mutation testing of the rules that decide: how many small faults do their unit tests notice?

    python -m tests.support.suite.mutation [RULE ...] [--sample N] [--seed S] [--against FILE]

Rules, modules, tests and sample sizes are in `mutation.toml` beside this file. Mutmut makes the
mutants and runs the tests in `.venv-mutation`, an environment of its own that sees the packages of
`.venv`. It works on a copy of the tree, so the tree stays as it is. A run that was interrupted
continues where it stopped, for as long as the tree and the settings are the same.

A mutant is known by its function and by the changed code, not by its module or its number, and the
sample is the mutants with the lowest hashes. So a function that did not change keeps its mutants
though others around it do, and two results are compared mutant by mutant.

Not mutated: constants of modules, decorated functions, SQL. Left out unless a rule asks for `text`:
mutants that change sentences only.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.bench.results import checked_out

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "tests/support/suite/mutation.toml"
RESULT = ROOT / "docs/benchmarks/mutation.json"
TABLE = RESULT.with_suffix(".md")
ENVIRONMENT = ROOT / ".venv-mutation"
NOTHING = "no mutant has this name"
"""Mutmut has no command that only makes mutants; asked for one that is not there, it makes them all
and records which test calls which function."""

STATUS = (
    {0: "survived", 5: "no test", 33: "no test"}
    | dict.fromkeys((1, 3, 255), "killed")
    | dict.fromkeys((-24, 24, 36, 152), "timeout")
)
"""Mutmut's exit codes. 255: pytest itself raised, as it does where warnings are errors and one is
left at its end. Any other is a failure of the run, which says nothing about the tests."""

PLUGIN = '''\
"""Quick tests first; Hypothesis makes no example small: that a mutant fails is enough."""
import json
from pathlib import Path

import pytest
from hypothesis import Phase, settings

@pytest.hookimpl(trylast=True)
def pytest_configure():
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutation", settings.default, phases=phases, database=None)
    settings.load_profile("mutation")

def pytest_collection_modifyitems(items):
    if (stats := Path("mutmut-stats.json")).exists():
        lasted = json.loads(stats.read_text())["duration_by_test"]
        items.sort(key=lambda item: lasted.get(item.nodeid, 0.0))
'''


@dataclass(frozen=True)
class Rule:
    """One rule that decides, and the tests that hold it.

    Attributes:
        modules: path of each module to the number of its mutants that are drawn; 0: all.
        text: mutants of sentences are drawn too.
    """

    name: str
    modules: dict[str, int]
    tests: list[str]
    text: bool = False


@dataclass(frozen=True)
class Mutant:
    """One small fault.

    Attributes:
        name: mutmut's name of it.
        module: path of the module.
        key: function and hash of the changed code; the same in every tree with that function.
        change: the lines that differ.
    """

    name: str
    module: str
    key: str
    change: str


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the rules asked for; exit 1 where a mutant survives that was killed before."""
    config = tomllib.loads(CONFIG.read_text())
    parser = argparse.ArgumentParser(prog="python -m tests.support.suite.mutation")
    parser.add_argument("rules", nargs="*", metavar="RULE", help=", ".join(config["rules"]))
    parser.add_argument("--sample", type=int, help="mutants of each module; 0: all")
    parser.add_argument("--seed", type=int, default=config["seed"])
    parser.add_argument("--against", type=Path, help="an earlier result to compare with")
    args = parser.parse_args(argv)
    if unknown := set(args.rules) - set(config["rules"]):
        parser.error(f"no rule {', '.join(sorted(unknown))}; known: {', '.join(config['rules'])}")
    make_environment(config["requires"])
    for name in args.rules or config["rules"]:
        rule = Rule(name, **config["rules"][name])
        if args.sample is not None:
            rule = replace(rule, modules=dict.fromkeys(rule.modules, args.sample))
        write(name, measure(rule, args.seed))
    print(TABLE.read_text())
    return compare(json.loads(args.against.read_text())) if args.against else 0


def make_environment(requires: list[str]) -> None:
    """Make `.venv-mutation`, which finds the packages of this interpreter too."""
    mark = ENVIRONMENT / "complete"
    if mark.exists() and mark.read_text() == str(requires):
        return
    print(f"making {ENVIRONMENT.name} (half a minute)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    python = ENVIRONMENT / "bin/python"
    packages = next(ENVIRONMENT.glob("lib/python*/site-packages"))
    ours = sysconfig.get_path("purelib")
    (packages / "falaj.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *requires], check=True)
    mark.write_text(str(requires))


def measure(rule: Rule, seed: int) -> dict[str, Any]:
    """Run the rule's sample of mutants; those with a result from an interrupted run are kept."""
    folder = prepare(rule)
    if not (folder / "mutants/mutmut-stats.json").exists():
        print(f"{rule.name}: making mutants, and running the tests once", flush=True)
        mutmut(folder, [NOTHING])
    population = [m for module in rule.modules for m in mutants(folder, module, rule.text)]
    if not population:
        raise SystemExit(f"no mutants of {rule.name}; see {folder / 'mutmut.log'}")
    drawn = [m for path, size in rule.modules.items() for m in draw(population, path, seed, size)]
    tested = json.loads((folder / "mutants/mutmut-stats.json").read_text())
    reached = {name for name, tests in tested["tests_by_mangled_function_name"].items() if tests}
    codes = exit_codes(folder, rule)
    todo = [
        m.name
        for m in drawn
        if codes[m.name] is None and m.name.partition("__mutmut_")[0] in reached
    ]
    if todo:
        print(f"{rule.name}: {len(todo)} of {len(drawn)} mutants to run", flush=True)
        mutmut(folder, todo)
        codes = exit_codes(folder, rule)
    outcome = {}
    for m in drawn:
        is_reached = m.name.partition("__mutmut_")[0] in reached
        code = codes[m.name] if is_reached else 33
        if code is None:
            raise SystemExit(f"{m.name} was not run; see {folder / 'mutmut.log'}, and run again")
        outcome[m] = STATUS.get(code, f"exit code {code}")
    return {
        "commit": (folder / "commit").read_text(),
        "seed": seed,
        "modules": {
            module: {
                "mutants": sum(m.module == module for m in population),
                **counts([s for m, s in outcome.items() if m.module == module]),
            }
            for module in rule.modules
        },
        "total": {"mutants": len(population), **counts(list(outcome.values()))},
        "mutants": {m.key: status for m, status in sorted(outcome.items(), key=lambda p: p[0].key)},
        "survivors": {
            m.key: m.change
            for m, status in sorted(outcome.items(), key=lambda p: p[0].key)
            if status in ("survived", "no test")
        },
    }


def prepare(rule: Rule) -> Path:
    """Copy the tracked files, with mutmut's settings; an equal copy is kept with its results."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    own = {str(path.relative_to(ROOT)) for path in (RESULT, TABLE, CONFIG, Path(__file__))}
    names = sorted(set(listed.stdout.decode().split("\0")) - own - {""})
    names = [name for name in names if (ROOT / name).is_file()]
    if missing := {*rule.modules, *rule.tests} - set(names):
        raise SystemExit(f"{rule.name} in {CONFIG.name}: git has no {', '.join(sorted(missing))}")
    roots = sorted({module.split("/")[0] for module in rule.modules})
    others = sorted({name.split("/")[0] for name in names} - {*roots, "pyproject.toml"})
    settings = {
        "source_paths": roots,
        "only_mutate": list(rule.modules),
        "also_copy": [*others, "mutation_plugin.py"],
        "pytest_add_cli_args_test_selection": rule.tests,
        "pytest_add_cli_args": [
            *("-p", "no:cacheprovider", "-p", "mutation_plugin", "--hypothesis-seed=0"),
            *("-o", "addopts=-m 'not slow and not drill'"),  # quick tests, in this process
            *("-W", "ignore::SyntaxWarning"),  # a mutant may compare with `is` what it should not
        ],
        "process_isolation": "forkserver",  # threads of DuckDB and of PyTorch do not survive a fork
        "use_git_change_detection": False,
        "timeout_constant": 4.0,
        "timeout_multiplier": 8.0,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    section = "\n[tool.mutmut]\n" + "\n".join(lines) + "\n"
    seen = hashlib.sha256((section + PLUGIN).encode())
    for name in names:
        seen.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    folder = ENVIRONMENT / "work" / rule.name
    mark = folder / "copied"
    if mark.exists() and mark.read_text() == seen.hexdigest():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    with (folder / "pyproject.toml").open("a") as file:
        file.write(section)
    (folder / "mutation_plugin.py").write_text(PLUGIN)
    (folder / "commit").write_text(checked_out())
    mark.write_text(seen.hexdigest())
    return folder


def mutmut(folder: Path, names: list[str]) -> None:
    """Run mutants by name, one at a time; results are kept one by one."""
    left_out = ("PYTHONPATH", "PYTHONWARNINGS", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    env |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [str(ENVIRONMENT / "bin/mutmut"), "run", "--max-children", "1", *names]
    log = folder / "mutmut.log"
    with log.open("a") as file:
        done = subprocess.run(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    if done.returncode and names != [NOTHING]:
        raise SystemExit(f"mutmut failed; see {log}")


def mutants(folder: Path, module: str, text: bool) -> Iterator[Mutant]:
    """All mutants of a module, each changed code once; `text`: those of sentences too."""
    path = folder / "mutants" / module
    if not path.with_name(f"{path.name}.meta").exists():
        raise SystemExit(f"mutmut made no mutants of {module}; see {folder / 'mutmut.log'}")
    source = path.read_text()
    lines = source.splitlines()
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "__mutmut_" in node.name
    }
    found = set()
    for name, node in functions.items():
        function, _, number = name.partition("__mutmut_")
        if number == "orig":
            continue
        original = functions[f"{function}__mutmut_orig"]
        if not text and _without_sentences(original) == _without_sentences(node):
            continue
        code = hashlib.sha256(_plain(node).encode()).hexdigest()[:12]
        key = f"{path.stem}.{function.lstrip('x').lstrip('_ǁ').replace('ǁ', '.')}@{code}"
        if key not in found:
            found.add(key)
            yield Mutant(
                name=f"{module.removesuffix('.py').replace('/', '.')}.{name}",
                module=module,
                key=key,
                change=_change(*(lines[n.lineno - 1 : n.end_lineno] for n in (original, node))),
            )


def _plain(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The function's code without its name, which tells the mutant's number."""
    return ast.dump(ast.Module([function], [])).replace(function.name, "f")


def _without_sentences(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    class Remove(ast.NodeTransformer):
        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
            return ast.Constant("")

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return ast.Constant("") if isinstance(node.value, str) and " " in node.value else node

    copy = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(copy, ast.FunctionDef | ast.AsyncFunctionDef)
    return _plain(Remove().visit(copy))


def _change(original: list[str], changed: list[str]) -> str:
    differ = difflib.unified_diff(original[1:], changed[1:], lineterm="", n=0)
    kept = [line for line in differ if not line.startswith(("---", "+++", "@@"))]
    if not kept:  # a default of a parameter
        kept = [f"-{original[0]}", f"+{changed[0]}"]
    return "\n".join(f"{line[0]} {line[1:].strip()}" for line in kept)


def draw(population: list[Mutant], module: str, seed: int, size: int) -> list[Mutant]:
    """The module's mutants with the lowest hashes of seed and key; all of them if `size` is 0."""
    ranked = sorted(
        (m for m in population if m.module == module),
        key=lambda m: random.Random(f"{seed} {m.key}").random(),
    )
    return ranked[: size or None]


def exit_codes(folder: Path, rule: Rule) -> dict[str, int | None]:
    """What became of each mutant; None where it was not run."""
    found: dict[str, int | None] = {}
    for module in rule.modules:
        kept = json.loads((folder / "mutants" / f"{module}.meta").read_text())
        found |= kept["exit_code_by_key"]
    return found


def counts(statuses: list[str]) -> dict[str, Any]:
    """How many mutants of each kind; one that hangs is found, a run that failed is not judged."""
    seen = Counter(statuses)
    judged = sum(seen[s] for s in ("killed", "survived", "no test", "timeout"))
    return {
        "sampled": len(statuses),
        "killed": seen["killed"],
        "survived": seen["survived"],
        "no_test": seen["no test"],
        "timeout": seen["timeout"],
        "failed": len(statuses) - judged,
        "score": round((seen["killed"] + seen["timeout"]) / judged, 3) if judged else None,
    }


def write(name: str, measured: dict[str, Any]) -> None:
    """Put one rule's result in the file of results, and draw its table anew."""
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    rules = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    rules[name] = measured
    RESULT.write_text(json.dumps(rules, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    TABLE.write_text(table(rules))


def table(rules: dict[str, Any]) -> str:
    """Markdown: a line for each module, and one for each rule."""
    head = "rule module mutants sampled killed survived no_test timeout failed score commit seed"
    columns = head.split()
    lines = [
        "# Mutation scores of the rules that decide",
        "",
        "Made by `make mutants`; do not edit. Score: killed and timed out, of those sampled.",
        "",
        f"| {' | '.join(c.replace('_', ' ') for c in columns)} |",
        f"|{'|'.join([' --- '] * 2 + [' ---: '] * 8 + [' --- ', ' ---: '])}|",
    ]
    for rule, measured in sorted(rules.items()):
        shown = {**measured["modules"], "**all**": measured["total"]}
        for module, found in shown.items():
            row = {"rule": rule, "module": module, **found}
            row |= {"commit": measured["commit"], "seed": measured["seed"]}
            lines.append(
                f"| {' | '.join('' if row[c] is None else str(row[c]) for c in columns)} |"
            )
    return "\n".join(lines) + "\n"


def compare(earlier: dict[str, Any]) -> int:
    """Print which mutants survive that were killed before; 1 where there is one, else 0."""
    found = {"killed", "timeout"}
    worse = 0
    for rule, now in json.loads(RESULT.read_text()).items():
        before = earlier.get(rule, {"mutants": {}, "total": {"score": None}})
        both = before["mutants"].keys() & now["mutants"].keys()
        lost = [k for k in sorted(both & now["survivors"].keys()) if before["mutants"][k] in found]
        won = [k for k in both & before["survivors"].keys() if now["mutants"][k] in found]
        print(
            f"{rule}: score {before['total']['score']} before, {now['total']['score']} now; of "
            f"{len(both)} mutants in both, {len(won)} more are killed and {len(lost)} fewer"
        )
        for key in lost:
            print(f"  {key}\n    " + now["survivors"][key].replace("\n", "\n    "))
        worse += len(lost)
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
