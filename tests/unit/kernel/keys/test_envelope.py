"""Envelopes: any content comes back, any part of it too, and nothing that was changed does."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.kernel.errors import ArtifactError, ConfigurationError, LostKeyError
from tasks.kernel.keys import envelope
from tasks.kernel.keys.envelope import CHUNK_BYTES, HEADER_BYTES, TAG_BYTES, Envelopes
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.location import Location

SIZES = st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7])
MARKER = b"a plaintext marker"


@pytest.fixture(scope="module")
def envelopes(tmp_path_factory: pytest.TempPathFactory) -> Envelopes:
    return Envelopes(FileKeys(tmp_path_factory.mktemp("keys")), "tenant")


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    monkeypatch.setenv("FALAJ_ENCRYPTION", "tenant")
    monkeypatch.setenv("FALAJ_KEYS", (tmp_path / "keys").as_uri())
    return Location.of((tmp_path / "lake").as_uri())


def content_of(size: int) -> bytes:
    return hashlib.shake_128(size.to_bytes(4, "big")).digest(size)


def opened(envelopes: Envelopes, sealed: bytes, where: str = "x", start: int = 0) -> bytes:
    def fetch(at: int, number: int) -> bytes:
        return sealed[at : at + number]

    return b"".join(envelopes.open(where, len(sealed), fetch, start))


@given(size=SIZES, piece=st.integers(1, 2 * CHUNK_BYTES), at=st.floats(0, 1))
def test_a_content_comes_back_from_any_byte_on(
    envelopes: Envelopes, size: int, piece: int, at: float
) -> None:
    content = content_of(size)
    pieces = [content[i : i + piece] for i in range(0, size, max(piece, size // 50 + 1))]
    content = b"".join(pieces)
    sealed = b"".join(envelopes.seal("x", pieces))
    assert envelope.content_bytes(len(sealed)) == len(content)
    start = int(at * len(content))
    assert opened(envelopes, sealed, start=start) == content[start:]


@given(size=SIZES, place=st.floats(0, 1, exclude_max=True))
def test_a_flipped_byte_is_found(envelopes: Envelopes, size: int, place: float) -> None:
    sealed = bytearray(b"".join(envelopes.seal("x", [content_of(size)])))
    end = sealed.index(b"}") + 1  # behind the facts the header is spaces
    at = int(place * (len(sealed) - HEADER_BYTES + end))
    sealed[at if at < end else at - end + HEADER_BYTES] ^= 1
    with pytest.raises((ArtifactError, LostKeyError)):
        opened(envelopes, bytes(sealed))


def test_chunks_that_were_cut_exchanged_or_repeated_are_found(envelopes: Envelopes) -> None:
    sealed = b"".join(envelopes.seal("x", [content_of(3 * CHUNK_BYTES)]))
    step = CHUNK_BYTES + TAG_BYTES
    header, chunks = (
        sealed[:HEADER_BYTES],
        [sealed[HEADER_BYTES + i * step :][:step] for i in range(3)],
    )
    for changed in (
        chunks[:2],
        chunks[:1],
        [],
        [chunks[1], chunks[0], chunks[2]],
        [*chunks, chunks[2]],
    ):
        with pytest.raises(ArtifactError):
            opened(envelopes, header + b"".join(changed))


def test_no_object_passes_for_another(envelopes: Envelopes) -> None:
    sealed = b"".join(envelopes.seal("models/1", [b"x"]))
    with pytest.raises(ArtifactError, match="models/2"):
        opened(envelopes, sealed, "models/2")


def test_a_location_holds_nothing_readable_and_gives_back_all(
    lake: Location, tmp_path: Path
) -> None:
    large = MARKER * 700_000  # in parts
    (tmp_path / "large").write_bytes(large)
    lake.write("small", MARKER)
    lake.write("large", tmp_path / "large")
    assert lake.create("created", MARKER)
    assert not lake.create("created", b"other")
    lake.change("changed", lambda old: (old or MARKER) + MARKER)
    lake.change("changed", lambda old: (old or b"") + MARKER)
    assert lake.read("small") == MARKER
    assert lake.read("changed") == MARKER * 3
    assert lake.read("large", 5_000_000, 3_000_000) == large[5_000_000:8_000_000]
    lake.bring("large", tmp_path / "back", sha256=hashlib.sha256(large).hexdigest())
    assert lake.size("large") == len(large) == lake.entries("")["large"].num_bytes
    digest, size = lake.send_content(tmp_path / "large")
    assert (lake.read(f"objects/{digest[:2]}/{digest}"), size) == (large, len(large))
    assert lake.folder is not None
    stored = [file for file in lake.folder.rglob("*") if file.is_file()]
    assert len(stored) >= 5
    assert not [file for file in stored if MARKER in file.read_bytes()]


def test_what_was_written_before_is_refused_and_names_the_way(lake: Location) -> None:
    Location(lake.url, plain=True).write("old", b"content")
    for read in (lambda: lake.read("old"), lambda: lake.read("old", 2, 3)):
        with pytest.raises(ArtifactError, match="falaj encryption enable"):
            read()


def test_who_has_no_key_is_told_that_content_is_encrypted(
    lake: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.write("a", MARKER)
    monkeypatch.delenv("FALAJ_ENCRYPTION")
    for read in (lambda: lake.read("a"), lambda: lake.bring("a", tmp_path / "a")):
        with pytest.raises(ConfigurationError, match="FALAJ_ENCRYPTION"):
            read()
    monkeypatch.setenv("FALAJ_ENCRYPTION", "tenant")
    monkeypatch.delenv("FALAJ_KEYS")
    with pytest.raises(ConfigurationError, match="FALAJ_KEYS"):
        lake.read("a")
