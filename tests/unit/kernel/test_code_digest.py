"""What decides a stage's content key of its code, and what does not."""

import ast
import sys
from pathlib import Path

import pytest

from tasks.kernel import code_digest as code_digest_module
from tasks.kernel.code_digest import statements_digest
from tasks.kernel.settings import PROJECT_ROOT, code_digest

STORY = '''
"""What the room does."""
import logging
from tasks.contracts.model import Model
from tasks.maths import double

LOGGER = logging.getLogger(__name__)
WORKER = "tasks.room.worker"
RATE = 0.5


def train(rows: int) -> Model:
    """Train."""
    from tasks.room import lazily
    from tasks.stats.shift import PRIOR

    LOGGER.info("training on %d rows", rows)
    if rows < 1:
        raise ValueError(f"{rows} rows; give one")
    return Model(lazily.weight(rows) * RATE)  # a comment
'''
FILES = {
    "tasks/room/story.py": STORY,
    "tasks/room/lazily.py": "def weight(rows: int) -> float:\n    return rows * 2.0\n",
    "tasks/room/worker.py": "from tasks.room.shown import SHOWN\nSTEPS = 3\n",
    "tasks/room/shown.py": "SHOWN = 1\n",
    "tasks/room/unreached.py": "LIMIT = 1\n",
    "tasks/other/story.py": "LIMIT = 1\n",
    "tasks/maths.py": "def double(x: int) -> int:\n    return 2 * x\n",
    "tasks/stats/shift.py": "PRIOR = 0.5\n",
    "tasks/contracts/model.py": 'class Model:\n    rows = Field(ge=1, description="Rows.")\n',
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def digest(root: Path, *also: str, without: tuple[str, ...] = ()) -> str:
    return statements_digest(root / "tasks/room/story.py", root, also, without)


@pytest.mark.parametrize(
    ("name", "old", "new", "counts"),
    [
        # words, and what is not reached
        ("tasks/room/story.py", "What the room does.", "Another story.", False),
        ("tasks/room/story.py", "RATE = 0.5\n", 'RATE = 0.5\n"""Of learning."""\n', False),
        ("tasks/room/story.py", "  # a comment", "", False),
        ("tasks/room/story.py", "training on %d rows", "%d rows", False),
        ("tasks/room/story.py", "rows; give one", "rows; give two", False),
        ("tasks/contracts/model.py", "Rows.", "Number of rows.", False),
        ("tasks/room/unreached.py", "1", "2", False),
        ("tasks/other/story.py", "1", "2", False),
        ("tasks/maths.py", "2 * x", "3 * x", False),
        # statements that are reached
        ("tasks/room/story.py", "RATE = 0.5", "RATE = 0.25", True),
        ("tasks/room/story.py", "raise ValueError", "raise TypeError", True),
        ("tasks/room/lazily.py", "2.0", "2.5", True),
        ("tasks/room/worker.py", "STEPS = 3", "STEPS = 4", True),
        ("tasks/room/shown.py", "1", "2", True),
        ("tasks/contracts/model.py", "ge=1", "ge=2", True),
        ("tasks/stats/shift.py", "0.5", "0.25", True),
    ],
)
def test_a_statement_that_is_reached_changes_the_digest_and_words_do_not(
    root: Path, name: str, old: str, new: str, counts: bool
) -> None:
    before, text = digest(root), (root / name).read_text()
    assert old in text
    (root / name).write_text(text.replace(old, new))
    assert (digest(root) != before) is counts


def test_what_only_measures_can_be_left_out_and_what_is_copied_taken_in(root: Path) -> None:
    measures = ("tasks.room.shown",)
    before = digest(root, without=measures), digest(root, "tasks.room.unreached")
    (root / "tasks/room/shown.py").write_text("SHOWN = 2\n")
    assert digest(root, without=measures) == before[0]
    (root / "tasks/room/shown.py").write_text(FILES["tasks/room/shown.py"])
    (root / "tasks/room/unreached.py").write_text("LIMIT = 2\n")
    assert digest(root, "tasks.room.unreached") != before[1]
    with pytest.raises(FileNotFoundError, match="absent is no module"):
        digest(root, "tasks.room.absent")


def test_the_training_of_this_project_is_reached_and_its_measuring_is_not() -> None:
    launcher = PROJECT_ROOT / "tasks" / "training" / "launch" / "launcher.py"
    whole = code_digest(str(launcher))
    for reached in ("core.train", "core.network", "strategies.sharded", "elastic.rank"):
        assert code_digest(str(launcher), without=[f"tasks.training.{reached}"]) != whole, reached
    assert code_digest(str(launcher), without=["tasks.training.search"]) == whole
    assert code_digest(str(launcher), without=["tasks.training.telemetry"]) != whole


@pytest.mark.parametrize("left", ["whole", "torn", "null"])
def test_what_was_parsed_is_kept_beside_compiled_code_until_the_file_changes(
    root: Path, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for module in root.rglob("*.py"):
        (module.parent / "__pycache__").mkdir(exist_ok=True)
    before = digest(root)
    kept = sorted(root.rglob("*.statements"))
    assert [each.name.partition(".")[0] for each in kept] == [
        *("model", "lazily", "shown", "story", "worker", "shift")
    ]
    if left != "whole":
        for each in kept:
            each.write_bytes(each.read_bytes()[:-9] if left == "torn" else b"null")
    else:
        monkeypatch.setattr(ast, "parse", lambda _: pytest.fail("it was parsed again"))
    code_digest_module._read.cache_clear()  # as in another process
    assert digest(root) == before
    monkeypatch.undo()
    (root / "tasks/room/shown.py").write_text("SHOWN = 20\n")
    assert digest(root) != before
