"""Kernels from the Hub: the real client, and a loopback server in the Hub's place."""

import json
import socket
import sys
import types
from collections import Counter

import fake_hub
import pytest
from fake_hub import MANIFEST, NEGATE, FakeHub, Repository, sha256, with_metadata

from jax_webgpu import folder, hub, plan, spec
from jax_webgpu.capabilities import PRESETS
from jax_webgpu.errors import CallError, HubError, MissingExtraError, SpecError
from jax_webgpu.resolve import Tensor, resolve

FILES = with_metadata(NEGATE)
ONCE = Counter(list(FILES))


@pytest.fixture(scope="module")
def server():
    with FakeHub() as server:
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def call(server, home):
    """Calls a function beside the client; all tests share its cache, each with its repository."""
    with fake_hub.process(server.url, home) as call:
        yield call


@pytest.fixture(scope="module")
def offline(server, home, call):
    with fake_hub.process(server.url, home, HF_HUB_OFFLINE="1") as call:
        yield call


@pytest.fixture
def kernel(server):
    """The id of a repository of the test's own, without anything in it, and the repository."""
    id = f"webgpu-kernels/test.{len(server.repositories)}"
    repository = server.repositories[id] = Repository()
    return id, repository


def load(path):
    read = folder.read(path, fetched=True)
    return spec.loads(read.read_bytes("manifest.json"), path / "manifest.json", read.read_bytes)


def refused(call, error, id, **which):
    """The text of what fetching is refused with."""
    with pytest.raises(error) as caught:
        call(hub.fetch, id, **which)
    return str(caught.value)


# --- what is fetched -----------------------------------------------------------------------


def test_version_is_fetched_loaded_and_planned(call, kernel, home):
    id, repository = kernel
    commit = repository.publish(FILES)
    path = call(hub.fetch, id, version=1)

    assert path.is_relative_to(home)
    assert path.parts[-3:] == (commit, "build", "webgpu")
    assert {each.name: each.read_bytes() for each in path.iterdir()} == FILES
    assert repository.asked("GET") == ONCE

    resolved = resolve(load(path), {"x": Tensor((100, 100), "float32")})
    assert resolved.outputs == (("y", Tensor((100, 100), "float32")),)
    (only,) = plan.make(resolved, PRESETS["lavapipe"]).passes
    assert only.workgroups == (157, 1, 1)
    assert "index < 10000u" in only.wgsl


def test_what_is_cached_is_not_downloaded_again(call, kernel):
    id, repository = kernel
    commit = repository.publish(FILES)
    path = call(hub.fetch, id, version=1)
    repository.asked("GET"), repository.asked("HEAD")

    assert call(hub.fetch, id, version=1) == path
    assert set(repository.asked("HEAD")) == {"metadata.json"}  # whether the version has moved
    assert call(hub.fetch, id, revision=commit) == path
    assert call(hub.fetch, id, revision=commit.upper()) == path
    assert repository.requests == []


def test_revision_is_fetched(call, kernel):
    id, repository = kernel
    old = repository.publish(FILES)
    new = repository.publish(with_metadata(NEGATE | {"test.json": b"{}"}))

    assert load(call(hub.fetch, id, revision=old)).name == "Negate"
    assert repository.asked("GET") == ONCE
    path = call(hub.fetch, id, version=1)
    assert new in path.parts and (path / "test.json").read_bytes() == b"{}"
    assert set(repository.asked("GET")) == {"metadata.json", "test.json"}


def test_versions_are_branches(call, kernel):
    id, repository = kernel
    repository.publish(FILES)
    newer = with_metadata(NEGATE | {"manifest.json": json.dumps(MANIFEST | {"name": "N"}).encode()})
    repository.publish(newer, "v2")

    assert load(call(hub.fetch, id, version=1)).name == "Negate"
    assert load(call(hub.fetch, id, version=2)).name == "N"


