"""The status page: one self-contained file that draws what `/status.json` says."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>Falaj serving</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>Falaj <span>serving</span></h1>
<p id="process"></p>
<p id="asked" role="status"></p>
</header>
<main id="main"></main>
<noscript><p class="plain">This page draws <a href="status.json">status.json</a> with a script of
its own; without scripts, read that.</p></noscript>
<script type="application/json" id="seen">{seen}</script>
<script>{script}</script>
</body>
</html>
"""


def status_page(status: Mapping[str, Any]) -> str:
    """The page with what is known now; its script asks for more."""
    style, script = _text("page.css"), _text("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    seen = json.dumps(status, allow_nan=False).replace("<", "\\u003c")
    return _TEMPLATE.format(policy=policy, style=style, seen=seen, script=script)


@cache
def _text(name: str) -> str:
    return (files("serving.observability") / name).read_text(encoding="utf-8")


@cache
def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
