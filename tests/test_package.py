"""What is shipped: the wheel and what it needs, the folders of specs, and who imports what."""

import ast
import email
import graphlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jax_webgpu
from jax_webgpu import resources

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jax_webgpu"
SPECS = ["ai.onnx.RotaryEmbedding.json", "ai.onnx.Split.json"]
OWN = ["jax_webgpu.RotaryEmbeddingPacked.json", "jax_webgpu.SplitPacked.json"]
OVERLAYS = [name.replace(".json", ".overlay.json") for name in SPECS]
OWN_SHADERS = [
    "rotary-embedding-items.wgsl.jinja",
    "rotary-embedding-output-items.wgsl.jinja",
    "rotary-embedding-packed.wgsl.jinja",
    "split-items.wgsl.jinja",
    "split-packed.wgsl.jinja",
]
SHADERS = [
    "datamove-flat-copy.wgsl.jinja",
    "datamove-split-block.wgsl.jinja",
    "rotary-embedding-output-vec4.wgsl.jinja",
    "rotary-embedding-quad.wgsl.jinja",
    "rotary-embedding.wgsl.jinja",
    "split-n.wgsl.jinja",
]


def output_of(*command: object, cwd: pathlib.Path) -> str:
    """What a command prints; its failure is the test's, with all that it said."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode and "connection broken" in done.stdout:  # pip's words
        pytest.skip("no package index can be reached from here")
    assert done.returncode == 0, done.stdout
    return done.stdout


# --- the wheel -----------------------------------------------------------------------------


def build(folder: pathlib.Path, source: pathlib.Path = ROOT) -> pathlib.Path:
    """Makes an sdist of a source, and a wheel from that sdist, by the installed hatchling."""
    output_of(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source), cwd=folder
    )
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with an sdist of the checkout, and a wheel made from that sdist."""
    return build(tmp_path_factory.mktemp("dist"))


@pytest.mark.promise("supply")
def test_wheel_holds_the_package_alone(dist):
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {name for name in names if ".dist-info/" not in name}

    assert wheel.name.startswith("jax_webgpu-") and wheel.name.endswith("-py3-none-any.whl")
    assert {name.split("/")[0] for name in shipped} == {"jax_webgpu"}
    assert {f"jax_webgpu/specs/{name}" for name in SPECS + OWN + OVERLAYS} <= shipped
    assert {f"jax_webgpu/shaders/{name}" for name in SHADERS + OWN_SHADERS} <= shipped
    assert "jax_webgpu/py.typed" in shipped
    assert shipped == {
        *(f"jax_webgpu/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")),
        *(f"jax_webgpu/specs/{path.name}" for path in (ROOT / "specs").iterdir()),
        *(f"jax_webgpu/shaders/{path.name}" for path in (ROOT / "shaders").iterdir()),
        "jax_webgpu/py.typed",
    }
    own = {name.split("/", 1)[1] for name in names if ".dist-info/" in name}
    assert own == {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE"}


def test_metadata_of_the_wheel(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    assert (metadata["Name"], metadata["Version"]) == ("jax-webgpu", jax_webgpu.__version__)
    assert metadata["Requires-Python"] == ">=3.11"
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert set(metadata.get_all("Provides-Extra")) == {*extras}
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    always = {str(each) for each in needed if each.marker is None}
    assert always == {str(Requirement(text)) for text in project["dependencies"]}
    assert not any(each.url for each in needed)
    assert "# jax_webgpu" in metadata.get_payload()


@pytest.mark.promise("supply")
def test_sdist_holds_what_git_does_and_nothing_else(dist):
    """But for the files of this checkout's own workings, whose names start with a point."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = [member for member in archive.getmembers() if not member.isdir()]
    assert all(member.isfile() and (member.uid, member.uname) == (0, "") for member in files)
    names = {member.name.partition("/")[2] for member in files}

    def listed(*options: str) -> set[str]:
        found = output_of("git", "ls-files", "--exclude-standard", *options, cwd=ROOT).splitlines()
        return {name for name in found if not name.startswith(".") and (ROOT / name).exists()}

    tops = {name.split("/")[0] for name in listed("--cached")}
    # What is about to be committed counts, but for a stray file beside the folders.
    expected = {name for name in listed("--cached", "--others") if name.split("/")[0] in tops}
    assert names == expected | {".gitignore", "PKG-INFO"}


@pytest.mark.promise("supply")
def test_two_builds_are_the_same_bytes(dist, tmp_path, monkeypatch):
    """Of copies made at another time, in another place, in the order that the disk has them."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    for path in source.rglob("*"):
        path.chmod(0o700 if path.is_dir() or path.name == "dev" else 0o600)
        os.utime(path, (1, 1_700_000_000))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1750000000")
    digests = []
    for number, origin in enumerate([ROOT, source]):
        folder = tmp_path / str(number)
        folder.mkdir()
        built = build(folder, origin).iterdir()
        digests.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in built})
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]


