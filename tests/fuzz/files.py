"""The small files beside manifests, and the environment: `metadata.json`, `test.json`, tuning."""

import base64
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz import corpus, mutation
from fuzz.targets import RIGHT, Target, Wrong, documented
from jax_webgpu import config, device, folder, spec, trial, tuning
from jax_webgpu.errors import AdapterError, CallError, SpecError
from jax_webgpu.resolve import Tensor, resolve

TUNED = {
    "llvmpipe": {
        "RotaryEmbedding": {
            "float32": {"WORKGROUP_SIZE": 64, "BYTES_EACH": 32},
            "float16": {"WORKGROUP_SIZE": 128},
        },
        "Split": {"uint32": {"WORKGROUP_SIZE": 256}},
    }
}
ADAPTERS = tuple(
    device.AdapterInfo(index, name, kind, backend, driver, None)
    for index, (name, kind, backend, driver) in enumerate(
        [
            ("llvmpipe (LLVM 15.0.6, 256 bits)", "CPU", "Vulkan", "Mesa 22.3.6"),
            ("NVIDIA H200", "DiscreteGPU", "Vulkan", "570.10"),
            ("Strange", "Quantum", "OpenGL", ""),
        ]
    )
)


def _changed(*kinds: str) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {
            "kind": st.sampled_from(kinds),
            "seed": st.sampled_from(["add", "gelu", "matmul", "rms_norm", "scan", "softmax"]),
            "changes": mutation.changes(),
            "bytes": st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), max_size=2),
            "same": st.integers(0, 3),
        }
    )


VARIABLES = {
    "ADAPTER": ["", "", "0", "1", "2", "99", "-1", "h200", "llvm", "quantum", " "],
    "CALLBACK": ["", "", "pure", "buffer", "PURE", "0"],
    "REQUIRE_GPU": ["", "0", "1", "true", "yes", "2"],
    "POOL_BYTES": ["", "", "0", "1048576", "-1", "1e6", "nan", "9" * 5000],
    "TIMEOUT": ["", "", "0", "2.5", "-1", "inf", "nan", "1e999", "1 s"],
    "FEATURES": [
        "",
        "",
        "floor",
        "shader-f16",
        "subgroups,shader-f16",
        "floor,subgroups",
        ",",
        "f",
    ],
    "LIMITS": [
        *("", "", "floor", "maxBufferSize=268435456", "floor,maxBufferSize=1073741824", "a=1"),
        *(
            "maxBufferSize",
            "maxBufferSize=",
            "maxBufferSize=1e9",
            "maxBufferSize=-1",
            "=",
            "floor=",
        ),
    ],
}


def inputs() -> st.SearchStrategy[Any]:
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
    given = {name: st.sampled_from(likely) for name, likely in VARIABLES.items()}
    odd = {name: st.sampled_from(likely) | text for name, likely in VARIABLES.items()}
    environment = st.fixed_dictionaries(
        {
            "kind": st.just("environment"),
            "given": st.fixed_dictionaries({}, optional=given)
            | st.fixed_dictionaries({}, optional=odd),
        }
    )
    return _changed("metadata", "test", "tuned", "folder") | environment | environment


