"""Kernel folders: what is verified, what is refused, and that nothing else is parsed."""

import json
import os

import fake_hub
import pytest
from fake_hub import NEGATE, sha256, with_metadata

from jax_webgpu import folder, spec
from jax_webgpu.errors import SpecError

DIGESTS = {name: sha256(data) for name, data in NEGATE.items()}


def refusal(files, tmp_path, *, fetched=True, read="negate.wgsl.jinja"):
    """What reading a folder with these files, and then one of them, is refused with."""
    path = fake_hub.write(tmp_path, files)
    with pytest.raises(SpecError) as caught:
        folder.read(path, fetched=fetched).read_bytes(read)
    return str(caught.value)


@pytest.mark.parametrize("fetched", [False, True])
def test_what_was_verified_is_what_is_read(tmp_path, fetched):
    read = folder.read(fake_hub.write(tmp_path, with_metadata(NEGATE)), fetched=fetched)
    for name in NEGATE:
        (tmp_path / name).write_bytes(b"changed since")

    assert {name: read.read_bytes(name) for name in NEGATE} == NEGATE
    loaded = spec.loads(
        read.read_bytes("manifest.json"), tmp_path / "manifest.json", read.read_bytes
    )
    assert loaded.templates["negate.wgsl.jinja"].source == fake_hub.TEMPLATE


def test_a_spec_is_the_same_from_a_folder_and_from_bytes(tmp_path):
    read = folder.read(fake_hub.write(tmp_path, NEGATE))
    loaded = spec.loads(
        read.read_bytes("manifest.json"), tmp_path / "manifest.json", read.read_bytes
    )
    assert loaded == spec.load(tmp_path / "manifest.json")


@pytest.mark.parametrize(
    "keys",
    [
        {"digest": {"algorithm": "sha256", "files": DIGESTS}},
        {"digest": DIGESTS},
        {"digests": DIGESTS},
        {"sha256": DIGESTS, "files": list(DIGESTS)},
        {"files": DIGESTS},
        {"files": {name: {"sha256": digest, "size": 3} for name, digest in DIGESTS.items()}},
        {"files": [{"path": name, "sha256": digest} for name, digest in DIGESTS.items()]},
        {"files": [{"name": name, "sha256": digest} for name, digest in DIGESTS.items()]},
        {"digest": {"files": [{"path": n, "sha256": d} for n, d in DIGESTS.items()]}},
        {"digests": {name: f"sha256-{digest}" for name, digest in DIGESTS.items()}},
    ],
)
def test_digests_are_found_in_each_form(tmp_path, keys):
    metadata = json.dumps({"name": "negate", "version": 1, **keys}).encode()
    read = folder.read(fake_hub.write(tmp_path, NEGATE | {"metadata.json": metadata}), fetched=True)
    assert {name: read.read_bytes(name) for name in NEGATE} == NEGATE

    text = refusal({"manifest.json": b"{}"}, tmp_path)
    assert f"expected sha256 {DIGESTS['manifest.json']}, found {sha256(b'{}')}" in text


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("name", NEGATE)
def test_altered_file_is_named_with_both_digests(tmp_path, name, fetched):
    altered = NEGATE[name] + b" "
    text = refusal(with_metadata(NEGATE) | {name: altered}, tmp_path, fetched=fetched)
    assert f"{name} is not the file that metadata.json lists" in text
    assert f"expected sha256 {DIGESTS[name]}, found {sha256(altered)}" in text


@pytest.mark.parametrize("fetched", [False, True])
def test_listed_file_is_missed_where_it_is_needed(tmp_path, fetched):
    files = with_metadata(NEGATE)
    del files["negate.wgsl.jinja"], files["test.json"]
    read = folder.read(fake_hub.write(tmp_path, files), fetched=fetched)

    assert read.find("test.json") is None
    with pytest.raises(SpecError) as caught:
        spec.loads(read.read_bytes("manifest.json"), tmp_path / "manifest.json", read.read_bytes)
    assert "$.variants[0].passes[0].shader" in str(caught.value)
    assert "negate.wgsl.jinja is missing, and metadata.json lists it" in str(caught.value)


def test_file_that_is_not_listed(tmp_path):
    """In a folder from elsewhere it is as if it were not there; in a local one it is the user's."""
    listed = {name: data for name, data in NEGATE.items() if not name.startswith("negate")}
    files = NEGATE | with_metadata(listed)
    text = refusal(files, tmp_path)
    assert text.endswith("metadata.json does not list negate.wgsl.jinja: it is not verified")

    read = folder.read(tmp_path)
    assert read.read_bytes("negate.wgsl.jinja") == NEGATE["negate.wgsl.jinja"]
    assert folder.read(tmp_path, fetched=True).find("negate.wgsl.jinja") is None


