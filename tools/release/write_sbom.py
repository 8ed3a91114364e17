"""Writes the SBOM of a wheel, SPDX 2.3 as JSON; the program of the rule spdx_sbom.

spdx-tools checks the document against the specification before it is written. Nothing in it depends on the day or the
machine.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import sys
import urllib.parse
from typing import Any

from absl import app, flags
from license_expression import get_spdx_licensing
from spdx_tools.spdx.model import (
    Actor,
    ActorType,
    Checksum,
    ChecksumAlgorithm,
    CreationInfo,
    Document,
    ExternalPackageRef,
    ExternalPackageRefCategory,
    ExtractedLicensingInfo,
    File,
    Package,
    Relationship,
    RelationshipType,
    SpdxNoAssertion,
)
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
from spdx_tools.spdx.writer.json.json_writer import write_document_to_file

_COMPONENTS = flags.DEFINE_string("components", None, "JSON, in the form of components.bzl.", required=True)
_DISTRIBUTION = flags.DEFINE_string("distribution", None, "Name on the package index.", required=True)
_VERSION = flags.DEFINE_string("version", None, "Version of the distribution.", required=True)
_LICENSE_EXPRESSION = flags.DEFINE_string("license_expression", None, "SPDX expression of the wheel.", required=True)
_MANIFEST = flags.DEFINE_string("manifest", None, "The kernel manifest.", required=True)
_MANIFEST_PATH = flags.DEFINE_string("manifest_path", None, "Its path in the wheel.", required=True)
_OUT = flags.DEFINE_string("out", None, "The file to write.", required=True)

# The date of every file in the wheel (write_wheel.py).
_CREATED = datetime.datetime(1980, 1, 1)
_LICENSING = get_spdx_licensing()


def spdx_id(name: str) -> str:
    return f"SPDXRef-{name}"


def package(name: str, version: str, license_expression: str, *, on_index: bool, **fields: Any) -> Package:
    """A package; `on_index` adds its package URL, by which scanners of vulnerabilities find it."""
    url = f"pkg:pypi/{name}@{urllib.parse.quote(version)}"
    references = [ExternalPackageRef(ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", url)] if on_index else []
    return Package(
        spdx_id=spdx_id(name),
        name=name,
        version=version,
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        license_concluded=SpdxNoAssertion(),
        license_declared=_LICENSING.parse(license_expression),
        copyright_text=SpdxNoAssertion(),
        external_references=references,
        **fields,
    )


def component(fields: dict[str, Any]) -> Package:
    """A package of components.bzl, with the sha256 of each wheel that the lock allows."""
    files = fields.get("files", {})
    return package(
        fields["name"],
        fields["version"],
        fields["license"],
        on_index=bool(files),
        file_name=next(iter(files)) if len(files) == 1 else None,
        checksums=[Checksum(ChecksumAlgorithm.SHA256, sha256) for sha256 in files.values()],
        comment=fields["comment"],
    )


def document(components: list[dict[str, Any]], manifest: bytes) -> Document:
    """The SBOM of the wheel with these components and this kernel manifest."""
    name = _DISTRIBUTION.value
    wheel = package(name, _VERSION.value, _LICENSE_EXPRESSION.value, on_index=True)
    manifest_sha256 = hashlib.sha256(manifest).hexdigest()
    listing = File(
        name=f"./{_MANIFEST_PATH.value}",
        spdx_id=spdx_id("kernel-manifest"),
        # SPDX 2.3 requires the first.
        checksums=[
            Checksum(ChecksumAlgorithm.SHA1, hashlib.sha1(manifest).hexdigest()),
            Checksum(ChecksumAlgorithm.SHA256, manifest_sha256),
        ],
        comment="Every kernel of the wheel, with the sha256 of its machine code.",
    )
    relationships = [
        Relationship("SPDXRef-DOCUMENT", RelationshipType.DESCRIBES, wheel.spdx_id),
        Relationship(listing.spdx_id, RelationshipType.METAFILE_OF, wheel.spdx_id),
    ]
    for fields in components:
        this = spdx_id(fields["name"])
        if fields["is_inside"]:
            relationships.append(Relationship(wheel.spdx_id, RelationshipType.CONTAINS, this))
        else:
            relationships.append(Relationship(this, RelationshipType.BUILD_TOOL_OF, wheel.spdx_id))
        if "part_of" in fields:
            relationships.append(Relationship(spdx_id(fields["part_of"]), RelationshipType.CONTAINS, this))
    own_licences = sorted({f["license"] for f in components if f["license"].startswith("LicenseRef-")})
    return Document(
        CreationInfo(
            spdx_version="SPDX-2.3",
            spdx_id="SPDXRef-DOCUMENT",
            name=f"{name}-{_VERSION.value}",
            document_namespace=f"https://spdx.org/spdxdocs/{name}-{_VERSION.value}-{manifest_sha256}",
            creators=[Actor(ActorType.TOOL, "stoneware write_sbom")],
            created=_CREATED,
        ),
        packages=[wheel, *map(component, components)],
        files=[listing],
        relationships=relationships,
        extracted_licensing_info=[
            ExtractedLicensingInfo(
                license_id=licence,
                license_name=licence.removeprefix("LicenseRef-"),
                extracted_text="The text is in .dist-info/licenses of the packages that declare this licence.",
            )
            for licence in own_licences
        ],
    )


def main(argv: list[str]) -> None:
    del argv
    components = json.loads(pathlib.Path(_COMPONENTS.value).read_text(encoding="utf-8"))
    sbom = document(components, pathlib.Path(_MANIFEST.value).read_bytes())
    problems = validate_full_spdx_document(sbom)
    if problems:
        texts = "\n".join(f"  {problem.validation_message}" for problem in problems)
        sys.exit(
            f"write_sbom: the SBOM must be valid SPDX 2.3, but is not:\n{texts}\ncorrect tools/release/components.bzl"
        )
    write_document_to_file(sbom, _OUT.value, validate=False)


if __name__ == "__main__":
    app.run(main)