def _mutated(document: Any, value: dict[str, Any]) -> bytes:
    changed = mutation.apply(document, [] if _is_as_it_was(value) else value["changes"])
    data = bytearray(json.dumps(changed, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    for at, other in [] if _is_as_it_was(value) else value["bytes"]:
        place = at % (len(data) + 1)
        data[place : place + len(other)] = other
    return bytes(data)


def run(value: Any) -> str:
    return {
        "metadata": _metadata,
        "test": _test,
        "tuned": _tuned,
        "folder": _folder,
        "environment": _environment,
    }[value["kind"]](value)


def _is_as_it_was(value: Any) -> bool:
    return value["same"] == 0


def _metadata(value: Any) -> str:
    """Gives digests of 32 bytes for names in the folder, or a `SpecError` that names the file."""
    document = json.loads(corpus.seeds()[value["seed"]].others["metadata.json"])
    try:
        found = folder.parse(_mutated(document, value), "metadata.json")
    except Exception as error:
        if _is_as_it_was(value):
            raise Wrong("refused, and it is right") from error
        return documented(error, (SpecError,), ("metadata.json",))
    for name, digest in found.items():
        if len(digest) != 32 or not name or name.startswith(("/", "..")) or "/../" in name:
            raise Wrong(f"{name!r}: {digest!r}")
    return RIGHT if _is_as_it_was(value) else "parsed"


def _test(value: Any) -> str:
    """Gives cases whose arrays are of their shapes and dtypes, or a `SpecError` with a path."""
    seed = corpus.seeds()[value["seed"]]
    data = _mutated(json.loads(seed.others["test.json"]), value)
    files = folder.Folder(Path("k"), False, {"test.json": b""}, {"test.json": data})
    try:
        cases = trial.read(files)
    except Exception as error:
        if _is_as_it_was(value):
            raise Wrong("refused, and it is right") from error
        return documented(error, (SpecError,), ("k/test.json",))
    for case in cases:
        for array in (*case.inputs.values(), *case.outputs.values()):
            found = array.values
            if found is None:
                continue
            if found.shape != array.tensor.shape or str(found.dtype) != array.tensor.dtype:
                raise Wrong(f"{case.name}: {found.dtype}{found.shape} for {array.tensor}")
    if _is_as_it_was(value):
        return RIGHT
    loaded = _loaded(value["seed"])
    for case in cases[:3]:
        result = trial.attempt(loaded, case)
        str(result)
    return "tried"


@functools.cache
def _loaded(name: str) -> spec.Spec:
    seed = corpus.seeds()[name]
    return spec.loads(
        json.dumps(seed.manifest).encode(), Path("m.json"), seed.templates.__getitem__
    )


def _tuned(value: Any) -> str:
    """Gives whole numbers for tunables that there are, or a `CallError` that names the file."""
    data = _mutated(TUNED, value)
    path = Path.cwd() / "tuned.json"
    path.write_bytes(data)
    before = os.environ.get("JAX_WEBGPU_TUNED", "")
    os.environ["JAX_WEBGPU_TUNED"] = str(path)
    tuning.load.cache_clear()
    softmax = _loaded("softmax")
    call = resolve(softmax, {"x": Tensor((2, 3), "float32")})
    try:
        for adapter in (*tuning.load(), "llvmpipe", "other"):
            for name, found in tuning.found(call, adapter).items():
                if type(found) is not int or found < 1 or name not in tuning.CANDIDATES:
                    raise Wrong(f"{name} is {found!r}")
    except Exception as error:
        if _is_as_it_was(value):
            raise Wrong("refused, and it is right") from error
        return documented(error, (CallError,), ("tuned.json",))
    finally:
        os.environ["JAX_WEBGPU_TUNED"] = before
        tuning.load.cache_clear()
    return RIGHT if _is_as_it_was(value) else "parsed"


def _folder(value: Any) -> str:
    """A folder whose files are not those of its metadata is refused; else it loads."""
    seed = corpus.seeds()[value["seed"]]
    with tempfile.TemporaryDirectory() as made:
        path = Path(made)
        files = {**seed.templates, **seed.others, "manifest.json": _mutated(seed.manifest, value)}
        for name, data in files.items():
            (path / name).write_bytes(data)
        listed = json.loads(seed.others["metadata.json"])["digest"]["files"]
        digest = base64.b64encode(hashlib.sha256(files["manifest.json"]).digest()).decode()
        same = listed["manifest.json"] == digest
        try:
            opened = folder.read(path)
        except Exception as error:
            if same:
                raise Wrong("refused, and it is right") from error
            return documented(error, (SpecError,), ("manifest.json",))
        if not same:
            raise Wrong("the manifest is not what the metadata lists, and is read")
        return RIGHT if opened.read_bytes("manifest.json") == files["manifest.json"] else "other"


def _environment(value: Any) -> str:
    """Settings, or an error that names the variable."""
    given = {f"JAX_WEBGPU_{name}": text for name, text in value["given"].items()}
    before = {name: os.environ.pop(name, None) for name in _NAMES}
    os.environ.update(given)
    try:
        found = config.environment.__wrapped__()
        if found.callback not in (None, "pure", "buffer"):
            raise Wrong(f"callback {found.callback!r}")
        chosen = device.choose(ADAPTERS, found.adapter)
    except Exception as error:
        return documented(error, (CallError, AdapterError), _NAMES)
    finally:
        for name, own in before.items():
            os.environ.pop(name, None)
            if own is not None:
                os.environ[name] = own
    wanted = value["given"].get("ADAPTER", "").strip()
    if not wanted and chosen is not ADAPTERS[1]:
        raise Wrong(f"{chosen} is not the best")
    if wanted and wanted != str(chosen.index) and wanted.lower() not in str(chosen).lower():
        raise Wrong(f"{chosen} is not {wanted!r}")
    for name, text in value["given"].items():
        if text.strip() and text not in _TAKEN.get(name, (text,)):
            raise Wrong(f"{name} is {text!r}, and is taken")
    return RIGHT


_NAMES = tuple(f"JAX_WEBGPU_{name}" for name in VARIABLES)
# Of the likely values all that a variable may be.
_TAKEN = {
    "CALLBACK": ("pure", "buffer"),
    "FEATURES": ("floor", "shader-f16", "subgroups,shader-f16", ","),
}

TARGET = Target("files", 8, inputs, run)
