"""Mutation testing of the rules that decide: how many small faults do their unit tests notice?

    python -m tests.support.suite.mutation [RULE ...] [--sample N] [--against FILE]

Rules, modules, tests and sample sizes are in `mutation.toml` beside this file. Mutmut makes the
mutants and runs the tests in `.venv-mutation`, an environment of its own that sees the packages of
`.venv`. It works on a copy of the tree, so the tree stays as it is. A run that was interrupted
continues where it stopped, on the same commit.

A mutant is known by its function and by the changed code, not by its module or its number, and the
sample is the mutants with the lowest hashes. So a function that did not change keeps its mutants
though others around it do, and two results are compared mutant by mutant.

Not mutated: constants of modules, decorated functions, SQL. Left out unless a rule asks for `text`:
mutants that change sentences only.
"""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.bench.results import checked_out

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "tests/support/suite/mutation.toml"
RESULT = ROOT / "docs/benchmarks/mutation.json"
ENVIRONMENT = ROOT / ".venv-mutation"
STATUS = (
    {0: "survived", 5: "no test", 33: "no test"}
    | dict.fromkeys((1, 3, 255), "killed")
    | dict.fromkeys((-24, 24, 36, 152), "timeout")
)
"""Mutmut's exit codes. 255: pytest itself raised, as it does where warnings are errors and one is
left at its end. Any other is a failure of the run, which says nothing about the tests."""
FOUND, MISSED = ("killed", "timeout"), ("survived", "no test")
COLUMNS = "mutants sampled killed survived no_test timeout failed score".split()
PLUGIN = '''\
"""Hypothesis makes no example small: that a mutant fails is enough."""
from hypothesis import Phase, settings

def pytest_configure():
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutation", settings.default, phases=phases, database=None)
    settings.load_profile("mutation")
pytest_configure.pytest_impl = {"trylast": True}
'''
Rule = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the rules asked for; exit 1 where a mutant survives that was killed before."""
    config = tomllib.loads(CONFIG.read_text())
    parser = argparse.ArgumentParser(prog="python -m tests.support.suite.mutation")
    parser.add_argument("rules", nargs="*", metavar="RULE", help=", ".join(config["rules"]))
    parser.add_argument("--sample", type=int, help="mutants of each module; 0: all")
    parser.add_argument("--against", type=Path, help="an earlier result to compare with")
    args = parser.parse_args(argv)
    if unknown := set(args.rules) - set(config["rules"]):
        parser.error(f"no rule {', '.join(sorted(unknown))}; known: {', '.join(config['rules'])}")
    make_environment(config["requires"])
    for name in args.rules or config["rules"]:
        rule = config["rules"][name]
        if args.sample is not None:
            rule["modules"] = dict.fromkeys(rule["modules"], args.sample)
        rules = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        rules[name] = measure(name, rule, config["seed"])
        RESULT.write_text(json.dumps(rules, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        RESULT.with_suffix(".md").write_text(table(rules))
    print(RESULT.with_suffix(".md").read_text())
    return compare(json.loads(args.against.read_text())) if args.against else 0


def make_environment(requires: list[str]) -> None:
    """Make `.venv-mutation`, which finds the packages of this interpreter too."""
    mark = ENVIRONMENT / "complete"
    if mark.exists() and mark.read_text() == str(requires):
        return
    print(f"making {ENVIRONMENT.name} (half a minute)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    packages = next(ENVIRONMENT.glob("lib/python*/site-packages"))
    ours = sysconfig.get_path("purelib")
    (packages / "falaj.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    pip = [ENVIRONMENT / "bin/python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *requires], check=True)
    mark.write_text(str(requires))


def measure(name: str, rule: Rule, seed: int) -> dict[str, Any]:
    """Run the rule's sample of mutants; those with a result from an interrupted run are kept."""
    folder = prepare(name, rule)
    stats = folder / "mutants/mutmut-stats.json"
    if not stats.exists():
        print(f"{name}: making mutants, and running the tests once", flush=True)
        # Mutmut has no command that only makes mutants, but makes them all where it finds none.
        mutmut(folder, "no mutant has this name")
    found = {module: dict(mutants(folder, module, rule)) for module in rule["modules"]}
    drawn = {
        module: sorted(found[module], key=lambda key: random.Random(f"{seed} {key}").random())
        for module in rule["modules"]
    }
    drawn = {module: keys[: rule["modules"][module] or None] for module, keys in drawn.items()}
    tests = json.loads(stats.read_text())["tests_by_mangled_function_name"]
    names = {key: found[module][key][0] for module, keys in drawn.items() for key in keys}
    reached = {key for key, each in names.items() if tests.get(each.partition("__mutmut_")[0])}
    codes = exit_codes(folder, rule)
    if todo := [names[key] for key in names if key in reached and codes[names[key]] is None]:
        print(f"{name}: {len(todo)} of {len(names)} mutants to run", flush=True)
        mutmut(folder, *todo)
        codes = exit_codes(folder, rule)
    if missing := [each for key, each in names.items() if key in reached and codes[each] is None]:
        raise SystemExit(f"{missing[0]} was not run; see {folder / 'mutmut.log'}, and run again")
    outcome = {
        key: STATUS.get(codes[each] or 0, f"exit code {codes[each]}")
        if key in reached
        else "no test"
        for key, each in sorted(names.items())
    }
    changes = {key: change for keys in found.values() for key, (_, change) in keys.items()}
    modules = {m: counts(len(found[m]), [outcome[key] for key in drawn[m]]) for m in found}
    return {
        "commit": (folder / "commit").read_text(),
        "seed": seed,
        "modules": modules,
        "total": counts(sum(map(len, found.values())), list(outcome.values())),
        "mutants": outcome,
        "survivors": {k: changes[k] for k, status in outcome.items() if status in MISSED},
    }


