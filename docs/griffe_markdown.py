"""Bring the docstrings into Markdown.

They list settings in two columns, name and meaning, whose lines Markdown would run together: those become lists. Fields
say what they are in a comment on their line: that becomes their docstring.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(?P<names>\w+(, \w+)*) {2,}(?P<meaning>\S.*)$")


class Markdown(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.is_attribute and not obj.docstring and obj.lineno == obj.endlineno and "  # " in obj.source:
            obj.docstring = griffe.Docstring(obj.source.split("  # ", 1)[1], parent=obj)
        if obj.docstring:
            blocks = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(as_markdown, blocks))


def as_markdown(block: str) -> str:
    """A block of two columns as a list, a paragraph with its stars kept from meaning emphasis, code as it is."""
    if block.startswith("    "):
        return block
    items: list[str] = []
    for line in block.splitlines():
        if entry := ENTRY.match(line):
            names = ", ".join(f"`{name}`" for name in entry["names"].split(", "))
            items.append(f"- {names}: {escape(entry['meaning'])}")
        elif items:
            items[-1] += " " + escape(line.strip())
        else:
            return escape(block)
    return "\n".join(items)


def escape(text: str) -> str:
    outside, *rest = text.split("`")
    for i, part in enumerate(rest):
        rest[i] = part if i % 2 == 0 else re.sub(r"(?<!\\)\*", r"\\*", part)
    return "`".join([re.sub(r"(?<!\\)\*", r"\\*", outside), *rest])
