"""`make bench`: every figure that the project promises, as a ratio or against its bound.

    python -m infra.bench [PART | PART/NAME ...] [--resume] [--home STATE_FOLDER] [--small]

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

from infra.bench.parts import MEASUREMENTS, ON_DEVICE, Measurement, chosen
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
        stored = {part: read_results(folder, part) if folder else {} for part in parts}
        earlier = [stored[each.part].get(each.name) for each in measurements]
    except ValueError as exc:
        say(str(exc))
        return WRONG_USAGE
    if ON_DEVICE & parts and not devices_in_words():
        say("gpu measures an NVIDIA device, and this machine shows none; nothing was measured")
        return WRONG_USAGE
    # What a bench started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="falaj-bench-") as scratch:
        loop = LoopState(Path(scratch) / "loop", options.home, options.small)
        runner = Runner(Path(scratch), loop, options.small)
        wanted = list(zip(measurements, earlier, strict=True))
        try:
            results = _measure(runner, wanted, folder, options)
        except KeyboardInterrupt:
            say("interrupted; what was measured is kept, and --resume goes on")
            return INTERRUPTED
    for measurement, result in zip(measurements, results, strict=True):
        sys.stdout.write("\n".join([measurement.title, *result.lines(), ""]) + "\n")
    return 0 if all(result.holds for result in results) else 1


def _measure(
    runner: Runner,
    wanted: list[tuple[Measurement, Result | None]],
    folder: Path | None,
    options: argparse.Namespace,
) -> list[Result]:
    """Measure one after the other; what is done is kept where asked."""
    results: list[Result] = []
    for number, (measurement, earlier) in enumerate(wanted):
        if options.resume and earlier is not None and runner.is_done(earlier):
            say(f"{measurement.title} was measured on this commit before")
            results.append(earlier)
            continue
        counted = f"{number + 1} of {len(wanted)}"
        say(f"{counted}: {measurement.title}, {measurement.what}")
        results.append(runner.measure(measurement))
        if folder is not None:
            write_result(folder, measurement.part, measurement.name, results[-1])
        if failure := results[-1].failure:
            say(f"  failed: {failure}")
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m infra.bench", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("part", nargs="*", help="a part, or part/name; all where none is named")
    parser.add_argument("--list", action="store_true", help="list what there is to measure")
    parser.add_argument("--resume", action="store_true", help="keep results of this commit")
    parser.add_argument("--home", type=Path, help="state folder of a finished loop to read")
    parser.add_argument("--small", action="store_true", help="little data: does it work at all?")
    parser.add_argument(
        "--results", type=Path, help="folder (default: docs/benchmarks; none with --small)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
