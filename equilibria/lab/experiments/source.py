"""The commit of this library's source, if it runs from a git checkout."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import equilibria

LENGTH = 12  # digits of a commit that reports show


@cache
def source_commit() -> str | None:
    """Return the first digits of the commit, with "+" if tracked files were changed; None outside a checkout."""
    package = Path(equilibria.__file__).parent
    # a package that is installed inside another repository is not tracked there, and that commit is not ours
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(package, "rev-parse", f"--short={LENGTH}", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return None if commit is None else commit + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str | None:
    """Return the output of a git command; None if it fails or git is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