METADATA = {
    "no JSON": (b"{", "Expecting property name"),
    "no text": (b"\xff\xfe\xfd", "codec can't decode"),
    "a list": (b"[]", "expected an object"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "two keys": (b'{"digest": 1, "digest": 2}', "'digest' stands twice"),
    "another algorithm": (
        json.dumps({"digest": {"algorithm": "sha512", "files": DIGESTS}}).encode(),
        "algorithm is 'sha512'; expected 'sha256'",
    ),
    "two places": (
        json.dumps({"digest": DIGESTS, "sha256": DIGESTS}).encode(),
        "digests under both digest and sha256",
    ),
    "one in hexadecimal": (
        json.dumps({"digest": DIGESTS | {"more": "0" * 64}}).encode(),
        f"{'0' * 64!r} of 'more' is not a sha256 digest in base64",
    ),
    "one without": (
        json.dumps({"digest": DIGESTS | {"more": None}}).encode(),
        "None of 'more' is not a sha256 digest in base64",
    ),
    "twice in a list": (
        json.dumps({"files": [{"path": "a", "sha256": sha256(b"")}] * 2}).encode(),
        "'a' stands twice",
    ),
    "without a name": (
        json.dumps({"files": [{"sha256": sha256(b"")}]}).encode(),
        "'' is not the name of a file",
    ),
    "too many": (
        json.dumps({"files": {str(n): sha256(b"") for n in range(257)}}).encode(),
        "257 files; at most 256",
    ),
    "too large": (b" " * 2**20 + b"{}", "more than 1,048,576 bytes"),
}


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize(("metadata", "expected"), METADATA.values(), ids=METADATA)
def test_metadata_that_cannot_be_made_out(tmp_path, metadata, expected, fetched):
    text = refusal(NEGATE | {"metadata.json": metadata}, tmp_path, fetched=fetched)
    assert "metadata.json" in text and expected in text


@pytest.mark.parametrize(
    "metadata",
    [
        b"{}",
        b'{"digest": {}}',
        b'{"name": "negate", "files": {"manifest.json": 812}}',
        b'{"files": [{"name": "a"}, {"name": "a"}, {}, {}, 3]}',
    ],
)
def test_metadata_without_digests_is_for_local_folders(tmp_path, metadata):
    text = refusal(NEGATE | {"metadata.json": metadata}, tmp_path)
    assert "metadata.json: no sha256 digests" in text
    assert folder.read(tmp_path).read_bytes("test.json") == NEGATE["test.json"]


def test_no_metadata_is_for_local_folders(tmp_path):
    assert "metadata.json is missing" in refusal(NEGATE, tmp_path)
    assert folder.read(tmp_path).read_bytes("test.json") == NEGATE["test.json"]


NAMES = [
    "../outside",
    "a/../../outside",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a//b",
    "a/",
    "..\\outside",
    "C:outside",
    "a\0b",
    "a\nb",
    "\ud800",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_leave_the_folder(tmp_path, name):
    """Listed in the metadata, and asked for."""
    inside = tmp_path / "inside"
    (tmp_path / "outside").write_bytes(b"secret")
    listed = {"digest": DIGESTS | {name: sha256(b"secret")}}
    text = refusal(NEGATE | {"metadata.json": json.dumps(listed).encode()}, inside)
    assert f"{name!r} is not the name of a file in the folder" in text

    (inside / "metadata.json").unlink()
    with pytest.raises(SpecError, match="is not the name of a file in the folder"):
        folder.read(inside).read_bytes(name)


def test_files_in_folders_below(tmp_path):
    files = with_metadata(NEGATE | {"more/notes.txt": b"notes"})
    read = folder.read(fake_hub.write(tmp_path, files), fetched=True)
    assert read.read_bytes("more/notes.txt") == b"notes"


@pytest.mark.parametrize("listed", [False, True])
def test_links(tmp_path, listed):
    """Out of a local folder they are refused; the Hub's cache consists of them."""
    name, inside = "negate.wgsl.jinja", tmp_path / "inside"
    fake_hub.write(inside, with_metadata(NEGATE) if listed else NEGATE)
    (inside / name).rename(tmp_path / "blob")
    (inside / name).symlink_to("../blob")
    text = refusal({}, inside, fetched=False)
    assert f"{name}: it is a link out of the folder" in text
    if listed:
        assert folder.read(inside, fetched=True).read_bytes(name) == NEGATE[name]

    (inside / name).unlink()
    (inside / "shared").write_bytes(NEGATE[name])
    (inside / name).symlink_to("shared")
    assert folder.read(inside).read_bytes(name) == NEGATE[name]

    (inside / name).unlink()
    (inside / name).symlink_to(name)
    assert name in refusal({}, inside, fetched=False)


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.timeout(30)
def test_what_is_no_regular_file(tmp_path, fetched):
    files = with_metadata(NEGATE)
    del files["test.json"]
    fake_hub.write(tmp_path, files)
    os.mkfifo(tmp_path / "test.json")
    text = refusal({}, tmp_path, fetched=fetched)
    assert "test.json: it is not a regular file" in text
    assert "not a folder" in refusal({}, tmp_path / "manifest.json", fetched=fetched)


def test_sizes_are_bounded_together(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "MAX_BYTES", 500)
    files = {"a": b"a" * 300, "b": b"b" * 300}
    text = refusal(with_metadata(files), tmp_path, read="a")
    assert "b: it has more than 200 bytes" in text

    (tmp_path / "c").write_bytes(b"c" * 501)
    (tmp_path / "metadata.json").unlink()
    with pytest.raises(SpecError, match="c: it has more than 500 bytes"):
        folder.read(tmp_path).read_bytes("c")
