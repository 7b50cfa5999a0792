"""Text that came from files, names or models, made safe to show: what would steer a terminal is shown instead of obeyed.

[Note: what a name may not do]
A file name, a sample, a column or the text that a model writes may hold escape codes (which move the cursor, change colours, or
set the window's title), marks that reverse the order of the letters after them, and line breaks that begin a line of their own:
a log line that nobody logged. Everything that megatrain prints goes through `printable`, which replaces them by their codes. A
line break stays one where the next line is indented, as all lines but the first of our own messages are.
"""

from __future__ import annotations

import re

_SUSPECT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
                      "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]")  # fmt: skip
"""Control characters but tab and newline; marks of direction; line and paragraph separators; characters without a shape that
only hide something; halves of a surrogate pair (bytes of a file name that are not UTF-8)."""
_OWN_LINE = re.compile(r"\n(?=[^ \t\n])")
_BREAKS = str.maketrans({"\n": r"\n", "\t": r"\t"})


def visible(text: str) -> str:
    r"""The text with everything that steers a terminal as its code: `\x1b`, `\u202e`. Line breaks and tabs stay."""
    return _SUSPECT.sub(lambda found: _code(found[0]), text)


def printable(text: str) -> str:
    """A message as it may be printed: `visible`, and without a line that is not indented but the first.

    See [Note: what a name may not do].
    """
    return _OWN_LINE.sub(r"\\n", visible(text))


def one_line(text: str) -> str:
    r"""`visible` without line breaks: for a name inside a line of YAML, Markdown or a table; they are shown as `\n`."""
    return visible(text).translate(_BREAKS)


def _code(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # how Python holds a byte that is not UTF-8
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
