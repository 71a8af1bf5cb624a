"""The page of a model compression: how small, how good, and whether a teacher helped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from tasks.contracts.evaluation import Comparison, Metric, Quality
from tasks.contracts.release import CompressionResult
from tasks.kernel.files import write_atomically
from tasks.reporting.charts import Estimate, interval_chart
from tasks.reporting.page import page_environment
from tasks.reporting.pictures import Drawings
from tasks.reporting.quantities import difference, estimate

PAGE, FACTS = "compression.html", "compression.json"


def networks(result: CompressionResult) -> list[tuple[str, Quality]]:
    """Each network that was judged, by its name for people, the large one first."""
    judged = result.judged
    found = [("large network", judged.parent)]
    if judged.distilled is None or judged.control is None:
        return [*found, ("small network", judged.student)]
    return [*found, ("small, distilled", judged.distilled), ("small, control", judged.control)]


def differences(result: CompressionResult) -> list[tuple[str, Comparison]]:
    """Each paired comparison, by what it is of."""
    found = [("small minus large", result.judged.to_parent)]
    gain = result.judged.gain
    return [*found, ("distilled minus control", gain)] if gain else found


def gallery(result: CompressionResult) -> dict[str, Markup]:
    """Quality of each network, and the differences on the same rows and draws, by key."""
    primary, name = result.judged.parent.primary, result.judged.parent.primary_name
    return {
        "quality": _chart(
            f"{name} of each network",
            [(network, quality.primary) for network, quality in networks(result)],
            (primary.low, "least that is accepted"),
        ),
        "differences": _chart(
            f"Differences of {name}",
            [(pair, change.primary) for pair, change in differences(result)],
            (0.0, "no difference"),
        ),
    }


def _chart(title: str, rows: Sequence[tuple[str, Metric]], reference: tuple[float, str]) -> Markup:
    estimates = [Estimate(name, m.value, m.low, m.high) for name, m in rows]
    return interval_chart(title, estimates, f"{title} with 95 % interval", reference)


def render_compression_page(result: CompressionResult, use_case: str, pictures: Drawings) -> str:
    """The whole HTML page, self-contained: no script and no address that a browser would load."""
    template = page_environment().get_template("compression.html.j2")
    return template.render(
        result=result,
        use_case=use_case,
        networks=networks(result),
        differences=differences(result),
        pictures=pictures,
        closed=[g for g in result.promotion.gates if not g.passed] if result.promotion else [],
    )


def write_compression_page(
    result: CompressionResult, use_case: str, folder: Path, pictures: Drawings
) -> Path:
    """Write the page into the folder of its name and, before it, the same facts as JSON.

    The same result gives the same files, so it can be repeated.

    Raises:
        StorageError: the disk refused a write.
    """
    page = page_path(result, folder)
    write_atomically(page.with_name(FACTS), result.model_dump_json(indent=1) + "\n")
    write_atomically(page, render_compression_page(result, use_case, pictures))
    return page


def page_path(result: CompressionResult, folder: Path) -> Path:
    """Where the page of a result is: one for each parent and method."""
    made = result.compression
    return folder / f"compression-{made.parent.name}-v{made.parent.version}-{made.method}" / PAGE


def announcement(result: CompressionResult, page: str) -> str:
    """The outcome in a few lines of Markdown, for the Prefect UI."""
    made, judged = result.compression, result.judged
    outcome = f"**Not registered.** {judged.refusal}"
    if result.version is not None:
        is_champion = result.promotion is not None and result.promotion.promoted
        became = "is the champion" if is_champion else "was registered, and is not the champion"
        outcome = f"**{result.version.name} version {result.version.version} {became}.**"
    sizes = [made.parent_parameters] + [result.num_parameters] * 2
    lines = [
        outcome,
        "",
        f"| network | parameters | {judged.parent.primary_name} |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {size:,} | {estimate(quality.primary, 4)} |"
            for (name, quality), size in zip(networks(result), sizes, strict=False)
        ),
        "",
        *(f"- {name}: {difference(change.primary)}" for name, change in differences(result)),
    ]
    if judged.result:
        lines += ["", judged.result, "", f"{result.choice[:1].upper()}{result.choice[1:]}."]
    return "\n".join([*lines, "", f"The page is `{page}`."]) + "\n"
