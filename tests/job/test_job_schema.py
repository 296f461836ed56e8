"""Every field says what it means, and the schema is the job's own."""

from meshwright.job import job_fields, job_schema

SECTIONS = {
    "model", "data", "batch", "layout", "memory", "precision", "optimizer", "schedule", "preference", "evaluation",
    "checkpoint", "run", "log", "cluster",
}  # fmt: skip


def test_every_field_is_documented() -> None:
    undocumented = [name for name, meaning in job_fields() if not meaning.strip()]
    assert undocumented == []


def test_the_schema_covers_every_section_and_refuses_others() -> None:
    schema = job_schema()
    assert set(schema["properties"]) == SECTIONS
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Batch"]["properties"]["micro_batch"]["description"].startswith("Sequences in one forward")
