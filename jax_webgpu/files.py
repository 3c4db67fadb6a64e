"""Reading a file of a folder that may come from a stranger."""

import os
import stat
from pathlib import Path


def read(folder: Path, name: str, limit: int, *, links: bool = False) -> bytes:
    """The bytes of a file.

    Args:
      folder: where it is.
      name: its name there.
      limit: the most bytes that it may have.
      links: whether it may be a link that leads out of the folder.

    Raises:
      OSError: there is none, or it cannot be read.
      ValueError: it is not a regular file, a link out of the folder, or too large.
    """
    path = os.path.realpath(folder / name)
    if not links and not Path(path).is_relative_to(os.path.realpath(folder)):
        raise ValueError("it is a link out of the folder")
    # Opening a pipe would wait for a writer; what is there now need not be what was looked at.
    flags = ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY")
    opened = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in flags))
    with os.fdopen(opened, "rb") as stream:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise ValueError("it is not a regular file")
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return data
