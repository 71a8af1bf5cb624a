"""Commands about one entity, such as a customer: erase all rows of it, or give them out.

Regulation (EU) 2016/679 (GDPR): article 17 (erasure), 15 and 20 (a copy of the data). Models that
were trained on erased rows stay usable; the certificate lists them, for the owner to decide.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from cyclopts import Parameter

from falaj.context import EXIT_DATA, DryRun, Here, Shown, row
from falaj.state import location_of
from flows.config import PipelineConfig, read_pipeline_config
from infra.orchestration.embedded import only_run
from tasks.features.online.materialization import forget_entities
from tasks.features.tables.build import published_path
from tasks.governance.erasure import (
    FOLDER,
    SEPARATOR,
    ErasedEntities,
    Mask,
    Theirs,
    new_entities,
    read_entities,
    write_entities,
)
from tasks.governance.journal import Journal, process_identity
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import append_lines, private_folder, scratch_folder, write_atomically
from tasks.kernel.keys.signed import signed
from tasks.kernel.location import Location
from tasks.kernel.settings import children, drop, put
from tasks.predictions import schema as log
from tasks.predictions.segments import folder_held, remove_replaced
from tasks.state.backup import list_backups, read_backup
from tasks.state.contents import MODELS, contents, text_of
from tasks.state.databases import name_of_state
from tasks.state.erase import (
    ASIDE,
    Eraser,
    Folder,
    Place,
    builds_of,
    erase_backups,
    erase_builds,
    id_columns,
    in_backup,
)

Entity = Annotated[
    list[str], Parameter(help="Join key and value, as NAME=VALUE; repeat it for a composite key.")
]
MENDING = "repair or remove it, and run the erasure again"


def erase(
    *, entity: Entity, backups: list[str] | None = None, dry_run: DryRun = False, context: Here
) -> Shown:
    """Erase all rows of one entity, for good: state, online store, prediction log, backups.

    A certificate says what was done, what was left, and what cannot be built again. Where it was
    killed, the same command goes on.

    Args:
        entity: `subject=ana@example.org` is who requested predictions.
        backups: Location of backups; may be repeated.

    Raises:
        ConfigurationError: the entity is not written as NAME=VALUE, or a run is under way.

    Examples:
        falaj erase --entity customer=17 --dry-run
        falaj erase --entity customer=17 --backups /mnt/backups --yes
    """
    places = [location_of(where) for where in backups or []]
    if not dry_run:
        context.confirm(f"Erase all rows of {' '.join(entity)}, for good?")
    with _working(context, entity, alone=not dry_run) as work:
        work.learn(places)
        if dry_run:
            found = work.rows(places)
            lines = [row(str(num), f"rows in {kind}") for kind, num in sorted(found.items())]
            return Shown({"rows": found}, [*(lines or ["no rows"]), "Nothing was changed"])
        certificate = work.erase(places)
    lines = [row(str(num), f"rows in {kind}") for kind, num in certificate["rows"].items()]
    lines += [row("Named", certificate["entity"]), row("Written", work.write(certificate))]
    left = [*certificate["not_readable"], *certificate["still_found"]]
    return Shown(certificate, [*lines, *(row("Left", n) for n in left)], EXIT_DATA if left else 0)


def export_subject(folder: Path, /, *, entity: Entity, context: Here) -> Shown:
    """Write all rows of one entity to a new folder, as JSON lines, with where they come from.

    Args:
        folder: It is made; its owner alone may enter it.

    Raises:
        ConfigurationError: the folder exists, or the entity is not written as NAME=VALUE.

    Examples:
        falaj export-subject customer-17 --entity customer=17
    """
    if folder.exists():
        raise ConfigurationError(f"{folder} exists; expected a new folder. Nothing was written")
    with _working(context, entity, alone=False) as work:
        home, written = context.home, Counter[str]()
        tables = published_path(context.settings.features_home).parent
        published = tables.relative_to(home).as_posix() if tables.is_relative_to(home) else "-"

        def write(name: str, file: Path, masks: list[Mask]) -> None:
            """Months of a table, and days of the log, are one file."""
            if not name.startswith((f"{published}/", "predictions/")):
                return
            table = ".".join(Path(name).parts[-3:-1])
            with pq.ParquetFile(file) as source, (folder / f"{table}.jsonl").open("a") as lines:
                for number, mask in enumerate(masks):
                    rows = source.read_row_group(number).filter(pa.array(mask)).to_pylist()
                    lines.writelines(json.dumps(each, default=str) + "\n" for each in rows)
                    written[f"{table}.jsonl"] += len(rows)

        private_folder(folder)
        work.learn([])
        held = work.eraser.rows(Folder(home), write)
        index = {"entity": work.values, "time": datetime.now(UTC), "files": written}
        index |= {"sources": work.sources(), "rows_held": held}
        (folder / "index.json").write_text(json.dumps(index, indent=1, default=str))
    lines = [row(str(num), name) for name, num in sorted(written.items())]
    return Shown(index, [*lines, row("Written", folder)])


@dataclass
class _Work:
    """One entity, and what looks for it."""

    context: Here
    config: PipelineConfig
    values: dict[str, str]
    known: ErasedEntities
    eraser: Eraser

    @property
    def entity(self) -> str:
        """How it is named where nobody shall know it."""
        return self.known.entity(self.values).digest

    @property
    def progress(self) -> Path:
        """Ids of rows that were found, and how many, until all is done."""
        return self.context.home / FOLDER / f"{self.entity[:16]}.progress.json"

    def sources(self) -> list[str]:
        """Raw tables that have its keys; the rows there are their owners'."""
        tables = self.config.features.raw_tables
        return [f"{t.name}: {t.uri}" for t in tables if self.values.keys() <= t.columns.keys()]

    def places(self, backups: list[Location]) -> Iterator[Place]:
        """All that hold files of the state."""
        settings, scratch = self.context.settings, self.eraser.scratch
        yield Folder(settings.home)
        if settings.location is not None:
            yield from builds_of(settings.location, scratch)
        for location in backups:
            for name in list_backups(location, name_of_state(settings)):
                yield in_backup(read_backup(location, name), location, scratch)

    def learn(self, backups: list[Location]) -> None:
        """Find the ids of its rows, by which tables without its keys name them."""
        keys = self.eraser.theirs.keys
        for columns, ids in json.loads((self._lines() or ["[]"])[0]):
            keys.setdefault(tuple(columns), set()).update(ids)
        for place in self.places(backups):
            self.eraser.learn(place)

    def rows(self, backups: list[Location]) -> Counter[str]:
        """Count them by folder."""
        found = Counter[str]()
        for place in self.places(backups):
            found.update(self.eraser.rows(place))
        online = forget_entities(self.eraser.theirs, self.context.settings, count_only=True)
        found.update({f"online: {view}": num for view, num in online.items()})
        return found

    def erase(self, backups: list[Location]) -> dict[str, Any]:
        """Do it; facts of the certificate."""
        settings, home, eraser = self.context.settings, self.context.home, self.eraser
        write_entities(home, self.known)
        ids = [(c, sorted(each)) for c, each in eraser.theirs.keys.items() if c in eraser.ids]
        noted = "".join(f"{line}\n" for line in [json.dumps(ids), *self._lines()[1:]])
        write_atomically(self.progress, noted.encode(), private=True)
        eraser.erased = lambda *done: append_lines(self.progress, [json.dumps(done)])
        with Journal(home / "audit").recorded("erase", subject={"entity": self.entity}) as act:
            for view, num in forget_entities(eraser.theirs, settings, count_only=False).items():
                eraser.erased(f"online: {view}", view, num)
            with ExitStack() as held:
                for model in log.logged_models(home):
                    folder = log.model_folder(home, model)
                    held.enter_context(folder_held(folder, exclusive=True))
                    for day in children(folder):
                        remove_replaced(day)
                eraser.erase(Folder(home))
            if settings.location is not None:
                erase_builds(eraser, settings.location)
            generations = [erase_backups(eraser, location) for location in backups]
            left = {
                f"{place.label}: {name}": num
                for place in self.places(backups)
                for name, num in eraser.left(place).items()
            }
            rows = self._erased()
            act.update(rows=rows.total(), left=len(left), unread=len(eraser.unread))
        return {
            "entity": self.entity,
            "keys": sorted(self.values),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "who": process_identity(),
            "rows": dict(sorted(rows.items())),
            "rows_left": sum(left.values()),
            "backups": generations,
            "search": "of values and rows" if eraser.marks else "of rows: the value is too short",
            "still_found": [*left],
            "not_readable": [f"{n}: {why}; {MENDING}" for n, why in eraser.unread.items()],
            "to_be_erased_by_their_owner": self.sources(),
            "cannot_be_rebuilt": eraser.changed,
            "models_trained_with_it": self._models(),
        }

    def _models(self) -> list[str]:
        """Files that describe models made of what was changed."""
        changed = [text for uri, sha256 in self.eraser.changed.items() for text in (uri, sha256)]
        described = (e for e in contents(self.context.settings, MODELS) if e[0].endswith(".json"))
        return [n for n, source in described if any(t in text_of(source) for t in changed)]

    def _lines(self) -> list[str]:
        return self.progress.read_text().splitlines() if self.progress.exists() else []

    def _erased(self) -> Counter[str]:
        """What was noted, also before a kill: a table that was being written is noted twice."""
        done = {tuple(json.loads(line)) for line in self._lines()[1:]}
        found = Counter[str]()
        for kind, _, num in done:
            found[kind] += num
        return found

    def write(self, certificate: dict[str, Any]) -> Path:
        """Keep the certificate, signed, and as text; what was needed to go on is removed."""
        home = self.context.home
        file = home / FOLDER / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{self.entity[:16]}.json"
        put(file, signed(home, certificate))
        lines = (f"{name}: {json.dumps(value)}\n" for name, value in certificate.items())
        put(file.with_suffix(".txt"), "".join(lines))
        drop(self.progress)
        return file


@contextmanager
def _working(context: Here, entity: list[str], *, alone: bool) -> Iterator[_Work]:
    if unclear := [text for text in entity if not all(text.partition("=")[::2])]:
        raise ConfigurationError(
            f"--entity {unclear[0]} names no value; write it as NAME=VALUE. Nothing was changed"
        )
    values = dict(text.split("=", 1) for text in entity)
    settings, home = context.settings, context.home
    config = read_pipeline_config(settings.feature_repo)
    held, near = (only_run(home), home) if alone else (nullcontext(), None)
    with held, scratch_folder(ASIDE, near) as scratch:
        known = read_entities(home) or new_entities()
        spelled = [{value} for value in values.values()]
        if log.mask_key_file(home).exists():
            mask = log.open_mask(home)
            spelled = [{value, mask.text(value)} for value in values.values()]
        every = [dict(zip(values, each, strict=True)) for each in product(*spelled)]
        theirs = Theirs(keys={tuple(values): {SEPARATOR.join(each.values()) for each in every}})
        eraser = Eraser(settings, theirs, id_columns(settings), tuple(values.values()), scratch)
        yield _Work(context, config, values, known.with_entities(every), eraser)
