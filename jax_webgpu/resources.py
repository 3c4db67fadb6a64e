"""Where the kernel specs and shader templates are.

In an installed wheel they lie inside the package; in a bare checkout, and so in an editable
install, beside it, at the top of the repository.
"""

import pathlib


def specs() -> pathlib.Path:
    """The folder of kernel specs, `*.json`."""
    return _find("specs")


def shaders() -> pathlib.Path:
    """The folder of shader templates, `*.wgsl.jinja`."""
    return _find("shaders")


def _find(name: str) -> pathlib.Path:
    package = pathlib.Path(__file__).resolve().parent
    installed, checkout = package / name, package.parent / name
    for folder in (installed, checkout):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"jax_webgpu finds no folder {name!r}: looked at {installed} (an installed package) "
        f"and at {checkout} (a checkout)"
    )
