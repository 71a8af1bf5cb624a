"""The page of a replay: what each policy gained and cost, and what became of injected faults."""

import json
import shlex
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from scipy.special import gammaincinv

from tasks.contracts import replay
from tasks.contracts.telemetry import ResourceUse
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import URI_SCHEME
from tasks.reporting import drawing as draw
from tasks.reporting.charts import Estimate, trade_chart
from tasks.reporting.page import page_environment
from tasks.reporting.quantities import (
    MISSING,
    count,
    decimal,
    difference,
    estimate,
    is_shown,
    percent,
    plural,
    significant,
)

PAGE, FACTS = "replay.html", "replay.json"
STYLES: dict[replay.PolicyName, dict[str, Any]] = {
    "never": {"color": draw.STONE, "linestyle": "-", "linewidth": 1.6},
    "weekly": {"color": draw.VIOLET, "linestyle": (0, (0.7, 1.8)), "linewidth": 2},
    "monthly": {"color": draw.SAND, "linestyle": (0, (3, 1.8)), "linewidth": 2},
    "on-drift-alarm": {"color": draw.BAD, "linestyle": (0, (5, 1.5, 0.8, 1.5)), "linewidth": 1.6},
    "controller": {"color": draw.WATER, "linestyle": "-", "linewidth": 3},
    "oracle": {"color": draw.INK, "linestyle": (0, (7, 2)), "linewidth": 1},
}
"""Dash and width repeat what the colour says."""
LINE_HEIGHT = 15.0
LEFT, RIGHT, TOP, HIGH = 112.0, 118.0, 50.0, 260.0
"""Pixels around the picture of quality, and its height."""


def write_replay(result: replay.ReplayResult, folder: Path) -> Path:
    """Write `replay.html` and, before it, the result as `replay.json`; equal results, equal bytes.

    Raises:
        StorageError: the disk refused a write.
    """
    write_atomically(folder / FACTS, result.model_dump_json(indent=1) + "\n")
    write_atomically(folder / PAGE, render_replay(result))
    return folder / PAGE


def render_replay(result: replay.ReplayResult) -> str:
    """The whole page, self-contained: no script and no address that a browser would load."""
    names = [one.policy for one in result.policies]
    template = page_environment().get_template("replay.html.j2")
    return template.render(
        result=result,
        names=names,
        recommended=result.of(result.recommended),
        judged=judgement(result),
        pictures=pictures(result),
        known=known,
        compared=compared,
        energy=energy,
        money=money,
        hours_after=hours_after,
        yearly_bound=poisson_bound,
        command=command(result),
    )


def judgement(result: replay.ReplayResult) -> tuple[str, str, str]:
    """Tone, headline and detail: the controller against the best schedule or alarm, held out."""
    others = [p for p in result.policies if p.policy not in ("controller", "oracle")]
    rivals = [p for p in others if is_shown(p.held_out.to_controller.value)]
    ours = result.of("controller")
    if not rivals:
        return "care", "The controller was not compared", "No policy has a known quality."
    best = max(rivals, key=lambda p: p.held_out.to_controller.value)
    gap, name = best.held_out.to_controller, result.quality_name
    detail = f"{name} of {best.policy} minus that of the controller on the held-out part: "
    detail += f"{difference(gap)}. Trainings there: controller {ours.held_out.num_trainings}, "
    detail += f"{best.policy} {best.held_out.num_trainings}. {_worth(ours.held_out, others)}"
    loses = gap.value > 0
    sure = gap.low > 0 if loses else gap.high < 0
    tone = ("bad" if loses else "good") if sure else "care"
    words = f"{'loses' if loses else 'gains'} {decimal(abs(gap.value), 4)} "
    words += f"{'to' if loses else 'over'} {best.policy}{'' if sure else ', within the interval'}"
    return tone, f"The controller {words}", detail


def _worth(part: replay.PolicyQuality, others: Sequence[replay.PolicyResult]) -> str:
    """The gain per CPU hour beside that of whoever gains more by it, and what the checks take."""
    own, trained = part.gain_per_cpu_hour, percent(part.training_cpu_s / (part.use.cpu_s or 1))
    if own is None or not is_shown(own.value):
        return ""
    more = [
        f"{p.policy} {difference(theirs)}"
        for p in others
        if (theirs := p.held_out.gain_per_cpu_hour) and theirs.value > own.value
    ]
    return (
        f"Gain over never by CPU hour: controller {difference(own)}, "
        f"{'more with ' + ', '.join(more) if more else 'no other gains more'}. Trainings took "
        f"{trained} of its CPU time, checks and recalibrations the rest."
    )


