"""Write crds/ and their reference page from the contracts; --check only compares.

A field's docstring is its description and its bounds are the schema's. What a schema cannot say stands in
crd_rules. A field without a text or without a bound is refused: the server could not estimate what a rule
over it costs, and `kubectl explain` would have nothing to say.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, Final

import crd_pages
import crd_rules
import yaml
from crd_rules import Kind, Rule
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from gristmill_contracts.resources import GROUP, VERSION

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs/reference/custom-resources.md"
NOTE: Final = "# Made from gristmill_contracts by `make crds`; do not edit.\n"

Schema = dict[str, Any]  # Any: JSON

KEPT: Final = (
    "description", "type", "format", "enum", "pattern", "default", "minimum", "maximum", "minLength",
    "maxLength", "minItems", "maxItems", "maxProperties", "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
)  # fmt: skip


class WithFactories(GenerateJsonSchema):
    """Defaults that a factory makes are defaults of the schema, too."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        factory: Any = schema.get("default_factory")
        if factory is not None and not schema.get("default_factory_takes_data"):
            schema = {**schema, "default": factory()}
        return super().default_schema(schema)


class Converter:
    """JSON schema of one kind to a structural schema."""

    def __init__(self, kind: Kind, definitions: Schema) -> None:
        self._kind = kind
        self._definitions = definitions
        self.problems: list[str] = []

    def convert(self, schema: Schema, path: str) -> Schema:
        """`path` as in rules: spec.keys[].name"""
        schema = self._resolved(schema)
        if "const" in schema:
            schema = {**schema, "enum": [schema["const"]]}
        kept: Schema = {name: _plain(schema[name]) for name in KEPT if name in schema}
        for at, keyword in self._kind.said_by_rules:
            if at == path:
                kept.pop(keyword, None)
        kind_of = kept.get("type")
        if kind_of == "integer":
            kept["format"] = "int64"
        if kind_of == "object":
            self._object(schema, kept, path)
        if kind_of == "array":
            kept["items"] = self.convert(schema["items"], f"{path}[]")
        self._set_default(kept, path)
        rules = [_rule(each) for each in self._kind.rules if each.at == path]
        if rules:
            kept["x-kubernetes-validations"] = rules
        self._check(kept, path)
        return kept

    def _resolved(self, schema: Schema) -> Schema:
        """References followed, `X | None` as X; what stands beside them wins."""
        choices = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
        target = choices[0] if len(choices) == 1 else None
        if "$ref" in schema:
            target = self._definitions[schema["$ref"].rpartition("/")[2]]
        if target is None:
            return schema
        beside = {name: value for name, value in schema.items() if name not in ("anyOf", "$ref")}
        return self._resolved({**target, **beside})

    def _object(self, schema: Schema, kept: Schema, path: str) -> None:
        properties = schema.get("properties", {})
        if properties:
            prefix = f"{path}." if path else ""
            kept["properties"] = {
                name: self.convert(each, f"{prefix}{name}") for name, each in properties.items()
            }
        if schema.get("required"):
            kept["required"] = list(schema["required"])
        # Keys with a pattern stand as patternProperties; a structural schema knows their values alone.
        values = schema.get("additionalProperties") or next(
            iter(schema.get("patternProperties", {}).values()), None
        )
        if isinstance(values, dict):
            kept["additionalProperties"] = self.convert(values, f"{path}{{}}")

    def _set_default(self, kept: Schema, path: str) -> None:
        """An object's default is {} where its fields have defaults; emptiness is no default."""
        default = kept.pop("default", None)
        if path == "status" or path.startswith("status."):
            return
        if kept.get("type") == "object":
            fields = kept.get("properties", {}).values()
            if isinstance(default, dict) and any("default" in each for each in fields):
                kept["default"] = {}
        elif kept.get("type") == "array":
            keys = kept.get("x-kubernetes-list-map-keys", ())
            if default:
                kept["default"] = [{key: item[key] for key in keys} for item in default]
        elif default is not None and default != "" and (default is False or default != 0):
            kept["default"] = default

    def _check(self, kept: Schema, path: str) -> None:
        at = f"{self._kind.model.__name__} {path or '(root)'}"
        if not kept.get("description") and not path.endswith(("[]", "{}")):
            self.problems.append(f"{at}: no description; write a docstring below the field")
        bound = {
            "string": kept.keys() & {"maxLength", "enum", "format"},
            "integer": kept.keys() & {"maximum", "enum"},
            "array": kept.keys() & {"maxItems"},
            "object": "additionalProperties" not in kept or "maxProperties" in kept,
            "boolean": True,
        }.get(str(kept.get("type")))
        if not bound:
            self.problems.append(f"{at}: no bound, or a type that is none of ours")


def _plain(value: Any) -> Any:  # Any: JSON
    return " ".join(value.split()) if isinstance(value, str) and "\n" in value else value


def _rule(rule: Rule) -> Schema:
    entry = {"rule": rule.rule, "message": rule.message}
    if rule.expression:
        entry["messageExpression"] = rule.expression
    if rule.field:
        entry["fieldPath"] = rule.field
    return entry


def root_schema(kind: Kind) -> Schema:
    """Raises SystemExit where a field has no text or no bound."""
    whole = kind.model.model_json_schema(by_alias=True, schema_generator=WithFactories)
    converter = Converter(kind, whole.get("$defs", {}))
    parts = {
        name: converter.convert(whole["properties"][name], name) for name in ("spec", "status")
    }
    if converter.problems:
        raise SystemExit("\n".join(converter.problems))
    schema: Schema = {
        "description": _plain(whole["description"]),
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{definition_kind(kind)}."},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            **parts,
        },
    }
    if kind.spec_required:
        parts["spec"].pop("default", None)
        schema["required"] = ["spec"]
    schema["x-kubernetes-validations"] = [_rule(each) for each in kind.rules if not each.at]
    return schema


def definition_kind(kind: Kind) -> str:
    return str(kind.model.model_fields["kind"].default)


def definition(kind: Kind) -> Schema:
    """The CustomResourceDefinition."""
    word = definition_kind(kind)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "gristmill"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Cluster" if kind.model.cluster_wide else "Namespaced",
            "names": {
                "kind": word,
                "listKind": f"{word}List",
                "plural": kind.plural,
                "singular": word.lower(),
                "shortNames": [kind.short],
                "categories": ["gristmill"],
            },
            "versions": [version(kind)],
        },
    }


def version(kind: Kind) -> Schema:
    entry: Schema = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {
                "name": each.name,
                "type": each.type,
                "jsonPath": each.path,
                "description": each.description,
                "priority": each.priority,
            }
            for each in kind.columns
        ],
    }
    if kind.selectable:
        entry["selectableFields"] = [{"jsonPath": path} for path in kind.selectable]
    entry["schema"] = {"openAPIV3Schema": root_schema(kind)}
    return entry


def page(kind: Kind) -> str:
    text: str = yaml.safe_dump(definition(kind), sort_keys=False, width=110, allow_unicode=True)
    return NOTE + text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    only_compare = parser.parse_args().check
    pages = {ROOT / f"crds/{kind.plural}.yaml": page(kind) for kind in crd_rules.KINDS}
    pages[PAGE] = crd_pages.reference([definition(kind) for kind in crd_rules.KINDS])
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if only_compare:
            print(
                f"{path.relative_to(ROOT)} is not what the contracts say; run `make crds`",
                file=sys.stderr,
            )
        else:
            path.write_text(pages[path])
    return 1 if only_compare and stale else 0


if __name__ == "__main__":
    sys.exit(main())
