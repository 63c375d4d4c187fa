"""Docstrings as the API pages show them: our style leaves to the eye what the Google style wants said."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Object

_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
_CODE_EXAMPLE = re.compile(r"^( *)Example::\n\n((?:\1 +\S.*(?:\n|$)|[ ]*\n)+)", re.MULTILINE)
_BARE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
_SHAPE = re.compile(r"^Shape:\n((?: +\S.*(?:\n|$))+)", re.MULTILINE)
_LITERAL = re.compile(r"::$", re.MULTILINE)


def for_the_site(text: str) -> str:
    r"""A docstring with its examples as code and its shapes in a line, whatever stands before them.

    >>> for_the_site("Computes::\n\n    a + b\n\nExample:\n    >>> 1\n    1")
    'Computes:\n\n    a + b\n\nExamples:\n    >>> 1\n    1'
    >>> for_the_site("Example::\n\n    a + b")
    'Examples:\n    ```python\n    a + b\n    ```\n'
    >>> for_the_site("A sum.\n\n>>> 1 + 1\n2")
    'A sum.\n\n```pycon\n>>> 1 + 1\n2\n```'
    >>> for_the_site("Shape:\n    a ``(N,)``,\n    b ``()``.")
    '**Shape:** a ``(N,)``, b ``()``.\n'
    """
    text = _SHAPE.sub(lambda found: f"**Shape:** {' '.join(found[1].split())}\n", text)
    text = _BARE.sub("```pycon\n\\g<0>\n```", _CODE_EXAMPLE.sub(_as_code, text))
    return _LITERAL.sub(":", _EXAMPLE.sub(r"\1Examples:", text))


def _as_code(found: re.Match[str]) -> str:
    indent = found[1]
    return f"{indent}Examples:\n{indent}    ```python\n{found[2].rstrip()}\n{indent}    ```\n"


def comment_of(source: str) -> str | None:
    """What the comment behind a field says of it, None without.

    >>> comment_of("exact: Tensor  # bool: every row was read in full")
    'bool: every row was read in full'
    """
    _, mark, comment = source.partition("  # ")
    return comment.strip() if mark and not comment.startswith(("type:", "noqa")) else None


def with_fields(text: str, fields: dict[str, str | None]) -> str:
    """A docstring that lists the fields of a tuple with their comments, if it does not list them itself.

    >>> print(with_fields("An answer.", {"exact": "everything was read", "log_z": None}))
    An answer.
    <BLANKLINE>
    Attributes:
        exact: everything was read
        log_z: &nbsp;
    >>> with_fields("An answer.", {"exact": None, "log_z": None})
    'An answer.\\n\\nFields: `exact`, `log_z`.'
    """
    if "Attributes:" in text or not fields:
        return text
    if not any(fields.values()):
        return f"{text.rstrip()}\n\nFields: {', '.join(f'`{name}`' for name in fields)}."
    lines = [f"    {name}: {comment or '&nbsp;'}" for name, comment in fields.items()]
    return "\n".join([text.rstrip(), "", "Attributes:", *lines])


class Style(Extension):
    """What griffe is told of it."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Mend the docstring of anything."""
        if obj.docstring is None:
            return
        text = for_the_site(obj.docstring.value)
        if isinstance(obj, Class) and "NamedTuple" in map(str, obj.bases):
            text = with_fields(text, {name: comment_of(field.source) for name, field in obj.attributes.items()})
        obj.docstring.value = text
