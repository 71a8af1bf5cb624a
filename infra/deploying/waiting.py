"""Wait for a server that is starting, as whatever is started beside it has to."""

from __future__ import annotations

import os
import time

from infra.platform.api import answers
from tasks.kernel.errors import TransientError

POLL_S = 0.3


def wait_for_server(limit_s: float) -> None:
    """Return once the server of `PREFECT_API_URL` answers with the password of the environment.

    Raises:
        TransientError: it has not within `limit_s` seconds.
    """
    url, password = os.environ["PREFECT_API_URL"], os.environ.get("PREFECT_API_AUTH_STRING")
    deadline = time.monotonic() + limit_s
    while not answers(f"{url}/admin/version", password):
        if time.monotonic() > deadline:
            raise TransientError(
                f"the server at {url} has not answered for {limit_s:.0f} s; is it up, and is the "
                "password the right one? Nothing was deployed; deploy again"
            )
        time.sleep(POLL_S)