def test_version_that_moves_on_is_fetched_anew(call, kernel):
    id, repository = kernel
    repository.publish(FILES)
    old = call(hub.fetch, id, version=1)
    repository.publish(with_metadata(NEGATE | {"negate.wgsl.jinja": b"// empty"}))
    new = call(hub.fetch, id, version=1)

    assert load(new).templates["negate.wgsl.jinja"].source == "// empty"
    assert load(old).templates["negate.wgsl.jinja"].source == fake_hub.TEMPLATE


def test_version_that_moves_on_meanwhile_is_not_mixed(call, kernel):
    id, repository = kernel
    repository.next = repository.publish(with_metadata(NEGATE | {"test.json": b"{}"}))
    commit = repository.publish(FILES)
    path = call(hub.fetch, id, version=1)

    assert repository.branches["v1"] != commit
    assert {each.name: each.read_bytes() for each in path.iterdir()} == FILES


def test_nothing_but_what_is_listed_is_fetched(call, kernel):
    id, repository = kernel
    repository.publish(FILES | {"extra.wgsl.jinja": b"", "../../README.md": b"", "big.bin": b""})
    path = call(hub.fetch, id, version=1)
    assert repository.asked("GET") == ONCE
    assert {each.name for each in path.iterdir()} == set(FILES)


def test_a_template_that_is_not_listed_is_not_parsed(call, kernel):
    id, repository = kernel
    listed = {name: data for name, data in NEGATE.items() if name != "negate.wgsl.jinja"}
    repository.publish(NEGATE | with_metadata(listed))
    path = call(hub.fetch, id, version=1)
    (path / "negate.wgsl.jinja").write_bytes(NEGATE["negate.wgsl.jinja"])
    with pytest.raises(SpecError, match=r"does not list negate\.wgsl\.jinja"):
        load(path)


def test_files_behind_a_redirect(call, kernel):
    id, repository = kernel
    repository.redirected = True
    repository.publish(FILES)
    assert load(call(hub.fetch, id, version=1)).name == "Negate"


# --- the client's own settings -------------------------------------------------------------


def test_offline_a_warm_cache_is_used(call, offline, kernel):
    id, repository = kernel
    commit = repository.publish(FILES)
    path = call(hub.fetch, id, version=1)
    repository.requests.clear()

    assert offline(hub.fetch, id, version=1) == path
    assert offline(hub.fetch, id, revision=commit) == path
    assert repository.requests == []


def test_offline_a_cold_cache_is_an_error(call, offline, kernel):
    id, repository = kernel
    commit = repository.publish(FILES)
    text = "metadata.json: it is not in the cache, and HF_HUB_OFFLINE is set"
    assert refused(offline, HubError, id, version=1) == f"{id} at v1: {text}"
    assert refused(offline, HubError, id, revision=commit) == f"{id} at {commit}: {text}"

    path = call(hub.fetch, id, version=1)
    (path / "test.json").unlink()
    assert "test.json: it is not in the cache" in refused(offline, HubError, id, version=1)


def test_token_is_sent(server, call, kernel, tmp_path):
    id, repository = kernel
    repository.publish(FILES)
    call(hub.fetch, id, version=1)
    assert repository.tokens == {None}

    repository.tokens.clear()
    with fake_hub.process(server.url, tmp_path, HF_TOKEN="hf_of_a_test") as call:
        call(hub.fetch, id, version=1)
    assert repository.tokens == {"Bearer hf_of_a_test"}


# --- damage --------------------------------------------------------------------------------


def test_altered_file_is_named(call, kernel):
    id, repository = kernel
    altered = NEGATE["negate.wgsl.jinja"].replace(b"-x", b"+x")
    repository.publish(FILES | {"negate.wgsl.jinja": altered})
    path = call(hub.fetch, id, version=1)
    with pytest.raises(SpecError) as caught:
        load(path)
    text = str(caught.value)
    assert "negate.wgsl.jinja is not the file that metadata.json lists" in text
    assert sha256(NEGATE["negate.wgsl.jinja"]) in text and sha256(altered) in text


