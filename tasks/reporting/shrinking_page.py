"""The page of a shrinking: how small, how good, and whether a teacher helped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from tasks.contracts.evaluation import Comparison, Metric, Quality
from tasks.contracts.release import ShrinkingResult
from tasks.kernel.files import write_atomically
from tasks.reporting.charts import Estimate, interval_chart
from tasks.reporting.page import Drawings, page_environment
from tasks.reporting.quantities import difference, estimate

PAGE, FACTS = "shrinking.html", "shrinking.json"
DIGITS = 4


def gallery(result: ShrinkingResult) -> dict[str, Markup]:
    """The pictures that the Prefect UI shows too, by key."""
    return {"quality": quality_chart(result), "differences": difference_chart(result)}


def networks(result: ShrinkingResult) -> list[tuple[str, Quality]]:
    """Each network that was judged, by its name for people, the large one first."""
    judged = result.judged
    found = [("large network", judged.parent)]
    if judged.taught is None or judged.untaught is None:
        return [*found, ("small network", judged.student)]
    return [*found, ("small, taught", judged.taught), ("small, untaught", judged.untaught)]


def quality_chart(result: ShrinkingResult) -> Markup:
    """Quality of each network with its interval; the line is the least that is accepted."""
    parent = result.judged.parent
    rows = [_estimate(name, quality.primary) for name, quality in networks(result)]
    return interval_chart(
        f"{parent.primary_name} of each network",
        rows,
        f"{parent.primary_name} with 95 % interval",
        reference=parent.primary.low,
        reference_text="least that is accepted",
    )


def difference_chart(result: ShrinkingResult) -> Markup:
    """Differences on the same rows and draws, which intervals of single networks do not show."""
    name = result.judged.parent.primary_name
    rows = [_estimate(told, change.primary) for told, change in differences(result)]
    return interval_chart(
        f"Differences of {name}",
        rows,
        f"difference of {name} with 95 % interval",
        reference=0.0,
        reference_text="no difference",
    )


def differences(result: ShrinkingResult) -> Iterator[tuple[str, Comparison]]:
    """Each paired comparison, by what it is of."""
    judged = result.judged
    yield "small minus large", judged.to_parent
    if judged.teaching is not None:
        yield "taught minus untaught", judged.teaching


def render_shrinking_page(
    result: ShrinkingResult, use_case: str, pictures: Drawings | None = None
) -> str:
    """The whole HTML page, self-contained: no script and no address that a browser would load."""
    template = page_environment().get_template("shrinking.html.j2")
    return template.render(
        result=result,
        use_case=use_case,
        networks=networks(result),
        differences=list(differences(result)),
        pictures=pictures or gallery(result),
        closed=[g for g in result.promotion.gates if not g.passed] if result.promotion else [],
    )


def write_shrinking_page(
    result: ShrinkingResult,
    use_case: str,
    folder: Path,
    pictures: Drawings | None = None,
) -> Path:
    """Write the page into the folder of its name and, before it, the same facts as JSON.

    The same result gives the same files, so it can be repeated.

    Raises:
        StorageError: the disk refused a write.
    """
    page = place_of(result, folder)
    write_atomically(page.with_name(FACTS), result.model_dump_json(indent=1) + "\n")
    write_atomically(page, render_shrinking_page(result, use_case, pictures))
    return page


def place_of(result: ShrinkingResult, folder: Path) -> Path:
    """Where the page of a result is: one for each parent and method."""
    made = result.shrinking
    return folder / f"shrinking-{made.parent.name}-v{made.parent.version}-{made.method}" / PAGE


def announcement(result: ShrinkingResult, page: str) -> str:
    """The outcome in a few lines of Markdown, for the Prefect UI."""
    made, judged = result.shrinking, result.judged
    lines = [
        f"**Not registered.** {judged.refusal}" if judged.refusal else _registered(result),
        "",
        "| network | parameters | " + judged.parent.primary_name + " |",
        "| --- | --- | --- |",
    ]
    sizes = [made.parent_parameters] + [result.num_parameters] * 2
    lines += [
        f"| {name} | {size:,} | {estimate(quality.primary, DIGITS)} |"
        for (name, quality), size in zip(networks(result), sizes, strict=False)
    ]
    lines += ["", *(f"- {n}: {difference(c.primary)}" for n, c in differences(result))]
    if judged.result:
        lines += ["", judged.result, "", f"{result.choice[:1].upper()}{result.choice[1:]}."]
    return "\n".join([*lines, "", f"The page is `{page}`."]) + "\n"


def _registered(result: ShrinkingResult) -> str:
    assert result.version is not None
    is_champion = result.promotion is not None and result.promotion.promoted
    became = "is the champion" if is_champion else "was registered and did not become the champion"
    return f"**{result.version.name} version {result.version.version} {became}.**"


def _estimate(name: str, metric: Metric) -> Estimate:
    return Estimate(name, metric.value, metric.low, metric.high)
