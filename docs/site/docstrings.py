"""Docstrings and signatures as the reference shows them.

A `>>>` session becomes a fenced block, for Markdown takes `>>>` for a quotation. A default that is the name of a
constant becomes the constant's value. A field that `setting(default, help, ...)` declares has that default, and its
help as docstring.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

SESSION = re.compile(r"^(?P<indent> *)>>> .*\n?(?:(?P=indent).*\S.*\n?)*", re.MULTILINE)
LITERAL = re.compile(r"-?[\d._e+]+|'[^']*'|\"[^\"]*\"")


class Readable(griffe.Extension):
    """Changes docstrings and signatures once they are read."""

    def on_object(self, *, obj: griffe.Object, **more: Any) -> None:
        """Change the docstring of an object, if it has one with a session."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **more: Any) -> None:
        """Show the default and the help of a setting in place of its declaration."""
        call = attr.value
        if isinstance(call, griffe.ExprCall) and str(call.function) == "setting":
            attr.value, text = call.arguments[0], ast.literal_eval(str(call.arguments[1]))
            attr.docstring = griffe.Docstring(f"{text[0].upper()}{text[1:]}.", parent=attr)

    def on_package(self, *, pkg: griffe.Module, **more: Any) -> None:
        """Put the values of constants into the signatures of a package, now that all of its modules are read."""
        modules = [pkg]
        for module in modules:
            modules += [each for each in module.modules.values() if not each.is_alias]  # imported ones may come round
            for kind in (module, *module.classes.values()):
                for function in kind.functions.values():
                    if not function.is_alias:
                        show_constants(function)


def show_constants(function: griffe.Function) -> None:
    """Replace each default that names a constant by the constant's value, where that is a text or a number."""
    for parameter in function.parameters:
        if isinstance(parameter.default, griffe.ExprName):
            try:
                constant = function.modules_collection[parameter.default.canonical_path]
            except KeyError:  # of another package
                continue
            value = str(getattr(constant, "value", ""))
            if LITERAL.fullmatch(value):
                parameter.default = value


def fenced(text: str) -> str:
    """Return a docstring with its sessions between fences; those of a drawing, which is indented, are code already.

    >>> print(fenced("Add.\\n\\n>>> 1 + 1\\n2"))
    Add.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """

    def block(session: re.Match[str]) -> str:
        if session["indent"]:
            return session[0]
        lines = session[0].rstrip("\n").replace("<BLANKLINE>", "")
        return f"```pycon\n{lines}\n```\n"

    return SESSION.sub(block, text)
