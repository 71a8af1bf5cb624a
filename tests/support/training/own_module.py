"""A PyTorch module of a user's: the one that the documentation shows."""

import re

from tasks.kernel.settings import PROJECT_ROOT

PAGE = PROJECT_ROOT / "docs" / "how-to" / "own-model.md"
(WIDE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
