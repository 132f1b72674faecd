"""Pictures of the README, made from a real run on this machine: python docs/pictures/draw.py.

run.svg is what `manyhands run examples/lenet.py data=2 --dir runs/lenet` left on a terminal of 110
columns, curves.png what it drew.
"""

import io
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from fcntl import ioctl
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).resolve().parent
LENET = HERE.parents[1] / "examples" / "lenet.py"
COLUMNS = 110


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", str(LENET), "data=2", "--dir", "runs/lenet"]
        lines = screen(
            [sys.executable, "-c", "from manyhands.cli import main; main()", *words], Path(folder)
        )
        shutil.copy(Path(folder) / "runs/lenet/curves.png", HERE / "curves.png")
    draw("manyhands run examples/lenet.py data=2 --dir runs/lenet", lines, HERE / "run.svg")


def screen(command: list[str], folder: Path) -> list[str]:
    """What stands on a terminal when the command has ended, line by line, with its colours."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, pack("HHHH", 40, COLUMNS, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    child = subprocess.Popen(
        command,
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**kept, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    raw = b""
    while True:
        try:
            raw += os.read(ours, 1 << 16)
        except OSError:  # Linux says so when the last writer has gone
            break
    os.close(ours)
    if child.wait():
        sys.exit(raw.decode())
    # a live line is drawn over and over: of each line only what follows the last "erase" was left
    # standing
    return [line.rpartition("\x1b[2K")[2].strip("\r") for line in raw.decode().rstrip().split("\n")]


def draw(command: str, lines: list[str], out: Path) -> None:
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(Text.assemble(("$ ", "green"), (command, "bold")))
    for line in lines:
        console.print(Text.from_ansi(line))
    console.save_svg(
        str(out), title="manyhands", theme=MONOKAI, code_format=PICTURE, unique_id="run"
    )


PICTURE = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""

if __name__ == "__main__":
    main()
