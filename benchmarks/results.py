# SPDX-License-Identifier: Apache-2.0
"""Results in a JSON file, one a machine, that runs add to."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


def default_path(about: dict, device: str, quick: bool = False) -> Path:
    """Where a machine's results belong: a file named after its GPU or its processor and instruction set; of
    quick runs, where no report looks."""
    if quick:
        return FOLDER.parents[1] / "build" / "benchmarks-quick.json"
    name = about["gpu"] if device == "cuda" else f"{about['cpu']} {about['cores']}x {about['isa']}"
    return FOLDER / (re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", str(name).lower())).strip("-") + ".json")


class Results:
    """`jobs` holds what each measured, the build of the kernels it was measured with, and the machine's load then."""

    def __init__(self, path: Path, about: dict) -> None:
        self.path = path
        self.about = about
        self.jobs = self._stored()

    def _stored(self) -> dict:
        return json.loads(self.path.read_text())["jobs"] if self.path.exists() else {}

    def done(self, key: str) -> bool:
        """Whether the job has results of these very kernels."""
        return self.jobs.get(key, {}).get("build") == self.about["build"]

    def add(self, key: str, figures: dict, load: float | None) -> None:
        self.jobs = self._stored()  # another run may have added to it
        self.jobs[key] = {"build": self.about["build"], "load": load, **figures}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": self.about, "jobs": self.jobs}, indent=1) + "\n"
        partial = self.path.with_suffix(".partial")
        partial.write_text(text)
        os.replace(partial, self.path)  # a run that is killed leaves the old file or the new one
