"""`make bench`: every figure that the project promises, as a ratio or against its bound.

    python -m infra.bench [PART | PART/NAME ...] [--home STATE_FOLDER] [--small]

`--list` lists the parts and what they measure; without an argument all but `gpu`, which needs a
device. A measurement is a process of its own, and what it measured is written as soon as it ends,
to `<part>.json` and `<part>.md` in `docs/benchmarks`. One that fails is a line there, with the
reason, and keeps nothing else from being measured. Exit code 1 where a figure misses its bound or a
measurement fails.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from infra.bench.parts import MEASUREMENTS, ON_DEVICE, chosen
from infra.bench.results import RESULTS, Result, devices_in_words, read_results, write_result
from infra.bench.running import LoopState, Runner, say

WRONG_USAGE, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and say by the exit code whether all figures hold."""
    options = _parser().parse_args(arguments)
    if options.list:
        sys.stdout.write("".join(f"{each.title:<26}{each.what}\n" for each in MEASUREMENTS))
        return 0
    folder = options.results or (None if options.small else RESULTS)
    try:
        measurements = chosen(options.part)
        parts = {each.part for each in measurements}
        if folder is not None:
            for part in parts:  # that one is damaged is not found at the end
                read_results(folder, part)
    except ValueError as exc:
        say(str(exc))
        return WRONG_USAGE
    if ON_DEVICE & parts and not devices_in_words():
        say("gpu measures an NVIDIA device, and this machine shows none; nothing was measured")
        return WRONG_USAGE
    if options.home and not options.home.is_dir():
        say(f"--home {options.home} is no folder; expected a finished loop's state")
        return WRONG_USAGE
    # What a bench started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="falaj-bench-") as scratch:
        loop = LoopState(Path(scratch) / "loop", options.home, options.small)
        runner = Runner(Path(scratch), loop, options.small)
        results: list[Result] = []
        try:
            for each in measurements:
                counted = f"{len(results) + 1} of {len(measurements)}"
                say(f"{counted}: {each.title}, {each.what}")
                results.append(runner.measure(each))
                if folder is not None:
                    write_result(folder, each.part, each.name, results[-1])
                if failure := results[-1].failure:
                    say(f"  failed: {failure}")
        except KeyboardInterrupt:
            say("interrupted; what was measured is kept: name the parts that are not")
            return INTERRUPTED
    for measurement, result in zip(measurements, results, strict=True):
        sys.stdout.write("\n".join([measurement.title, *result.lines(), ""]) + "\n")
    return 0 if all(result.holds for result in results) else 1


def _parser() -> argparse.ArgumentParser:
    words = str(__doc__).partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m infra.bench", description=words)
    parser.add_argument("part", nargs="*", help="a part, or part/name; all where none is named")
    parser.add_argument("--list", action="store_true", help="list what there is to measure")
    parser.add_argument("--home", type=Path, help="state folder of a finished loop to read")
    parser.add_argument("--small", action="store_true", help="little data: does it work at all?")
    parser.add_argument("--results", type=Path, help="default: docs/benchmarks; none with --small")
    return parser


if __name__ == "__main__":
    sys.exit(main())
