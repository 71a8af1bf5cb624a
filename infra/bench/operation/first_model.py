"""From `pip install` of the wheel to a promoted model, by the blocks of the tutorial `Your data`.

An environment and a cache of their own, so packages are fetched and Horovod is built.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench
from tasks.kernel.settings import PROJECT_ROOT

PAGE = PROJECT_ROOT / "docs" / "tutorials" / "your-data.md"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.M | re.S)


def figures(bench: Bench) -> Measured:
    """Minutes from nothing to a champion, and the lines that its project has.

    In small, nothing is installed, and the rows are few and not trained on.
    """
    folder, page = bench.folder, PAGE.read_text(encoding="utf-8").split("\n## 4.")[0]
    blocks = BLOCK.findall(page.replace("100_000", "8_000") if bench.small else page)
    python = Path(sys.executable) if bench.small else folder / "environment" / "bin" / "python"
    variables = {n: v for n, v in os.environ.items() if not n.startswith("FALAJ_")}
    variables |= {"XDG_CACHE_HOME": str(folder / "cache"), "NO_COLOR": "1"}
    variables["PATH"] = f"{python.parent}:{variables['PATH']}"

    def run(*words: str | Path, text: str = "", where: Path = folder) -> float:
        began = time.monotonic()
        ended = subprocess.run(
            words, input=text, cwd=where, env=variables, text=True, capture_output=True
        )
        if ended.returncode:
            raise RuntimeError(f"{words} ended with {ended.returncode}: {ended.stderr[-2000:]}")
        return time.monotonic() - began

    steps: dict[str, float] = {}
    if not bench.small:
        wheel = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
        run(sys.executable, *wheel, "--wheel-dir", folder, ".", where=PROJECT_ROOT)
        (built,) = folder.glob("*.whl")
        run(sys.executable, "-m", "venv", folder / "environment")
        wanted = f"{built}[train,convert,serve]"
        steps["pip"] = run(python, "-m", "pip", "install", "--quiet", wanted)
        steps["Horovod"] = run(python.parent / "falaj", "setup")
    for name, (kind, text) in zip(("rows made", "init", "check", "run"), blocks, strict=True):
        if name != "run" or not bench.small:
            steps[name] = run(python if kind == "python" else "bash", text=text)
    lines = len((folder / "shop" / "use_case.yaml").read_text(encoding="utf-8").splitlines())
    evidence = ", ".join(f"{name} {value:.0f} s" for name, value in steps.items())
    evidence += f"; {os.cpu_count()} cores"
    minutes = sum(steps.values()) / 60
    return [
        at_most("pip install to a promoted model, min", minutes, 15.0, evidence),
        at_most("lines of its use_case.yaml", lines, 40, "all of them proposed"),
    ]
