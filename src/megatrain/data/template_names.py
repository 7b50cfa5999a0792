"""Which keywords and keys a chat template mentions, so that those of the data which it does not read can be named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TemplateNames:
    """Names in a template.

    Attributes:
        variables: That it reads without setting them.
        words: Attributes, and texts between quotes, which may be keys.
    """

    variables: frozenset[str]
    words: frozenset[str]


def names_of(templates: Iterable[str]) -> TemplateNames:
    """The names in some templates; empty for one that is not valid jinja."""
    from jinja2 import TemplateSyntaxError, meta, nodes
    from transformers.utils import chat_template_utils

    variables: set[str] = set()
    words: set[str] = set()
    for template in templates:
        try:
            tree = chat_template_utils._compile_jinja_template(template).environment.parse(template)
        except TemplateSyntaxError:
            continue
        variables |= meta.find_undeclared_variables(tree)
        words |= {node.attr for node in tree.find_all(nodes.Getattr)}
        words |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return TemplateNames(frozenset(variables), frozenset(words))
