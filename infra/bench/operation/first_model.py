"""From `pip install` of the wheel to a promoted model, by the blocks of the tutorial `Your data`.

An environment and a cache of their own, so packages are fetched and Horovod is built.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from infra.bench.figures import LeftOut, Measured, at_most
from infra.bench.parts import Bench
from tasks.kernel.settings import PROJECT_ROOT

PAGE = PROJECT_ROOT / "docs" / "tutorials" / "your-data.md"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.M | re.S)
EXTRAS = "train,convert,serve"
BOUND_MIN, MOST_LINES = 15.0, 40


def figures(bench: Bench) -> Measured:
    """Minutes from nothing to a champion, and the lines that its project has."""
    if bench.small:  # the installing has tests of its own, and the page too
        return [LeftOut("pip install to a promoted model, min", "there is no small form")]
    folder, started = bench.folder, time.monotonic()
    python = folder / "environment" / "bin" / "python"
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "NO_COLOR": "1"}
    variables["PATH"] = f"{python.parent}:{variables['PATH']}"
    variables = {n: v for n, v in variables.items() if not n.startswith("FALAJ_")}

    def run(*words: str | Path, text: str = "", where: Path = folder) -> float:
        began = time.monotonic()
        ended = subprocess.run(
            words, input=text, cwd=where, env=variables, text=True, capture_output=True
        )
        if ended.returncode:
            raise RuntimeError(f"{words} ended with {ended.returncode}: {ended.stderr[-2000:]}")
        return time.monotonic() - began

    wheel = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(sys.executable, *wheel, "--wheel-dir", folder, ".", where=PROJECT_ROOT)
    (built,) = folder.glob("*.whl")
    started = time.monotonic()
    run(sys.executable, "-m", "venv", folder / "environment")
    installed = run(python, "-m", "pip", "install", "--quiet", f"{built}[{EXTRAS}]")
    horovod = run(python.parent / "falaj", "setup")
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8").split("\n## 4.")[0])
    parts = [run(python if kind == "python" else "bash", text=text) for kind, text in blocks]
    minutes = (time.monotonic() - started) / 60
    lines = len((folder / "shop" / "use_case.yaml").read_text(encoding="utf-8").splitlines())
    made, proposed, checked, ran = (f"{each:.0f}" for each in parts)
    evidence = f"pip {installed:.0f} s, Horovod {horovod:.0f}, rows made {made}, "
    evidence += f"init {proposed}, check {checked}, run {ran}; {os.cpu_count()} cores"
    return [
        at_most("pip install to a promoted model, min", minutes, BOUND_MIN, evidence),
        at_most("lines of its use_case.yaml", lines, MOST_LINES, "all of them proposed"),
    ]