CALLS = """
import pathlib, sys

import jax_webgpu
import numpy as np

assert pathlib.Path(jax_webgpu.__file__).is_relative_to(sys.prefix), jax_webgpu.__file__

cos, sin = (np.asarray(table) for table in jax_webgpu.rotary_cache(8, 4))
x = np.linspace(-1, 1, 2 * 3 * 5 * 4, dtype=np.float32).reshape(2, 3, 5, 4)
positions = np.array([[0, 1, 2, 3, 4], [7, 6, 5, 4, 3]], np.int32)
y = jax_webgpu.rotary_embedding(x, cos, sin, positions)
a, b = x[..., :2], x[..., 2:]
c, s = cos[positions][:, None], sin[positions][:, None]
np.testing.assert_allclose(y, np.concatenate([a * c - b * s, b * c + a * s], -1), atol=1e-6)

parts = jax_webgpu.split(x, [1, 4], axis=2)
assert [part.shape for part in parts] == [(2, 3, 1, 4), (2, 3, 4, 4)]
np.testing.assert_array_equal(parts[0], x[:, :, :1])
np.testing.assert_array_equal(parts[1], x[:, :, 1:])
print("called both")
"""


@pytest.mark.promise("supply")
def test_wheel_runs_in_an_empty_environment(dist, tmp_path):
    """With what the wheel itself asks for and nothing else, called from another folder.

    Everything is installed at the version that the tests run with, so that pip has it cached.
    """
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    constraints = tmp_path / "constraints.txt"
    versions = {here.name: here.version for here in importlib.metadata.distributions()}
    versions.pop("jax-webgpu", None)
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))

    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", environment, "install", "--quiet"]
    pip += ["--disable-pip-version-check", "--no-compile", "--constraint", constraints]
    output_of(*pip, wheel, cwd=tmp_path)

    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert output_of(python, "-c", CALLS, cwd=elsewhere).endswith("called both\n")


IMPORT = """
import pathlib, sys

import jax_webgpu

assert not {"wgpu", "huggingface_hub"} & sys.modules.keys()
maps = pathlib.Path("/proc/self/maps")
assert not maps.exists() or "libvulkan" not in maps.read_text()

# JAX refuses this change once it has looked for devices.
import jax

jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count("cpu") == 3
print("imported")
"""


def test_import_takes_no_gpu():
    assert output_of(sys.executable, "-c", IMPORT, cwd=ROOT).endswith("imported\n")


# --- versions ------------------------------------------------------------------------------

LOCK = ROOT / ".ci" / "requirements.txt"


@pytest.mark.promise("supply")
def test_the_lock_has_a_version_and_a_hash_of_everything():
    """And nothing else: no addresses, of which a hash makes none better than another."""
    lines = LOCK.read_text().splitlines()
    locked = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", each) for each in locked)
    assert len(locked) > 40


@pytest.mark.promise("supply")
def test_the_lock_is_of_this_pyproject():
    """Else `./dev lock`."""
    locked = {}
    for line in LOCK.read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split()[0].split("==")
            locked[canonicalize_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["hub"], *extras["examples"]]
    for each in map(Requirement, wanted):
        if each.name != "jax-webgpu":
            assert each.specifier.contains(locked[canonicalize_name(each.name)]), each


