"""The code of the README and of `docs/` is run, and says what it prints."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_examples(run_snippet):
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed = re.findall(r"^It prints (?:the adapter it found, then )?`(.*?)`", README, re.M)
    result = run_snippet("\n".join([f"import os; os.chdir({str(ROOT)!r})", *examples]))
    assert result.returncode == 0, result.stderr
    adapter, *lines = result.stdout.splitlines()
    assert adapter
    assert lines == printed and len(printed) == 2


def test_fuse_example(run_snippet):
    text = (ROOT / "docs" / "fuse.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    result = run_snippet(example)
    assert result.returncode == 0, result.stderr
    assert "split, rotary_embedding, rotary_embedding" in result.stdout


def test_every_public_name_is_there():
    import jax_webgpu

    functions = [name for name in jax_webgpu.__all__ if name.islower()]
    assert [name for name in functions if f"`{name}(" not in README] == []
