from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.imports.config import CorpusConfig, RowsConfig
from tasks.imports.rows import docstrings, prepare_corpus, take_rows
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.data import encoders


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"x": [1]}, DataContractError),
        ({"part": ["judged"]}, DataContractError),
        ({"part": ["calibration", None]}, DataContractError),
        (None, ConfigurationError),
    ],
)
def test_rows_without_both_parts_or_no_rows_are_refused(
    tmp_path: Path,
    store: ArtifactStore,
    columns: dict[str, list[object]] | None,
    error: type[Exception],
) -> None:
    file = tmp_path / "rows.parquet"
    if columns is not None:
        pq.write_table(pa.table(columns), file)
    with pytest.raises(error, match=r"expected some of each|does not exist"):
        take_rows(RowsConfig(file=file), store)


@pytest.mark.parametrize("lines", [40, 12])
def test_texts_become_token_ids_in_two_parts_that_share_none(
    tmp_path: Path, store: ArtifactStore, lines: int
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(encoders.texts(lines) * 3))
    config, encoder = CorpusConfig(file=file, judged_texts=20), encoders.write_encoder(tmp_path)
    if lines < 32:
        with pytest.raises(DataContractError, match="has 12 different texts"):
            prepare_corpus(config, encoder, store)
        return
    rows = prepare_corpus(config, encoder, store)
    table = pq.read_table(store.path(rows.data)).to_pydict()
    assert table["part"] == ["judged"] * 20 + ["calibration"] * 12
    assert len(set(table["text"])) == 32
    for text, ids in zip(table["text"], table["input_ids"], strict=True):
        known = [encoders.WORDS.index(word) + 4 for word in text.split()]
        assert ids == [2, *known, 3]  # not cut after the 4 tokens that the tokenizer's file says
    assert (rows.num_judged, rows.num_calibration) == (20, 12)


def test_docstrings_are_read_without_running_the_file(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Module of two\nlines.\n\nAnd more."""\nraise RuntimeError\n'
        'class A:\n    """A class."""\n    def b(self):\n        """A \\d method."""\n'
    )
    assert sorted(docstrings(file)) == ["A \\d method.", "A class.", "Module of two lines."]
    file.write_text("def {{ template }}")
    assert list(docstrings(file)) == []
