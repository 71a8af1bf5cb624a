"""A module whose import starts a thread, as libraries' do at times."""

from __future__ import annotations

import threading

threading.Thread(target=threading.Event().wait, name="stays", daemon=True).start()
