"""Pages of the documentation, and the commands and code that stand in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from support.paths import REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
PROGRAMS = ("manyhands", "python", "torchrun", "srun", "mpirun")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PLACEHOLDER = re.compile(r"\.\.\.|\b(FILE|PLAN|RUN|VERB|NAME|WORDS?|SCRIPT|OPTIONS|HOST)\b|<")


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def prose(page: Path) -> str:
    """A page without its fenced blocks: those hold code and output."""
    return FENCE.sub("", page.read_text())


def block_commands(page: Path) -> list[Shown]:
    """Commands in indented blocks, in order, without the explanation that follows two spaces."""
    text = re.sub(r"\\\n +", "", prose(page))
    found = []
    for line in re.findall(r"^    (?! *\|)(.+)$", text, re.MULTILINE):
        line = re.sub(r"^(while |(\w+=\S+ +))*", "", line.strip())
        line = re.split(r" {2,}|;| #", line)[0]
        if line.split()[0] in PROGRAMS and not PLACEHOLDER.search(line):
            found.append(Shown(name(page), line))
    return found


def inline_commands(page: Path) -> list[Shown]:
    """Commands in the text and in tables."""
    lines = re.findall(r"`((?:manyhands|python -m) [^`]+)`", prose(page))
    return [Shown(name(page), line) for line in lines if not PLACEHOLDER.search(line)]


def code_blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text()) if kind == language]


def rows(text: str) -> list[list[str]]:
    """The body of every table: cells without their bars."""
    lines = [
        line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
