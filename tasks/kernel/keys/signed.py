"""JSON documents with a signature of the installation that wrote them."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from tasks.kernel.errors import SignatureError
from tasks.kernel.keys.store import EVIDENCE, KeyStore, Signature, check_signature


def signed(keys: KeyStore, content: Any) -> str:
    """A document that `read_signed` accepts, as text."""
    text = json.dumps(content, indent=1, default=str)
    signature = keys.sign(EVIDENCE, text.encode())
    value = base64.b64encode(signature.der).decode()
    return json.dumps({"content": text, "key": signature.key_id, "signature": value}, indent=1)


def read_signed(trusted: Mapping[str, bytes], document: str, what: str) -> Any:
    """The content of a signed document.

    Args:
        trusted: PEM of public keys by their ids.
        document: its text.
        what: names it in an error.

    Raises:
        SignatureError: it is none, was changed, or another installation signed it.
    """
    try:
        given = json.loads(document)
        signature = Signature(given["key"], base64.b64decode(given["signature"], validate=True))
        text = str(given["content"])
    except (ValueError, KeyError, TypeError) as exc:
        raise SignatureError(f"{what} is no signed document. Nothing of it was used") from exc
    check_signature(trusted, text.encode(), signature, what)
    return json.loads(text)
