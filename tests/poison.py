"""Poison: memory that a result comes from is filled with NaNs before it is used.

What a kernel or a copy leaves unwritten comes out as these. They are NaNs whether they are read as
float32, float16 or bfloat16, of another payload each time, so that two calls differ wherever one of
them read what it had not written.
"""

import contextlib
import itertools
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_webgpu import device, group, primitive, runtime

_numbers = itertools.count()


class Poison:
    """What was filled while it was in force.

    Attributes:
      words: the 32-bit words that were used.
      counts: of fills, by what was filled.
    """

    def __init__(self) -> None:
        self.words: list[int] = []
        self.counts: Counter[str] = Counter()

    def word(self, what: str) -> int:
        """Another one each time: 0x7f81 to 0x7fff in both halves."""
        number = next(_numbers)
        found = (0x7F81 + number * 37 % 0x7F) << 16 | (0x7F81 + number % 0x7F)
        self.words.append(found)
        self.counts[what] += 1
        return found

    def fill(self, array: np.ndarray, what: str) -> None:
        """Fills a writable array, whatever its dtype and strides."""
        if array.size:
            size = array.itemsize
            pattern = np.frombuffer(np.uint32(self.word(what)).tobytes() * -(-size // 4), np.uint8)
            value = np.frombuffer(pattern[:size].tobytes(), f"V{size}")
            array.view(f"V{size}")[...] = value

    def survives(self, array: Any) -> bool:
        """Whether some word of a result, wherever it begins, is poison."""
        data = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
        words = data[: data.size // 4 * 4].view(np.uint32)
        return bool(np.isin(words, np.asarray(self.words, np.uint32)).any())


def _numpy(poison: Poison) -> types.SimpleNamespace:
    """NumPy, whose `empty` is full of poison."""

    def empty(shape: Any, dtype: Any = float) -> np.ndarray:
        made = np.empty(shape, dtype)
        poison.fill(made, "host arrays")
        return made

    return types.SimpleNamespace(**{**vars(np), "empty": empty})


@contextlib.contextmanager
def poisoned() -> Iterator[Poison]:
    """Fills all memory of the device's pool as it is taken, and all arrays of results.

    Those are XLA's own, which a callback gets to write to, and those that we make.
    """
    poison = Poison()
    acquire, dispatch, run = (
        device._Pool.acquire,
        runtime.Dispatcher.__call__,
        group.Runner.__call__,
    )

    def acquired(pool: Any, size: int, usage: int, *, mapped: bool = False) -> Any:
        memory = acquire(pool, size, usage, mapped=mapped)
        word = np.full(memory.size // 4, poison.word("device buffers"), np.uint32)
        if mapped:  # memory to upload from: idle means mapped
            memory.write(word.view(np.uint8), 0)
        else:
            pool.driver.send(memory.buffer, word)
        return memory

    def dispatched(
        self: Any, arrays: Any, outputs: Any = None, place: int = 0
    ) -> tuple[np.ndarray, ...]:
        for output in outputs or ():
            poison.fill(output, "results")
        return dispatch(self, arrays, outputs, place)

    def ran(self: Any, outputs: Any, inputs: Any) -> None:
        for output in outputs:
            poison.fill(output, "results")
        run(self, outputs, inputs)

    numpy = _numpy(poison)
    places = {
        (device._Pool, "acquire"): acquired,
        (runtime.Dispatcher, "__call__"): dispatched,
        (group.Runner, "__call__"): ran,
        (runtime, "np"): numpy,
        (primitive, "np"): numpy,
        (group, "np"): numpy,
    }
    before = {place: getattr(*place) for place in places}
    for (owner, name), value in places.items():
        setattr(owner, name, value)
    try:
        yield poison
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
