"""The JSON Schema of autotune.json, linked from the reference."""

import msgspec

from cellfeed_tuner import AutotuneResult, Configuration
from cellfeed_tuner._result import INFINITE_IF_NULL, SCHEMA


def result_schema():
    """Return the JSON Schema of what `AutotuneResult.save` writes."""
    schema = msgspec.json.schema(AutotuneResult, schema_hook=of_configuration)
    for definition in schema["$defs"].values():
        for name in INFINITE_IF_NULL.keys() & definition.get("properties", {}).keys():
            definition["properties"][name] = {"type": ["number", "null"]}
    properties = schema["$defs"]["AutotuneResult"]["properties"]
    properties |= {"schema": {"const": SCHEMA}, "version": {"type": "string"}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **schema}


def of_configuration(kind):
    """Return the JSON Schema of a configuration."""
    assert kind is Configuration, kind
    sizes = {
        "block_size": {"type": "integer", "minimum": 1},
        "fetch_factor": {"type": "integer", "minimum": 1},
        "num_workers": {"type": "integer", "minimum": 0},
    }
    return {
        "title": "Configuration",
        "type": "object",
        "properties": sizes,
        "required": list(sizes),
        "additionalProperties": {"type": ["boolean", "number", "string", "null"]},
    }
