from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tasks.imports.config import CorpusConfig
from tasks.imports.rows import choose, docstrings, prepare_corpus
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.data import encoders


def _lines(tmp_path: Path, count: int = 40, seed: int = 0) -> CorpusConfig:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(encoders.texts(count, seed)))
    return CorpusConfig(file=file, judged_texts=20)


def test_texts_become_token_ids_in_two_parts_that_share_none(
    tmp_path: Path, store: ArtifactStore
) -> None:
    config = _lines(tmp_path)
    encoder = encoders.write_encoder(tmp_path / "encoder")
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


def test_too_few_texts_are_refused_with_the_counts(tmp_path: Path) -> None:
    config = _lines(tmp_path)
    with pytest.raises(DataContractError, match="has 12 different texts"):
        choose(iter(encoders.texts(12) * 3), config)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (CorpusConfig(packages=("no-such-package",)), "'no-such-package' is not installed here"),
        (CorpusConfig(file=Path("absent.txt")), r"absent\.txt does not exist"),
    ],
)
def test_a_source_that_is_not_there_is_a_sentence(
    tmp_path: Path, store: ArtifactStore, config: CorpusConfig, sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        prepare_corpus(config, encoders.write_encoder(tmp_path), store)
