"""Records: the rows of the store, each of which proves itself.

A record is one text:

    stoneware <kind> <schema> <revision> <length> <id> <digest> <body>

`body` is canonical JSON, ASCII, `length` bytes long: of a run, or of a run and on the next line a
sample that it took, so that no sample depends on another row. `id` is a digest of what makes the
record one and the same when it is stored again; `revision` counts how often that happened. `digest`
covers all the rest. So a record that was edited, cut or torn is recognised wherever it is found, be
it in a table or in the bytes of a damaged file.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from stoneware.runtime.canonical import canonical_json
from stoneware.tuning.samples import SCHEMA, Run, Sample

HEADER = re.compile(
    rb"stoneware ([a-z]{1,16}) ([0-9]{1,6}) ([0-9]{1,15}) ([0-9]{1,9}) ([0-9a-f]{32}) "
    rb"([0-9a-f]{32}) "
)
ID_LENGTH = 32


@dataclass(frozen=True)
class Record:
    """One row.

    Attributes:
      kind: "run" or "sample", or what a newer version adds.
      schema: `samples.SCHEMA` of the version that wrote it.
      revision: 1, and one more each time that a record of the same id replaces it.
      id: 32 hexadecimal digits.
      body: canonical JSON.
    """

    kind: str
    schema: int
    revision: int
    id: str
    body: bytes

    @property
    def payload(self) -> bytes:
        """The text, as it is stored."""
        return b" ".join([
            f"stoneware {self.kind} {self.schema} {self.revision} {len(self.body)} {self.id}"
            .encode(), self._digest.encode(), self.body,
        ])

    @property
    def _digest(self) -> str:
        return _digest(self.kind, self.schema, self.revision, self.id, self.body)

    @property
    def run_text(self) -> bytes:
        """The part of the body that is the run, for who decodes many records of one."""
        return self.body.split(b"\n", 1)[0]

    def run(self) -> Run:
        """The run of a record of kind "run", or under which a sample was taken.

        Raises:
          ValueError, TypeError: a field breaks its rule.
        """
        return Run.from_json(json.loads(self.run_text))

    def sample(self) -> Sample:
        """The sample of a record of kind "sample"; errors as for `run`."""
        return Sample.from_json(json.loads(self.body.split(b"\n", 1)[1]))

    def may_be_of(self, op: str) -> bool:
        """Whether the body can hold a sample of `op`; cheap, since nothing is parsed."""
        return f'"op":{canonical_json(op)}'.encode() in self.body


def of_run(run: Run) -> Record:
    return _record("run", run.id, canonical_json(run.to_json()))


def of_sample(run: Run, sample: Sample) -> Record:
    identity = [
        sample.key.to_json(), sample.config.to_json(), sample.kernel_sha256, sample.run,
    ]
    body = canonical_json(run.to_json()) + "\n" + canonical_json(sample.to_json())
    return _record("sample", identity, body)


def unpack(payload: object) -> Record:
    """Makes the record from its text.

    Raises:
      ValueError: it is not a record, or not the one that was written; says which.
    """
    if not isinstance(payload, bytes):
        raise ValueError(f"a record must be text, found {type(payload).__name__}")
    header = HEADER.match(payload)
    if not header:
        raise ValueError(f"a record must begin with its header, found {payload[:40]!r}")
    record = record_at(header, payload[header.end():])
    if record is None:
        raise ValueError("the digest of the record does not match: it was edited or damaged")
    return record


def record_at(header: re.Match[bytes], body: bytes) -> Record | None:
    """The record with this header and body, if length and digest agree."""
    kind, schema, revision, length, id, digest = (part.decode() for part in header.groups())
    if len(body) != int(length):
        return None
    if _digest(kind, int(schema), int(revision), id, body) != digest:
        return None
    return Record(kind, int(schema), int(revision), id, body)


def _record(kind: str, identity: Any, body: str) -> Record:
    # The schema is part of the id, so that a record of another version is never replaced.
    id = hashlib.sha256(canonical_json([kind, SCHEMA, identity]).encode()).hexdigest()[:ID_LENGTH]
    return Record(kind, SCHEMA, 1, id, body.encode("ascii"))


def _digest(kind: str, schema: int, revision: int, id: str, body: bytes) -> str:
    head = f"{kind} {schema} {revision} {id} ".encode()
    return hashlib.sha256(head + body).hexdigest()[:32]
