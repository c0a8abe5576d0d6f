"""Strict YAML: a file in, one msgspec struct out, or an error naming file, field, value and rule.

Three traps of YAML are closed here: an unknown key is an error that names the nearest known one,
a key written twice is an error (YAML keeps the last silently), and `1e12` is a number (YAML 1.1
reads it as text unless it is spelled `1.0e+12`).
"""

import difflib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from bucket_planner.errors import PlannerConfigError

T = TypeVar("T")

# The C parser is ten times faster; wheels carry it, a build from source may not.
_BaseLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_UNKNOWN_KEY = re.compile(r"unknown field `(?P<key>[^`]*)`")
_MISSING_KEY = re.compile(r"missing required field `(?P<key>[^`]*)`")
_PATH = re.compile(r" - at `(?P<key>key in )?\$?(?P<path>[^`]*)`$")
_FLOAT = re.compile(
    r"""^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |[0-9][0-9_]*[eE][-+]?[0-9]+
        |\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


class _StrictLoader(_BaseLoader):
    """SafeLoader that knows YAML 1.2 floats and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:float"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load_yaml(path: str | Path, schema: type[T]) -> T:
    """Reads a YAML file into a msgspec struct type.

    Args:
      path: the file.
      schema: a `msgspec.Struct` type with `forbid_unknown_fields=True`.

    Returns:
      The decoded struct.

    Raises:
      PlannerConfigError: unreadable file, bad YAML, unknown, missing or doubled key, wrong type.
    """
    file = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlannerConfigError(
            "file", file, f"must be a readable UTF-8 file ({error})"
        ) from error
    try:
        raw = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        place = str(error).replace("\n", " ")
        raise PlannerConfigError("yaml", file, f"must be valid YAML: {place}", file=file) from error
    return convert(raw, schema, file=file)


def convert(raw: object, schema: type[T], *, file: str) -> T:
    """Converts plain YAML or JSON data into `schema`, with errors that name the field.

    Raises:
      PlannerConfigError: unknown, missing or mistyped field.
    """
    try:
        return msgspec.convert(raw, schema)
    except msgspec.ValidationError as error:
        raise _explain(str(error), raw, schema, file) from error


def _explain(message: str, raw: object, schema: Any, file: str) -> PlannerConfigError:
    """Turns a msgspec message into field, value and rule."""
    path_match = _PATH.search(message)
    path = path_match["path"].lstrip(".") if path_match else ""
    rule = _PATH.sub("", message)
    if unknown := _UNKNOWN_KEY.search(message):
        field = f"{path}.{unknown['key']}".lstrip(".")
        known = _known_keys(msgspec.inspect.type_info(schema), _steps(path))
        near = difflib.get_close_matches(unknown["key"], known, n=1, cutoff=0.0)
        hint = f"unknown key; nearest known key is '{near[0]}'" if near else "unknown key"
        return PlannerConfigError(field, _value_at(raw, _steps(field)), hint, file=file)
    if missing := _MISSING_KEY.search(message):
        field = f"{path}.{missing['key']}".lstrip(".")
        return PlannerConfigError(field, None, "is required and missing", file=file)
    value = _value_at(raw, _steps(path))
    return PlannerConfigError(path or "(root)", value, rule, file=file)


def _steps(path: str) -> list[str]:
    return [step for step in re.split(r"\.|(?=\[)", path) if step]


def _value_at(raw: object, steps: list[str]) -> object:
    """Follows `steps` into plain data; stops (returning what it has) at `[...]` map keys."""
    for step in steps:
        if isinstance(raw, dict) and step in raw:
            raw = raw[step]
        elif isinstance(raw, list) and step.startswith("[") and step[1:-1].isdigit():
            raw = raw[int(step[1:-1])]
        else:
            break
    return raw


def _known_keys(info: Any, steps: list[str]) -> list[str]:
    """Names of the fields of the struct reached by `steps` from a msgspec type description."""
    for member in getattr(info, "types", ()):  # a union: the struct, list or map inside it
        if not isinstance(member, msgspec.inspect.NoneType):
            info = member
    if not steps:
        return [field.encode_name for field in getattr(info, "fields", ())]
    if steps[0].startswith("["):
        inner = getattr(info, "value_type", None) or getattr(info, "item_type", None)
        return _known_keys(inner, steps[1:])
    for field in getattr(info, "fields", ()):
        if field.encode_name == steps[0]:
            return _known_keys(field.type, steps[1:])
    return []
