"""Records: the rows of the store, each of which proves itself.

A row has an id and a payload, which is one text:

    <digest> <kind> <schema> <body>

`body` is canonical JSON, ASCII: of a run, or of a run and on the next line a sample that it took,
so that no sample depends on another row. `id` is a digest of what makes the record one and the same
when it is stored again. `digest` covers the id and all the rest, so a row that was edited, cut or
moved is recognised.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from stoneware.runtime.canonical import canonical_json
from stoneware.tuning.samples import SCHEMA, Run, Sample


@dataclass(frozen=True)
class Record:
    """One row.

    Attributes:
      kind: "run" or "sample", or what a newer version adds.
      schema: `samples.SCHEMA` of the version that wrote it.
      id: 32 hexadecimal digits.
      body: canonical JSON.
    """

    kind: str
    schema: int
    id: str
    body: str

    @property
    def payload(self) -> str:
        """The text, as it is stored."""
        rest = f"{self.kind} {self.schema} {self.body}"
        return f"{_digest(self.id + ' ' + rest)} {rest}"

    @property
    def run_text(self) -> str:
        """The part of the body that is the run; many records share one."""
        return self.body.split("\n", 1)[0]

    def run(self) -> Run:
        """The run of a record of kind "run", or under which a sample was taken.

        Raises:
          One of samples.PARSE_ERRORS: a field breaks its rule.
        """
        return Run.from_json(json.loads(self.run_text))

    def sample(self) -> Sample:
        """The sample of a record of kind "sample"; errors as for `run`."""
        return Sample.from_json(json.loads(self.body.partition("\n")[2]))

    def may_be_of(self, op: str) -> bool:
        """Whether the body can hold a sample of `op`; cheap, since nothing is parsed."""
        return f'"op":{canonical_json(op)}' in self.body


def of_run(run: Run) -> Record:
    return _record("run", run.id, canonical_json(run.to_json()))


def of_sample(run: Run, sample: Sample) -> Record:
    identity = [sample.key.to_json(), sample.config.to_json(), sample.kernel_sha256, sample.run]
    body = canonical_json(run.to_json()) + "\n" + canonical_json(sample.to_json())
    return _record("sample", identity, body)


def unpack(id: object, payload: object) -> Record:
    """Makes the record of a row, whose columns are bytes if they are text.

    Raises:
      ValueError: it is not the one that was written.
    """
    if not isinstance(id, bytes) or not isinstance(payload, bytes):
        raise ValueError(f"id and payload must be text, found {id!r:.40} and {payload!r:.40}")
    digest, _, rest = payload.decode("ascii", "replace").partition(" ")
    name = id.decode("ascii", "replace")
    if _digest(f"{name} {rest}") != digest:
        raise ValueError(f"its digest does not match, it was edited or damaged: {payload[:80]!r}")
    kind, schema, body = rest.split(" ", 2)
    return Record(kind, int(schema), name, body)


def _record(kind: str, identity: Any, body: str) -> Record:
    # The schema is part of the id, so that a record of another version is never replaced.
    return Record(kind, SCHEMA, _digest(canonical_json([kind, SCHEMA, identity])), body)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
