# SPDX-License-Identifier: Apache-2.0
"""One line that says how far a run is."""

from __future__ import annotations

import shutil
import sys
import time

_PLAIN_SECONDS = 10.0  # between lines where none can be overwritten


class Progress:
    """Rewrites its line on a terminal; elsewhere (a file, a pipe) prints a line now and then."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._printed = time.perf_counter()

    def show(self, text: str) -> None:
        if self._terminal:
            # A line that wraps could not be overwritten.
            print(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif time.perf_counter() - self._printed >= _PLAIN_SECONDS:
            print(text, flush=True)
            self._printed = time.perf_counter()

    def close(self, text: str) -> None:
        """Leave `text` as the line that stays."""
        print(f"\r\x1b[K{text}" if self._terminal else text, flush=True)
