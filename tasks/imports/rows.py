"""Rows that calibrate and judge an imported program: texts as token ids, or a ready Parquet file.

Texts are docstrings of installed packages, or the lines of a file.
"""

import ast
import hashlib
import shutil
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from tasks.contracts.conversion import PreparedRows
from tasks.imports.config import CorpusConfig, EncoderConfig, RowsConfig
from tasks.imports.encoder import TOKENIZER_FILE, find_files
from tasks.imports.program import digest_of_file
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

ROWS_FILE = "rows.parquet"
PARTS = ("calibration", "judged")
SHORTEST_WORDS, LONGEST_WORDS = 4, 60
"""A docstring of fewer words is a label, one of more is cut by most encoders."""
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def take_rows(config: RowsConfig, store: ArtifactStore) -> PreparedRows:
    """Copy rows that were prepared elsewhere, and count their two parts.

    Raises:
        ConfigurationError: the file is not there, or is no Parquet.
        DataContractError: it lacks the column `part`, or one of the two parts.
        StorageError: the disk refused a write.
    """
    digest = digest_of_file(config.file)
    key = content_key("taken", code_digest(__file__), config, digest)

    def build(folder: StagedFolder) -> PreparedRows:
        calibration, judged = _count_parts(config.file)
        shutil.copyfile(config.file, folder.path / ROWS_FILE)
        return PreparedRows(
            data=folder.artifact(ROWS_FILE),
            num_calibration=calibration,
            num_judged=judged,
            made_from={config.file.name: digest},
        )

    return store.build_once("corpora", key, PreparedRows, build)


def _count_parts(file: Path) -> list[int]:
    """Rows of each of `PARTS`."""
    try:
        with pq.ParquetFile(file) as opened:
            found = opened.read(columns=["part"])
    except pa.ArrowInvalid as exc:
        raise ConfigurationError(f"{file.name} is no Parquet file: {exc}") from exc
    parts = found["part"].to_pylist() if found.num_columns else []
    counts = [parts.count(part) for part in PARTS]
    if not all(counts):
        raise DataContractError(
            f"{file.name} has {counts} rows whose column 'part' is {' or '.join(PARTS)}; expected "
            "some of each"
        )
    return counts


def prepare_corpus(
    config: CorpusConfig, encoder: EncoderConfig, store: ArtifactStore
) -> PreparedRows:
    """Choose texts, turn them into token ids, and part them: calibration, and others to judge.

    The choice depends on the texts alone, not on the order in which files are found.

    Raises:
        ConfigurationError: a package, the file or the tokenizer is not there.
        DataContractError: there are fewer texts than are asked for.
        StorageError: the disk refused a write.
    """
    tokenizer = find_files(encoder).folder / TOKENIZER_FILE
    sources = _sources(config)
    key = content_key(
        "corpus", code_digest(__file__), config, encoder.max_tokens, digest_of(tokenizer), sources
    )

    def build(folder: StagedFolder) -> PreparedRows:
        texts, judged = choose(read_texts(config), config), config.judged_texts
        columns = {
            "part": ["judged"] * judged + ["calibration"] * (len(texts) - judged),
            "text": texts,
            "input_ids": tokenize(texts, tokenizer, encoder.max_tokens),
        }
        pq.write_table(pa.table(columns), folder.path / ROWS_FILE)
        shutil.copyfile(tokenizer, folder.path / TOKENIZER_FILE)
        return PreparedRows(
            data=folder.artifact(ROWS_FILE),
            num_calibration=len(texts) - judged,
            num_judged=judged,
            made_from=sources,
            tokenizer=folder.artifact(TOKENIZER_FILE),
        )

    return store.build_once("corpora", key, PreparedRows, build)


def _sources(config: CorpusConfig) -> dict[str, str]:
    if config.file is not None:
        return {config.file.name: digest_of_file(config.file)}
    try:
        return {package: distribution(package).version for package in config.packages}
    except PackageNotFoundError as exc:
        raise ConfigurationError(
            f"package {exc.name!r} is not installed here; name packages whose docstrings are here"
        ) from exc


def read_texts(config: CorpusConfig) -> Iterator[str]:
    """All texts of the sources, of whatever length, some of them more than once."""
    if config.file is not None:
        yield from config.file.read_text(encoding="utf-8").splitlines()
    for package in config.packages:
        for file in distribution(package).files or ():
            if file.suffix == ".py" and "tests" not in file.parts:
                yield from docstrings(Path(str(file.locate())))


def docstrings(path: Path) -> Iterator[str]:
    """First paragraph of every docstring of a Python file, which is read and not run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's escape sequences
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, FileNotFoundError):
        return  # templates, and files that a package lists and did not install
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield " ".join(text.split("\n\n")[0].split())


def choose(texts: Iterator[str], config: CorpusConfig) -> list[str]:
    """Texts to judge on, then others to calibrate with, drawn by the hashes of the different ones.

    Raises:
        DataContractError: there are not enough of them.
    """
    fitting = {text for text in texts if SHORTEST_WORDS <= len(text.split()) <= LONGEST_WORDS}
    wanted = config.judged_texts + config.calibration_texts
    if len(fitting) < wanted:
        raise DataContractError(
            f"the corpus has {len(fitting)} different texts of {SHORTEST_WORDS} to {LONGEST_WORDS} "
            f"words, expected {wanted}; name more packages or ask for fewer"
        )

    def rank(text: str) -> bytes:
        return hashlib.sha256(f"0 {text}".encode(errors="replace")).digest()

    return sorted(fitting, key=rank)[:wanted]


def tokenize(texts: list[str], file: Path, max_tokens: int) -> list[list[int]]:
    """Token ids of each text, special tokens included, cut after `max_tokens`, without padding."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(max_tokens)
    tokenizer.no_padding()
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]
