"""Files of which a machine brings only what it reads: row groups of Parquet, and the footer.

A part is a row group with the bytes before it; the last part is the footer. Each has a digest of
its own, so that what was brought can be checked without the rest of the file. A partial copy is in
`.partial/` of its artifact's folder, beside the file of digests; what reads the artifact as a whole
completes it.
"""

import hashlib
import json
import os
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path

from tasks.kernel import files
from tasks.kernel.errors import ArtifactError, TransientError, refused_writes_explained
from tasks.kernel.location import MEND, Location, object_name
from tasks.kernel.values import Contract

PARTS_FILE, PARTIAL = "parts.json", ".partial"
SHARED = ".shared.json"
"""What the location said of a build, in the folder of its copy; as old as the last use of it."""
NUM_LOCKS = 64
"""Files that serve as locks of the parts of one copy."""


def described(path: Path) -> str:
    """Length and SHA-256 of each part of a Parquet file, in their order, as JSON."""
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path)
    ends = [0]
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        begun = ((c.dictionary_page_offset or c.data_page_offset, c) for c in columns)
        ends.append(max(start + column.total_compressed_size for start, column in begun))
    ends.append(path.stat().st_size)
    with path.open("rb") as file:
        contents = (file.read(end - start) for start, end in pairwise(ends))
        return json.dumps([(len(c), hashlib.sha256(c).hexdigest()) for c in contents])


class RemoteFile(Contract):
    """A file in a location, of which parts are brought."""

    path: Path
    """Where they go: a file in `.partial/`."""
    url: str
    """Of the location."""
    sha256: str
    parts_sha256: str | None = None
    """Of the file of digests, which is brought where it is not there."""


class PartialCopy:
    """A local file with holes where nothing was brought; the processes of a host share it.

    What is there its digest alone says, so a process that is killed, and a loss of power, leave
    nothing to mend.

    Args:
        remote: the file; it is made, with its whole size.
        location: reaches its URL.
    """

    def __init__(self, remote: RemoteFile, location: Location) -> None:
        self.path, self.sha256 = remote.path, remote.sha256
        self.num_bytes_brought = 0
        self._location = location
        parts, digest = self.path.parent.with_name(PARTS_FILE), remote.parts_sha256
        if digest and (not parts.exists() or files.digest_of(parts) != digest):
            location.bring(object_name(digest), parts, sha256=digest)
        found = json.loads(parts.read_bytes())
        starts = accumulate((length for length, _ in found), initial=0)
        self._parts = [(start, *part) for start, part in zip(starts, found, strict=False)]
        with refused_writes_explained(self.path):
            files.make_folder(self.path.parent)
            with self.path.open("ab") as file:
                file.truncate(sum(length for length, _ in found))

    def bring(self, number: int) -> None:
        """Bring a row group, or with -1 the footer, unless it is there.

        Raises:
            ArtifactError: the content is absent or damaged.
            TransientError: the location does not answer, or the copy was removed meanwhile.
            StorageError: the location or the disk refuses.
        """
        start, length, sha256 = self._parts[number]
        with suppress(FileNotFoundError):
            os.utime(self.path.parent.with_name(SHARED))
        if not self.path.exists():
            raise TransientError(
                f"{self.path} is gone: a copy that nobody used for an hour made room for others; "
                "expected it while it is read. Run again: what is needed is brought again"
            )
        lock = self.path.with_name(f"{self.path.name}.{number % NUM_LOCKS}.lock")
        # Two processes of a host need the same row group, one brings it.
        with files.locked(lock), self.path.open("r+b") as file:
            file.seek(start)
            if hashlib.sha256(file.read(length)).hexdigest() == sha256:
                return
            name = object_name(self.sha256)
            content = self._location.read(name, start, length)
            if content is None or (seen := hashlib.sha256(content).hexdigest()) != sha256:
                part = "the footer" if number < 0 else f"row group {number}"
                fault = "is absent" if content is None else f"has SHA-256 {seen[:12]}"
                raise ArtifactError(
                    f"{part} of {self._location}/{name} {fault}, expected {sha256[:12]}: it was "
                    f"changed or damaged. {MEND}"
                )
            self.num_bytes_brought += length
            file.seek(start)
            with refused_writes_explained(self.path):
                file.write(content)
                file.flush()

    def complete(self, target: Path) -> None:
        """Bring what is missing, and give the file a second name.

        Raises:
            ArtifactError, TransientError, StorageError: as `bring`.
        """
        for number in range(-1, len(self._parts) - 1):
            self.bring(number)
        # Not renamed: ranks may be reading it.
        with refused_writes_explained(target), suppress(FileExistsError):
            os.link(self.path, target)
