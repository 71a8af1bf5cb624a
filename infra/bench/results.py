"""Results of the bench on file: `<part>.json`, and `<part>.md` made from it."""

import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path

import psutil
import pynvml  # type: ignore[import-untyped]
from pydantic import TypeAdapter

from infra.bench.figures import Figure, LeftOut
from infra.bench.parts import MEASUREMENTS
from tasks.kernel.files import write_atomically
from tasks.kernel.provenance import host_facts
from tasks.kernel.settings import PROJECT_ROOT
from tasks.kernel.values import Frozen

RESULTS = PROJECT_ROOT / "docs" / "benchmarks"


class Host(Frozen):
    """What of a machine a figure depends on."""

    processor: str
    cores: int
    memory_gb: float
    kernel: str
    python: str
    devices: str = ""
    """Of NVIDIA, with their driver."""

    def __str__(self) -> str:
        return (
            f"{self.cores} cores of {self.processor}, {self.memory_gb:.0f} GB, {self.kernel}, "
            f"Python {self.python}" + (f"; {self.devices}" if self.devices else "")
        )


class Result(Frozen):
    """What became of one measurement.

    Attributes:
        load: of the machine over a minute, before and after.
        failure: why there are no figures; None where there are.
    """

    commit: str
    date: datetime
    host: Host
    load: tuple[float, float]
    seconds: float
    small: bool
    measured: tuple[Figure | LeftOut, ...] = ()
    failure: str | None = None

    @property
    def figures(self) -> list[Figure]:
        """Those with a value."""
        return [one for one in self.measured if isinstance(one, Figure)]

    @property
    def holds(self) -> bool:
        """Whether all was measured and keeps its bounds."""
        return self.failure is None and all(figure.holds for figure in self.figures)

    def lines(self) -> list[str]:
        """As printed."""
        failed = [f"FAIL  {self.failure}"] if self.failure else []
        return failed + [one.line() for one in self.measured]


Results = dict[str, Result]
_stored = TypeAdapter(Results)


def this_host() -> Host:
    """The machine's facts, without its name."""
    return Host(
        processor=host_facts()["processor"],
        cores=len(os.sched_getaffinity(0)),
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        devices=devices_in_words(),
    )


def devices_in_words() -> str:
    """Such as `NVIDIA H100 80GB HBM3, driver 580.159.04`; empty where there is no device."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        return ", ".join([*names, f"driver {pynvml.nvmlSystemGetDriverVersion()}"])
    finally:
        pynvml.nvmlShutdown()


def checked_out() -> str:
    """The commit; with `-dirty` where files differ from it, but for results; empty without git."""
    results = f":(exclude){RESULTS.relative_to(PROJECT_ROOT)}"
    said = [
        subprocess.run(["git", *words], cwd=PROJECT_ROOT, capture_output=True, text=True)
        for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", ".", results])
    ]
    if any(each.returncode for each in said):
        return ""
    return said[0].stdout.strip() + ("-dirty" if said[1].stdout.strip() else "")


def read_results(folder: Path, part: str) -> Results:
    """The results of a part by measurement; none where there is no file.

    Raises:
        ValueError: the file is damaged or of another version.
    """
    file = folder / f"{part}.json"
    if not file.exists():
        return {}
    try:
        return _stored.validate_json(file.read_bytes())
    except ValueError as exc:
        raise ValueError(
            f"{file} is damaged or was written by another version ({exc}); remove it, and measure "
            "this part again"
        ) from exc


def write_result(folder: Path, part: str, name: str, result: Result) -> None:
    """Put one result in its part's file, and make the page again."""
    results = {**read_results(folder, part), name: result}
    order = [each.name for each in MEASUREMENTS if each.part == part]
    results = {name: results[name] for name in order if name in results}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{part}.json", _stored.dump_json(results, indent=1).decode() + "\n")
    write_atomically(folder / f"{part}.md", page(part, results))


def page(part: str, results: Results) -> str:
    """Markdown: a table for each measurement, with what it was measured on."""
    what = {each.name: each.what for each in MEASUREMENTS if each.part == part}
    lines = [f"# Figures: {part}", "", f"Made by `make bench` from `{part}.json`; do not edit."]
    for name, result in results.items():
        lines += ["", f"## {name}: {what[name]}", "", _conditions(result), ""]
        if result.failure:
            lines += [f"**Failed:** {_cell(result.failure)}", ""]
        if result.figures:
            lines += ["| figure | value | bound | holds | detail |", "|---|--:|--:|---|---|"]
            lines += [_row(figure) for figure in result.figures]
        left_out = [one for one in result.measured if isinstance(one, LeftOut)]
        lines += [f"\nNot measured: {one.name} ({_cell(one.reason)})." for one in left_out]
    return "\n".join(lines).rstrip() + "\n"


def _conditions(result: Result) -> str:
    small = "**On small data: no figures of anything.** " if result.small else ""
    return (
        f"{small}Commit {result.commit or 'unknown'}, {result.date:%Y-%m-%d %H:%M} UTC, "
        f"{result.seconds:.0f} s. {result.host}; load {result.load[0]:.1f} before, "
        f"{result.load[1]:.1f} after."
    )


def _row(figure: Figure) -> str:
    holds = "" if figure.bound is None else "yes" if figure.holds else "**no**"
    cells = (figure.name, figure.value_text, figure.bound_text, holds, figure.evidence)
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