@pytest.mark.promise("supply")
def test_the_lowest_versions_can_be_told():
    """`./dev` makes `==` of `>=`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert all(re.fullmatch(r"\w+>=[\d.]+", each) for each in project["dependencies"])


# --- specs and shaders ---------------------------------------------------------------------


def test_checkout_s_specs_and_shaders_are_found():
    assert resources.specs() == ROOT / "specs"
    assert resources.shaders() == ROOT / "shaders"
    assert sorted(path.name for path in resources.specs().iterdir()) == sorted(
        SPECS + OWN + OVERLAYS
    )
    assert sorted(path.name for path in resources.shaders().iterdir()) == sorted(
        SHADERS + OWN_SHADERS
    )


def test_missing_folder_names_both_places(monkeypatch, tmp_path):
    monkeypatch.setattr(resources, "__file__", str(tmp_path / "jax_webgpu" / "resources.py"))

    with pytest.raises(FileNotFoundError) as caught:
        resources.specs()
    assert str(tmp_path / "jax_webgpu" / "specs") in str(caught.value)
    assert str(tmp_path / "specs") in str(caught.value)


def test_installed_folder_comes_first(monkeypatch, tmp_path):
    monkeypatch.setattr(resources, "__file__", str(tmp_path / "jax_webgpu" / "resources.py"))
    (tmp_path / "shaders").mkdir()
    assert resources.shaders() == tmp_path / "shaders"

    (tmp_path / "jax_webgpu" / "shaders").mkdir(parents=True)
    assert resources.shaders() == tmp_path / "jax_webgpu" / "shaders"


@pytest.mark.parametrize("name", SPECS)
def test_spec_is_named_after_its_operator_and_has_its_shaders(name):
    spec = json.loads((ROOT / "specs" / name).read_text(encoding="utf-8"))

    assert f"{spec['domain']}.{spec['name']}.json" == name
    for variant in spec["variants"]:
        for step in variant["passes"]:
            assert step["shader"] in SHADERS, variant["id"]


# --- who imports what ----------------------------------------------------------------------
#
# The package has three layers. The first makes plans and needs neither JAX nor a GPU, the second
# runs them, the third teaches JAX to. A module that is not named here belongs to the first.

RUNNING = {"batch", "device", "driver", "group", "review", "runtime", "trial", "tuning"}
CALLING = {"", "__main__", "cli", "explain", "fuse", "ops", "primitive", "selftest"}


def modules() -> dict[str, pathlib.Path]:
    """Every module of the package, by its name below it; the package itself is ""."""
    paths = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    return {name.removesuffix("__init__").rstrip("."): path for name, path in paths.items()}


def layer(module: str) -> int:
    top = module.split(".")[0]
    return 2 if top in CALLING else 1 if top in RUNNING else 0


def imports(module: str, path: pathlib.Path) -> Iterator[str]:
    """The full name of all that a module imports, wherever in it the statement stands.

    `import jax` and then `jax.extend` counts as importing `jax.extend`.
    """
    package = ["jax_webgpu", *module.split(".")]
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                above = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*above, *filter(None, [node.module])])
                yield from (f"{source}.{alias.name}" for alias in node.names)
            case ast.Attribute(value=ast.Name(id="jax"), attr=attribute):
                yield f"jax.{attribute}"


IMPORTS = {module: sorted(set(imports(module, path))) for module, path in modules().items()}


def importers(*names: str) -> set[str]:
    """The modules that import one of these, or something inside it."""
    return {
        module
        for module, imported in IMPORTS.items()
        if any(f"{found}.".startswith(f"{name}.") for found in imported for name in names)
    }


def own_imports(module: str) -> set[str]:
    """The modules of the package that a module of it imports."""
    found = set()
    for name in IMPORTS[module]:
        if f"{name}.".startswith("jax_webgpu."):
            inner = name.removeprefix("jax_webgpu").removeprefix(".")
            found.add(inner if inner in IMPORTS else inner.rpartition(".")[0])
    return found - {module}


def test_one_module_imports_wgpu():
    assert importers("wgpu") == {"device"}


def test_two_modules_import_the_unstable_parts_of_jax():
    assert importers("jax.extend", "jax.interpreters", "jax.experimental") <= {"primitive", "fuse"}
    assert importers("jax._src") == set()


def test_jinja_s_trees_are_those_of_expressions_and_templates_and_nothing_else():
    assert importers("jinja2") == {"expressions", "grammar", "lint", "templates"}


def test_one_module_imports_the_hub_s_client():
    assert importers("huggingface_hub") == {"hub"}


def test_jax_is_imported_by_what_calls_it_alone():
    assert {module for module in importers("jax", "jaxlib") if layer(module) < 2} == set()


def test_no_module_imports_from_a_layer_below_it():
    below = {
        (module, imported)
        for module in IMPORTS
        for imported in own_imports(module)
        if layer(imported) > layer(module)
    }
    assert below == set()


def test_imports_make_no_circle():
    graphlib.TopologicalSorter({module: own_imports(module) for module in IMPORTS}).prepare()


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["hub"]
    declared = {requirement.split(">=")[0] for requirement in requirements}
    imported = {name.split(".")[0] for names in IMPORTS.values() for name in names}

    assert imported - set(sys.stdlib_module_names) - {"jax_webgpu"} <= declared
