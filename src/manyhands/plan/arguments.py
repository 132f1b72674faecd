"""Arguments of a script's command line: plan words, --resume and --dir; the rest is the script's.

python mine.py epochs=3 data=2 --resume --dir runs/a --lr 0.1
               ^^^^^^^^^^^^^^^ ^^^^^^^^^^^^^^^^^^^^^^ ^^^^^^^^ left to the script
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.errors import PlanError
from manyhands.plan import foreign_words
from manyhands.plan.vocabulary import known_word, known_words


@dataclass(frozen=True)
class ScriptArguments:
    """What a script's command line says about the run."""

    words: tuple[str, ...] = ()
    resume: bool = False
    directory: str | None = None
    unknown: tuple[str, ...] = ()  # of the form key=value, but no plan words
    dashed: tuple[str, ...] = ()  # options named like plan words, which the script does not have

    @property
    def notice(self) -> str:
        """What to say of words that look like a plan's; "": nothing."""
        texts = []
        for word in self.unknown:
            key, _, value = word.partition("=")
            near = difflib.get_close_matches(key, known_words(), 1, cutoff=0.75)
            own = foreign_words.of_word(key, value) if key in foreign_words.OURS else ""
            do = own or (f"did you mean {near[0]}=?" if near else "")
            texts.append(f"{word} ({do})" if do else word)
        for option in self.dashed:
            texts.append(f"{option} (a plan word has no dashes: {option.lstrip('-')}=...)")
        return f"no plan words, left to the script: {', '.join(texts)}" if texts else ""


def read(arguments: Sequence[str], script: str | None = None) -> ScriptArguments:
    """Find plan words, --resume and --dir D (or --dir=D) in `arguments`, in any place.

    `script` is the script's text, which tells its own options from those that nobody would read;
    None: not known."""
    words, unknown, dashed, resume, directory = [], [], [], False, None
    nobodys = lambda option: script is not None and option not in script
    # everything after -- belongs to the script, whatever it looks like
    mine = list(itertools.takewhile(lambda argument: argument != "--", arguments))
    for i, argument in enumerate(mine):
        key, equals, value = argument.partition("=")
        after = mine[i + 1] if i + 1 < len(mine) else ""
        if key == "--resume":
            # an option of the script's own may take a file: --resume checkpoint.pth
            plain = not after or after.startswith("-") or known_word(after.partition("=")[0])
            resume = plain and not equals
            if not resume and nobodys("--resume"):
                given = argument if equals else f"{argument} {after}"
                raise PlanError(
                    f"{given}: the run to go on with is named by --dir; write "
                    f"--resume --dir {value or after}"
                )
        elif key == "--dir":
            directory = value if equals else after
            if not directory or directory.startswith("-"):
                raise PlanError("--dir needs the run directory after it: --dir runs/mine")
        elif key.startswith("--") and known_word(key[2:]) and nobodys(key):
            dashed.append(key)
        elif equals and known_word(key):
            words.append(argument)
        elif equals and key.replace(".", "_").isidentifier():
            unknown.append(argument)
    return ScriptArguments(tuple(words), resume, directory, tuple(unknown), tuple(dashed))
