"""Programs that tests run in processes of their own."""

from __future__ import annotations

import subprocess
from typing import Any


def run(*command: object, **options: Any) -> str:
    """Run a program; return what it prints, and fail with what it prints on errors.

    Options are those of ``subprocess.run``.
    """
    parts = [str(part) for part in command]
    done = subprocess.run(parts, capture_output=True, encoding="utf-8", **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