def known(text: object, otherwise: str = "not known") -> str:
    """The text; words where it stands for a number that is missing."""
    words = str(text)
    return otherwise if not words or words.startswith(MISSING) else words


def energy(use: ResourceUse) -> str:
    """`1.24 kJ (estimated)`."""
    if not is_shown(use.joules):
        return "not known"
    return f"{significant(use.joules / 1000)} kJ{' (estimated)' if use.estimated else ''}"


def money(use: ResourceUse) -> str:
    """`0.0123 EUR`."""
    return f"{significant(use.amount)} {use.currency}" if is_shown(use.amount) else "no prices"


def hours_after(fault: replay.FaultResult, moment: datetime | None) -> str:
    """How long after its start something happened: `6 h` or `never`."""
    if moment is None:
        return "never"
    return f"{significant((moment - fault.start).total_seconds() / 3600)} h"


def poisson_bound(seen: int, years: float) -> float | None:
    """Exact one-sided 95 % upper bound of a yearly rate (Garwood, 1936); None without years."""
    return float(gammaincinv(seen + 1, 0.95)) / years if years > 0 else None


def command(result: replay.ReplayResult) -> str:
    """Recomputes the held-out quality of each policy, run in the state folder."""
    path = f"artifacts/{result.scores.uri.removeprefix(URI_SCHEME)}"
    window, function = result.held_out, "roc_auc_score"
    function = "r2_score" if result.quality_name == "R2" else function
    time, label = (f"p[{name!r}]" for name in (result.event_time, result.label))
    part = f"p[({time} >= '{window.start.isoformat()}') & ({time} < "
    part += f"'{window.end.isoformat()}') & {label}.notna()]"
    program = f"import pandas, sklearn.metrics as m; p = pandas.read_parquet({json.dumps(path)}); "
    scores = "p.filter(regex=f'^{c}(_[0-9]+)?$').squeeze(axis=1)"  # a column a class, or one
    more = ", multi_class='ovr'" if function == "roc_auc_score" else ""
    program += f"p = {part}; [print(c, m.{function}({label}, {scores}{more})) for c in "
    program += f"{[one.policy for one in result.policies]!r}]"
    return f"python -c {shlex.quote(program)}"


def replay_lines(result: replay.ReplayResult) -> list[str]:
    """For the command line: a table of policies, a line for each fault, and the recommendation."""
    rows = [("policy", result.quality_name, "to monthly", "trainings", "CPU hours", "money")]
    for one in result.policies:
        part = one.held_out
        gap = compared(one, part, "monthly")
        rows.append((
            one.policy, known(estimate(part.quality, 4)), gap,
            count(part.num_trainings), significant(part.use.cpu_s / 3600), money(part.use),
        ))  # fmt: skip
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, wide, strict=True)).rstrip() for row in rows]
    for fault in result.faults:
        noticed = hours_after(fault, fault.noticed)
        after = noticed if fault.noticed is None else f"after {noticed}"
        lines.append(f"{fault.fault}: noticed {after}, answer {fault.answer}, {fault.verdict}")
    return [*lines, *([result.proposal.sentence] if result.proposal else []), result.sentence]


def compared(one: replay.PolicyResult, part: replay.PolicyQuality, other: replay.PolicyName) -> str:
    """The difference of the quality to another policy's, or why there is none."""
    if one.policy == other:
        return "itself"
    metric = part.regret if other == "oracle" else getattr(part, f"to_{other}")
    return known(difference(metric))


def pictures(result: replay.ReplayResult) -> dict[str, Markup]:
    """Pictures by key, for the page and the Prefect UI; what was not measured has none."""
    drawn = {
        "quality": quality_chart(result, against=None),
        "gain": quality_chart(result, result.of("never")),
    }
    priced = [
        (p.held_out.use.cpu_s / 3600, _gain(p))
        for p in result.policies
        if p.held_out.use.cpu_s > 0 and is_shown(p.held_out.to_never.value)
    ]
    if priced:
        title, titles = "Gain against cost", ("CPU hours (logarithmic)", "gain over never")
        words = f"{len(priced)} policies; left is cheaper, up is better."
        drawn["cost"] = trade_chart(title, *titles, priced, words)
    return drawn


def _gain(one: replay.PolicyResult) -> Estimate:
    gain, hours = one.held_out.to_never, one.held_out.use.cpu_s / 3600
    tip = f"{one.policy}: {difference(gain)} for {significant(hours)} CPU hours"
    return Estimate(one.policy, gain.value, gain.low, gain.high, "policy", tip)


