"""Whether the code that a result measures has changed since, by git.

A run names its commit: every later commit that touches what it measures makes it older. A run on a
tree with changes (a + behind the commit), or of a commit that history does not have any more, is
judged by its date, and the commit that brought the result is not held against it. What is changed
and not committed counts too, so that the answer is the same before and after a commit.
"""

import shutil
import subprocess
from collections.abc import Sequence
from functools import cache

from common.files import REPO
from report_parts.figures import Run


def why_unknown() -> str:
    """Why git cannot say it here, or nothing where it can."""
    if shutil.which("git") is None:
        return "there is no git here; install it to see which results are older than their code"
    if _git("rev-parse", "--is-inside-work-tree") != "true":
        return "this is no git checkout, so nobody knows what changed since a result was measured"
    if _git("rev-parse", "--is-shallow-repository") == "true":
        return "this clone is shallow: `git fetch --unshallow` tells how old results are"
    return ""


def num_changes(file: str, run: Run, measures: Sequence[str]) -> int:
    """How often what the run measured was changed behind it; uncommitted changes count as one."""
    commit = run["commit"]
    if _is_in_history(commit):
        later = _git("rev-list", f"{commit}..HEAD", "--", *measures).split()
        return len(later) + _is_changed_now(tuple(measures))
    later = _git("rev-list", f"--since={run['date']}", "HEAD", "--", *measures).split()
    brought = _git(
        "log", "--format=%H", f'-S"date": "{run["date"]}"', "--", f"bench/results/{file}.json"
    ).split()
    if not brought:  # the run and what it measured will be one commit
        return 0
    return len(set(later) - set(brought[-1:])) + _is_changed_now(tuple(measures))


@cache
def _is_changed_now(measures: tuple[str, ...]) -> bool:
    return bool(_git("status", "--porcelain", "--", *measures))


@cache
def _is_in_history(commit: str) -> bool:
    if not commit.isalnum():  # a + for a changed tree, or two commits that were joined
        return False
    return _returns_0("merge-base", "--is-ancestor", commit, "HEAD")


def _returns_0(*arguments: str) -> bool:
    command = ["git", "-C", str(REPO), *arguments]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPO), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
