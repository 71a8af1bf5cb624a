"""Prefect tasks of the reporting room: the report on disk, and its pictures in the Prefect UI."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup
from prefect import task
from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact

from tasks.contracts.release import CompressionResult
from tasks.contracts.replay import ReplayResult
from tasks.contracts.rollout import Entry, ReleaseSummary
from tasks.contracts.run import RunRecord
from tasks.contracts.training import StudyRecord
from tasks.kernel.retry_policy import uncached
from tasks.kernel.settings import Settings, platform_address
from tasks.reporting import page as pages
from tasks.reporting.gallery import as_data_url

# Never cached: a report that someone removed is written again, and it takes a moment only.


_POLICY = uncached(600)


@task(name="publish-report", task_run_name="report-{record.run_id}", **_POLICY)
def publish_report(record: RunRecord) -> pages.ReportFiles:
    """Write `report.html` and `report.json` of a run, let `latest` lead to them, show its pictures.

    Safe to retry: the same record gives the same files, each renamed into place when whole; a
    picture shown twice is a new version of the same artifact.

    Raises:
        ConfigurationError: the run id cannot name a folder. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    settings = Settings.from_environment()
    files = pages.write_report(record, settings.store, settings.reports)
    mlflow = platform_address(settings.home, "mlflow_url")  # reports are beside it
    folder = settings.reports.relative_to(settings.home).as_posix()
    create_markdown_artifact(
        pages.announcement(record, files, f"{mlflow}/{folder}" if mlflow else None),
        key="run-report",
        description=f"Report of {record.run_id}",
    )
    _show(pages.pictures_of(record, settings.store).gallery(), "picture", record.run_id)
    return files


@task(name="show-release", task_run_name="show-{release.model}-v{release.candidate}", **_POLICY)
def show_release(release: ReleaseSummary, entries: tuple[Entry, ...]) -> str:
    """Write the release's page, and its evidence as artifacts in the UI; returns the page's path.

    Safe to retry: it replaces the page.
    """
    from tasks.reporting.release_page import newest_evidence, picture, write_page

    page = write_page(release, entries, Settings.from_environment().home)
    evidence, reason = newest_evidence(entries), entries[-1].reason
    create_table_artifact(
        key="release-evidence",
        table=[
            {
                "metric": f.metric.replace("_", " "),
                "state": "WORSE" if f.is_harm else "no harm shown",
                "estimate": f.estimate,
                "at least": f.low,
                "at most": f.high,
                "of": f.num,
                "evidence": f.sentence,
            }
            for f in (evidence.findings if evidence else ())
        ],
        description=f"{release.title}: {reason}",
    )
    create_markdown_artifact(
        key="release",
        markdown=f"## {release.title}\n\n{release.state.replace('_', ' ')}, step "
        f"{release.step_names[release.step]}. {reason}.\n\n"
        f"![bounds over time]({picture(release, entries)})\n\nPage: `{page}`\n",
    )
    return str(page)


@task(name="publish-replay", task_run_name="page-{result.use_case}", **_POLICY)
def publish_replay(result: ReplayResult) -> str:
    """Write page and facts of a replay, show its pictures in the Prefect UI; returns the page.

    The path is relative to the state folder. Safe to retry: equal results give equal files.

    Raises:
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.reporting.replay_page import pictures, write_replay

    settings = Settings.from_environment()
    page = write_replay(result, settings.reports / "replay" / result.use_case)
    _show(pictures(result), "replay", result.use_case)
    create_markdown_artifact(
        f"{result.sentence} The page is `{page}`.",
        key="replay-page",
        description=f"Replay of {result.use_case}",
    )
    return str(page.relative_to(settings.home))


@task(name="publish-search", task_run_name="page-{record.study}", **_POLICY)
def publish_search(record: StudyRecord) -> str:
    """Write the page of a search, show its pictures in the Prefect UI; returns the page's path.

    The path is relative to the state folder. Safe to retry: the same record gives the same files,
    and a picture shown twice is a new version of the same artifact.

    Raises:
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.reporting.search import gallery, write_search_page

    settings = Settings.from_environment()
    pictures = gallery(record)
    page = write_search_page(record, settings.reports, pictures)
    _show({"history": pictures["history"]}, "search", record.study)
    create_markdown_artifact(
        f"{len(record.trials)} trials of `{record.study}`; the page is `{page}`.",
        key="search-page",
        description=f"Search {record.study}",
    )
    return str(page.relative_to(settings.home))


@task(
    name="publish-compression",
    task_run_name="page-{result.compression.method}-of-v{result.compression.parent.version}",
    **_POLICY,
)
def publish_compression(result: CompressionResult) -> str:
    """Write the outcome of a model compression and show it; returns the path of its Markdown.

    The path is relative to the state folder. Safe to retry: the same result gives the same files.

    Raises:
        StorageError: the disk refused a write. Not retried.
    """
    settings, parent = Settings.from_environment(), result.compression.parent
    path, text = pages.write_compression(result, settings.reports)
    outcome = "refused" if result.judged.refusal else "registered"
    create_markdown_artifact(
        text,
        key="compression",
        description=f"A smaller network of {parent.name} version {parent.version}: {outcome}",
    )
    return str(path.relative_to(settings.home))


def _show(pictures: Mapping[str, Markup], key: str, subject: str) -> None:
    """Show pictures in the Prefect UI, as images that need no file server."""
    for name, drawing in pictures.items():
        create_image_artifact(
            as_data_url(drawing), key=f"{key}-{name}", description=f"{name} of {subject}"
        )