def test_file_damaged_in_the_cache_is_fetched_again_as_told(call, kernel):
    id, repository = kernel
    repository.publish(FILES)
    path = call(hub.fetch, id, version=1)
    blob = (path / "manifest.json").resolve()
    blob.write_bytes(b"{}")
    with pytest.raises(SpecError) as caught:
        load(path)
    assert f"(remove {blob} and load again)" in str(caught.value)

    blob.unlink()
    assert load(call(hub.fetch, id, version=1)).name == "Negate"


def test_connection_that_breaks_always(call, kernel):
    id, repository = kernel
    repository.publish(FILES)
    repository.cut["manifest.json"] = 10
    text = refused(call, HubError, id, version=1)
    assert text.startswith(f"{id} at v1: manifest.json: RemoteProtocolError: peer closed")

    repository.cut.clear()
    assert load(call(hub.fetch, id, version=1)).name == "Negate"


def test_file_shorter_than_was_said(call, kernel):
    id, repository = kernel
    repository.publish(FILES)
    repository.short["manifest.json"] = 10
    text = refused(call, HubError, id, version=1)
    size = len(NEGATE["manifest.json"])
    assert (
        f"manifest.json: OSError: Consistency check failed: file should be of size {size}" in text
    )


def test_missing_files_are_named(call, kernel):
    id, repository = kernel
    for name in FILES:
        repository.publish({each: data for each, data in FILES.items() if each != name})
        text = refused(call, HubError, id, version=1)
        assert text == f"{id} at v1: {name}: there is no such file in build/webgpu/"


def test_metadata_without_a_manifest(call, kernel):
    id, repository = kernel
    repository.publish(with_metadata({"negate.wgsl.jinja": NEGATE["negate.wgsl.jinja"]}))
    path = call(hub.fetch, id, version=1)
    with pytest.raises(SpecError, match=r"metadata.json does not list manifest.json"):
        load(path)


def test_metadata_without_digests(call, kernel):
    id, repository = kernel
    repository.publish(with_metadata(NEGATE, digest=None))
    path = call(hub.fetch, id, version=1)
    assert set(repository.asked("GET")) == {"metadata.json"}
    with pytest.raises(SpecError, match=r"metadata.json: no sha256 digests"):
        load(path)


@pytest.mark.parametrize("name", ["../../../../outside", "/outside", "..\\outside", "a/../../b"])
def test_names_that_leave_the_folder_are_not_asked_for(call, kernel, name):
    id, repository = kernel
    repository.publish(with_metadata({name: b"x"}))
    text = refused(call, SpecError, id, version=1)
    assert text.startswith(f"{id} at v1: metadata.json: ")
    assert f"{name!r} is not the name of a file in the folder" in text
    assert set(repository.asked("GET")) == set(repository.asked("HEAD")) == {"metadata.json"}


@pytest.mark.parametrize("name", ["metadata.json", "test.json"])
def test_large_files_are_not_downloaded(call, kernel, name):
    id, repository = kernel
    repository.publish(FILES)
    repository.sizes[name] = 2**40
    text = refused(call, SpecError, id, version=1)
    assert f"{id} at v1: {name} has 1,099,511,627,776 bytes; " in text
    assert name not in repository.asked("GET")


# --- what the Hub refuses ------------------------------------------------------------------


def test_unknown_repository(call):
    id = "webgpu-kernels/no.such"
    text = f"{id} at v1: metadata.json: the Hub has no such kernel for this user; "
    assert refused(call, HubError, id, version=1) == f"{text}check the id, or set HF_TOKEN"


