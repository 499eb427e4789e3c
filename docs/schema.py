"""The JSON Schema of everything that `--json` prints, from the types of the report: `lsuv_cli/report.schema.json`."""

from __future__ import annotations

import dataclasses
import json
import types
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

from lsuv_cli.report import COMPARISON_SCHEMA, SCHEMA, Comparison, Report

PLAIN = {str: "string", int: "integer", bool: "boolean", float: "number"}


def _kind(hint: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type; the dataclasses in it go to `found`."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is float:
        return {"type": ["number", "null"]}  # NaN and Inf are null
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"enum": list(hint)}
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        if hint.__name__ not in found:
            found[hint.__name__] = {}
            found[hint.__name__] = _object(hint, found)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if part is type(None) else _kind(part, found) for part in parts]}
    if origin in (tuple, list):
        return {"type": "array", "items": _kind(parts[0], found)}
    if origin is dict and parts[1] is not Any:
        return {"type": "object", "additionalProperties": _kind(parts[1], found)}
    return {"type": "object"}


def _object(kind: type, found: dict[str, Any], **more: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    fields = {field.name: _kind(hints[field.name], found) for field in dataclasses.fields(kind)}
    return {"type": "object", "required": [*more, *fields], "properties": more | fields}


def schema() -> str:
    """The file's text. Fields may be added without notice, so that others than these are allowed."""
    found: dict[str, Any] = {}
    code = {"type": "integer", "minimum": 0, "maximum": 255}
    report = _object(Report, found, schema={"const": SCHEMA}, exit_code=code)
    reports = {"type": "object", "additionalProperties": {"$ref": "#/$defs/Report"}}
    comparison = {
        "type": "object",
        "required": ["schema", "inits"],
        "properties": {"schema": {"const": COMPARISON_SCHEMA}, "inits": reports},
        "description": Comparison.__doc__,
    }
    error = {
        "type": "object",
        "required": ["schema", "exit_code", "model", "error"],
        "properties": {
            "schema": {"const": "lsuv-error/1"},
            "exit_code": code,
            "model": {"type": "string"},
            "error": {"type": "string"},
        },
    }
    either = [{"$ref": "#/$defs/Report"}, {"$ref": "#/$defs/Error"}]
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What lsuv prints with --json",
        "anyOf": [*either, {"$ref": "#/$defs/Comparison"}, {"type": "array", "items": {"anyOf": either}}],
        "$defs": {"Report": report, "Comparison": comparison, "Error": error, **found},
    }
    return json.dumps(whole, indent=2) + "\n"
