"""Kernel folders from the Hugging Face Hub; its client is imported here alone, and when called.

A repository of the type "kernel" holds one operator. Its contract version N is the branch ``vN``,
and the kernel folder is ``build/webgpu/`` in it. What the folder's ``metadata.json`` lists is
fetched and nothing else, by the client's own rules: its cache (``HF_HOME``), offline mode
(``HF_HUB_OFFLINE``), tokens (``HF_TOKEN``) and endpoint (``HF_ENDPOINT``).
"""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from jax_webgpu import folder
from jax_webgpu.errors import CallError, HubError, MissingExtraError, SpecError

FOLDER = PurePosixPath("build/webgpu")


def fetch(repo_id: str, *, version: int | None = None, revision: str | None = None) -> Path:
    """The local copy of a published kernel folder; what the cache lacks of it is downloaded.

    The files are not verified yet: `folder.read(path, fetched=True)` does that.

    Args:
      repo_id: owner and name, such as ``"webgpu-kernels/ai.onnx.Add"``.
      version: the version of the kernel's contract; the Hub is asked for its newest state.
      revision: in place of a version, a commit's 40 hexadecimal digits: always the same files,
        and once they are cached the Hub is not asked.

    Raises:
      CallError: an argument is not as described, or not one of `version` and `revision` is given.
      MissingExtraError: the Hub's client is not installed, or is too old.
      HubError: the Hub cannot be reached, or has no such repository, version or file for this
        user; the client's own error is its cause.
      SpecError: the metadata cannot be made out, or the files are larger than `folder` reads.
    """
    repository = _repository(repo_id, version, revision)
    metadata, _ = repository.download(
        folder.METADATA, repository.revision, limit=folder.MAX_METADATA
    )
    digests = folder.parse(metadata.read_bytes(), f"{repository}: {folder.METADATA}")
    # The cache keeps a folder for each commit: a branch that moves meanwhile does not mix two.
    commit, left = metadata.parents[len(FOLDER.parts)].name, folder.MAX_BYTES
    for name in digests:
        _, size = repository.download(name, commit, limit=left)
        left -= size
    return metadata.parent


@dataclass(frozen=True)
class _Repository:
    """A repository at a branch or a commit, and how it is asked for files."""

    id: str
    revision: str
    client: Any
    """The module `huggingface_hub`."""

    def __str__(self) -> str:
        return f"{self.id} at {self.revision}"

    def download(self, name: str, revision: str, *, limit: int) -> tuple[Path, int]:
        """A file of the folder, in the cache, and its size."""
        file = {
            "repo_id": self.id,
            "repo_type": self.client.constants.REPO_TYPE_KERNEL,
            "filename": str(FOLDER / name),
            "revision": revision,
        }
        try:
            size = self.client.hf_hub_download(**file, dry_run=True).file_size or 0
            if size <= limit:
                return Path(self.client.hf_hub_download(**file)), size
        except self.client.errors.HFValidationError as error:
            raise CallError(f"{self.id!r} is no repository id: {error}") from None
        except Exception as error:  # the client's own, its HTTP library's or the file system's
            raise HubError(f"{self}: {name}: {self.reason(error)}") from error
        raise SpecError(f"{self}: {name} has {size:,} bytes; {limit:,} are left for it")

    def reason(self, error: Exception) -> str:
        """What went wrong, in a line."""
        errors = self.client.errors
        match error:
            case errors.GatedRepoError():
                return "its owner asks for terms to be accepted on the Hub; then set HF_TOKEN"
            case errors.RepositoryNotFoundError():
                return "the Hub has no such kernel for this user; check the id, or set HF_TOKEN"
            case errors.RevisionNotFoundError():
                return f"the Hub has no such revision; the kernel's versions: {self.versions()}"
            case errors.LocalEntryNotFoundError() if self.client.is_offline_mode():
                return "it is not in the cache, and HF_HUB_OFFLINE is set"
            case errors.LocalEntryNotFoundError():
                return f"it is not in the cache, nor to be had: {_line(error.__cause__ or error)}"
            case errors.EntryNotFoundError():
                return f"there is no such file in {FOLDER}/"
        return _line(error)

    def versions(self) -> str:
        """The repository's versions, as far as the Hub tells."""
        names: list[str] = []
        with contextlib.suppress(Exception):  # on the way to an error of its own
            refs = self.client.HfApi().list_repo_refs(
                self.id, repo_type=self.client.constants.REPO_TYPE_KERNEL
            )
            names = [each.name for each in refs.branches]
        numbers = sorted(int(name[1:]) for name in names if re.fullmatch(r"v[1-9][0-9]{0,8}", name))
        return ", ".join(map(str, numbers)) or "unknown"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _repository(repo_id: Any, version: Any, revision: Any) -> _Repository:
    """What `fetch` was called with, checked."""
    if not isinstance(repo_id, str) or not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id, re.ASCII):
        raise CallError(
            f"{repo_id!r} is no repository id; expected owner and name, such as "
            "'webgpu-kernels/ai.onnx.Add'"
        )
    if (version is None) == (revision is None):
        given = "neither" if version is None else "both"
        raise CallError(
            f"{repo_id} is no folder here, and on the Hub it needs a version or a revision; got "
            f'{given}. Write load_kernel("{repo_id}", version=1), or in place of the version '
            'revision="…" with the 40 digits of a commit'
        )
    if revision is None:
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise CallError(f"version is {version!r}; expected a whole number, 1 or more")
    elif not isinstance(revision, str) or not re.fullmatch(r"[0-9a-fA-F]{40}", revision):
        raise CallError(f"revision is {revision!r}; expected a commit's 40 hexadecimal digits")
    try:
        import huggingface_hub.errors
        from huggingface_hub.constants import REPO_TYPE_KERNEL  # noqa: F401 (too old without it)
    except ImportError as error:
        raise MissingExtraError(
            f"{repo_id} is on the Hub, whose client is missing or too old: {error}; "
            "pip install 'jax-webgpu[hub]'"
        ) from error
    return _Repository(
        repo_id, f"v{version}" if revision is None else revision.lower(), huggingface_hub
    )