def test_unknown_version_tells_which_there_are(call, kernel):
    id, repository = kernel
    for branch in ("v10", "main", "v2", "v02", "version"):
        repository.publish(FILES, branch)
    text = "the Hub has no such revision; the kernel's versions: 2, 10"
    assert refused(call, HubError, id, version=1) == f"{id} at v1: metadata.json: {text}"
    commit = "0" * 40
    assert (
        refused(call, HubError, id, revision=commit) == f"{id} at {commit}: metadata.json: {text}"
    )

    repository.branches.clear()
    assert refused(call, HubError, id, version=1).endswith("versions: unknown")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ((403, "GatedRepo"), "its owner asks for terms to be accepted on the Hub"),
        (
            (403, "", "Not you"),
            "it is not in the cache, nor to be had: HfHubHTTPError: 403 Forbidden",
        ),
        ((401, "", "Invalid credentials in Authorization header"), "Invalid credentials"),
        ((500, ""), "it is not in the cache, nor to be had: HfHubHTTPError: Server error '500"),
        ((503, "", "Upgrading"), "Upgrading"),
    ],
)
def test_errors_of_the_server(call, kernel, error, expected):
    id, repository = kernel
    repository.publish(FILES)
    repository.error = error
    assert expected in refused(call, HubError, id, version=1)

    repository.error = None
    path = call(hub.fetch, id, version=1)
    repository.error = error
    assert call(hub.fetch, id, version=1) == path  # the cache is as good as before


def test_no_connection(home, tmp_path, call, kernel):
    id, repository = kernel
    repository.publish(FILES)
    path = call(hub.fetch, id, version=1)
    with socket.socket() as taken:  # bound, and listening to nobody
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with fake_hub.process(nobody, home) as unconnected:
            assert unconnected(hub.fetch, id, version=1) == path
            text = refused(unconnected, HubError, f"{id}.other", version=1)
    assert "it is not in the cache, nor to be had: ConnectError: " in text


def test_cause_is_kept(call):
    with pytest.raises(HubError) as caught:
        call(hub.fetch, "webgpu-kernels/no.such", version=1)
    assert isinstance(caught.value, OSError)
    assert "RepositoryNotFoundError: 401 Client Error" in str(caught.value.__cause__)


# --- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("which", [{}, {"version": 1, "revision": "0" * 40}])
def test_either_a_version_or_a_revision(which):
    with pytest.raises(CallError) as caught:
        hub.fetch("webgpu-kernels/ai.onnx.Add", **which)
    text = str(caught.value)
    assert f"got {'both' if which else 'neither'}" in text
    assert 'load_kernel("webgpu-kernels/ai.onnx.Add", version=1)' in text


@pytest.mark.parametrize("version", [0, -1, 1.0, True, "1", "v1"])
def test_version_is_a_whole_number(version):
    with pytest.raises(CallError, match=r"^version is .*; expected a whole number, 1 or more$"):
        hub.fetch("webgpu-kernels/ai.onnx.Add", version=version)


@pytest.mark.parametrize(
    "revision", ["main", "v1", "0" * 39, "0" * 41, "g" * 40, "0" * 40 + "\n", 1]
)
def test_revision_is_a_commit(revision):
    with pytest.raises(CallError, match=r"^revision is .*; expected a commit's 40 hexadecimal"):
        hub.fetch("webgpu-kernels/ai.onnx.Add", revision=revision)


IDS = [
    "Add",
    "",
    "a/b/c",
    "kernels/ai.onnx.Add/",
    "../Add",
    "./Add",
    "a/..",
    "a b/c",
    "a/b\n",
    "á/b",
]
IDS += ["a--b/c", "a..b/c", "-a/b", "a/b.git", "a/" + "b" * 100, None, 3]


@pytest.mark.parametrize("id", IDS)
def test_malformed_ids(call, id):
    assert f"{id!r} is no repository id" in refused(call, CallError, id, version=1)


def test_client_that_is_missing_or_too_old(monkeypatch):
    def text():
        with pytest.raises(MissingExtraError) as caught:
            hub.fetch("webgpu-kernels/ai.onnx.Add", version=1)
        assert isinstance(caught.value, ImportError)
        return str(caught.value)

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert text().endswith("pip install 'jax-webgpu[hub]'")

    for name in ("huggingface_hub", "huggingface_hub.errors", "huggingface_hub.constants"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert "REPO_TYPE_KERNEL" in text() and text().endswith("pip install 'jax-webgpu[hub]'")