def prepare(name: str, rule: Rule) -> Path:
    """Copy the tracked files, with mutmut's settings; a copy of this commit is kept."""
    folder, commit = ENVIRONMENT / "work" / name, checked_out()
    mark = folder / "commit"
    if mark.exists() and mark.read_text() == commit and not commit.endswith("-dirty"):
        return folder
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [each for each in listed.stdout.decode().split("\0") if (ROOT / each).is_file()]
    if missing := {*rule["modules"], *rule["tests"]} - set(names):
        raise SystemExit(f"{name} in {CONFIG.name}: git has no {', '.join(sorted(missing))}")
    roots = sorted({module.split("/")[0] for module in rule["modules"]})
    settings = {
        "source_paths": roots,
        "only_mutate": list(rule["modules"]),
        "also_copy": sorted({each.split("/")[0] for each in names} - {*roots, "pyproject.toml"}),
        "pytest_add_cli_args_test_selection": rule["tests"],
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
    settings["also_copy"] = [*settings["also_copy"], "mutation_plugin.py"]
    shutil.rmtree(folder, ignore_errors=True)
    for each in names:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / each, folder / each)
    with (folder / "pyproject.toml").open("a") as file:
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
        file.writelines(["\n[tool.mutmut]\n", *lines])
    (folder / "mutation_plugin.py").write_text(PLUGIN)
    mark.write_text(commit)
    return folder