def quality_chart(result: replay.ReplayResult, against: replay.PolicyResult | None) -> Markup:
    """Weekly quality by policy, or its difference to one of them; below it promotions and faults.

    Each line has its policy's name at its end; the held-out part has a ground of its own.
    """
    name = f"weekly {result.quality_name}" + (f" minus that of {against.policy}" if against else "")
    base = {w.start: w.quality for w in against.weeks} if against else None
    lines = {p.policy: _points(p, base) for p in result.policies}
    start, end = result.history.start, result.history.end
    rows = LINE_HEIGHT * (len(result.policies) + 1)
    with draw.canvas(1040, TOP + HIGH + rows + 52, (LEFT, RIGHT, TOP, rows + 52)) as drawing:
        axes = drawing.axes
        span = draw.limits(*(y for points in lines.values() for _, y in points), margin=0.1)
        axes.set(xlim=(start, end), ylim=span)
        _held_out(drawing, result, span[1])
        for fault in result.faults:
            axes.axvline(fault.start, **draw.BASELINE)  # type: ignore[arg-type]
        for policy, points in lines.items():
            axes.plot(*zip(*points, strict=True), **STYLES[policy]) if points else None
        _name_ends(drawing, [(p[-1][1], name) for name, p in lines.items() if p], span)
        drawing.write(4, TOP - 22, name, color=draw.SOFT)
        axes.set_xticks([])
        _strip(drawing, result, rows)
        words = f"{name} of {plural(len(lines), 'policy', 'policies')}, {start:%Y-%m-%d} to "
        return drawing.svg(name, f"{words}{end:%Y-%m-%d}; below it promotions and faults.", "flow")


def _points(
    one: replay.PolicyResult, base: dict[date, float | None] | None
) -> list[tuple[datetime, float]]:
    """Weeks of known quality, or of a known difference."""
    found = []
    for week in one.weeks:
        zero = 0.0 if base is None else base.get(week.start)
        if is_shown(week.quality) and is_shown(zero):
            found.append((datetime.combine(week.start, time(), UTC), week.quality - zero))
    return found


def _held_out(drawing: draw.Canvas, result: replay.ReplayResult, top: float) -> None:
    ends = result.held_out.start, result.held_out.end
    drawing.axes.axvspan(*ends, color=draw.WASH, alpha=0.5, linewidth=0)  # type: ignore[arg-type]
    drawing.note("held-out part: it judges", (ends[0], top), (6, 9), color=draw.SOFT)


def _name_ends(
    drawing: draw.Canvas, ends: Sequence[tuple[float, replay.PolicyName]], span: tuple[float, float]
) -> None:
    """Names beside the ends of their lines, moved apart where they would overlap."""
    highest_first, place = sorted(ends, reverse=True), TOP - LINE_HEIGHT
    for n, (value, policy) in enumerate(highest_first):
        wanted = TOP + HIGH * (span[1] - value) / (span[1] - span[0])
        lowest = TOP + HIGH - LINE_HEIGHT * (len(ends) - 1 - n)
        place = min(max(wanted, place + LINE_HEIGHT), lowest)
        weight = "bold" if policy == "controller" else "normal"
        colour = STYLES[policy]["color"]
        drawing.write(1040 - RIGHT + 8, place, policy, color=colour, fontweight=weight)


def _strip(drawing: draw.Canvas, result: replay.ReplayResult, height: float) -> None:
    """A row for each policy with a tick for each promotion, and one for faults."""
    axes = drawing.add(LEFT, TOP + HIGH + 14, 1040 - LEFT - RIGHT, height)
    names = [p.policy for p in result.policies]
    axes.set(xlim=drawing.axes.get_xlim(), ylim=(len(names) + 0.5, -0.5), yticks=[])
    axes.grid(visible=False)
    locator = AutoDateLocator(maxticks=12)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    formatter = ConciseDateFormatter(locator, show_offset=False)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(formatter)
    marks = [
        (n, act.at, f"{act.action.replace('_', ' ')}: {act.reason}", "|")
        for n, p in enumerate(result.policies)
        for act in p.acts
        if act.promoted
    ]
    marks += [(len(names), f.start, f"{f.fault}: {f.described}", "X") for f in result.faults]
    for row, at, tip, marker in marks:
        colour = STYLES[names[row]]["color"] if row < len(names) else draw.BAD
        (mark,) = axes.plot([at], [row], marker, color=colour, ms=8, mec=colour, mew=2)  # type: ignore[arg-type]
        drawing.tip(mark, tip)
    for n, name in enumerate([*names, *(["faults"] if result.faults else [])]):
        y = TOP + HIGH + 14 + height * (n + 0.5) / (len(names) + 1)
        drawing.write(LEFT - 8, y, name, ha="right", color=draw.SOFT)