def mutmut(folder: Path, *names: str) -> None:
    """Run mutants by name, one at a time; results are kept one by one."""
    left_out = ("PYTHONPATH", "PYTHONWARNINGS", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    env |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [ENVIRONMENT / "bin/mutmut", "run", "--max-children", "1", *names]
    with (folder / "mutmut.log").open("a") as log:
        subprocess.run(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def mutants(folder: Path, module: str, rule: Rule) -> Iterator[tuple[str, tuple[str, str]]]:
    """Key of each changed code of a module: mutmut's name of it, and the changed lines."""
    path = folder / "mutants" / module
    if not path.with_name(f"{path.name}.meta").exists():
        raise SystemExit(f"mutmut made no mutants of {module}; see {folder / 'mutmut.log'}")
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "__mutmut_" in node.name
    }
    for name, node in functions.items():
        function, _, number = name.partition("__mutmut_")
        if number == "orig":
            continue
        original = functions[f"{function}__mutmut_orig"]
        if not rule.get("text") and _plain(original, text=False) == _plain(node, text=False):
            continue
        code = hashlib.sha256(_plain(node).encode()).hexdigest()[:12]
        key = f"{path.stem}.{function.lstrip('x').lstrip('_ǁ').replace('ǁ', '.')}@{code}"
        name = f"{module.removesuffix('.py').replace('/', '.')}.{name}"
        yield key, (name, _change(*(ast.unparse(each).splitlines() for each in (original, node))))


def _change(original: list[str], changed: list[str]) -> str:
    """The lines that differ; the first, with the function's name, only where no other does."""
    differ = difflib.ndiff(original[1:], changed[1:])
    kept = [f"{line[0]} {line[1:].strip()}" for line in differ if line[0] in "-+"]
    return "\n".join(kept or [f"- {original[0]}", f"+ {changed[0]}"])


def _plain(function: ast.FunctionDef | ast.AsyncFunctionDef, *, text: bool = True) -> str:
    """The function's code without its name, which tells the mutant's number."""

    class WithoutSentences(ast.NodeTransformer):
        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
            return ast.Constant("")

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return ast.Constant("") if isinstance(node.value, str) and " " in node.value else node

    copy = ast.parse(ast.unparse(function)).body[0]
    plain = function if text else WithoutSentences().visit(copy)
    return ast.dump(ast.Module([plain], [])).replace(function.name, "f")


def exit_codes(folder: Path, rule: Rule) -> dict[str, int | None]:
    """What became of each mutant; None where it was not run."""
    metas = [folder / "mutants" / f"{module}.meta" for module in rule["modules"]]
    kept = [json.loads(meta.read_text())["exit_code_by_key"] for meta in metas]
    return {name: code for codes in kept for name, code in codes.items()}


def counts(mutants: int, statuses: list[str]) -> dict[str, Any]:
    """How many mutants of each kind; one that hangs is found, a run that failed is not judged."""
    seen = Counter(status.replace(" ", "_") for status in statuses)
    judged = sum(seen[s.replace(" ", "_")] for s in (*FOUND, *MISSED))
    score = round(sum(seen[s] for s in FOUND) / judged, 3) if judged else None
    known = {"mutants": mutants, "sampled": len(statuses), "failed": len(statuses) - judged}
    return {c: {**known, "score": score}.get(c, seen[c]) for c in COLUMNS}


def table(rules: Mapping[str, Any]) -> str:
    """Markdown: a line for each module, and one for each rule."""
    head = ["rule", "module", *COLUMNS, "commit", "seed"]
    rows = [
        [rule, module, *(found[c] for c in COLUMNS), measured["commit"], measured["seed"]]
        for rule, measured in sorted(rules.items())
        for module, found in {**measured["modules"], "**all**": measured["total"]}.items()
    ]
    lines = [
        "# Mutation scores of the rules that decide",
        "",
        "Made by `make mutants`; do not edit. Score: killed and timed out, of those sampled.",
        "",
        f"| {' | '.join(c.replace('_', ' ') for c in head)} |",
        f"|{'|'.join([' --- '] * 2 + [' ---: '] * 8 + [' --- ', ' ---: '])}|",
        *(f"| {' | '.join('' if cell is None else str(cell) for cell in row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def compare(earlier: Mapping[str, Any]) -> int:
    """Print which mutants survive that were killed before; 1 where there is one, else 0."""
    worse = 0
    for rule, now in json.loads(RESULT.read_text()).items():
        before = earlier.get(rule, {"mutants": {}, "total": {"score": None}})
        found = {key for key, status in before["mutants"].items() if status in FOUND}
        lost = sorted(found & now["survivors"].keys())
        scores = f"score {before['total']['score']} before, {now['total']['score']} now"
        print(f"{rule}: {scores}; {len(lost)} mutants that were killed before live")
        for key in lost:
            print(f"  {key}\n    " + now["survivors"][key].replace("\n", "\n    "))
        worse += len(lost)
    return int(worse > 0)


if __name__ == "__main__":
    raise SystemExit(main())
