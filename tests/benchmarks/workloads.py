"""The workloads that the benchmarks share: map-style data sets that cost what real ones cost."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


class Rows:
    """Tiny rows: 16 floats and a label."""

    def __init__(self, size: int = 200_000) -> None:
        self.x = np.random.default_rng(0).random((size, 16), np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.x[i], i % 10


class Images:
    """Images of 3x224x224 in memory."""

    def __init__(self, dtype: str, size: int = 64 * 60, distinct: int = 256) -> None:
        self.x = (np.random.default_rng(0).random((distinct, 3, 224, 224), np.float32) * 255).astype(dtype)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.x[i % len(self.x)], i % 1000


class Tokens:
    """Windows of 2048 tokens of a memory-mapped file."""

    def __init__(self, size: int = 32 * 400, window: int = 2048) -> None:
        path = Path(tempfile.mkdtemp()) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, window * 4096, np.int64).tofile(path)
        self.tokens = np.memmap(path, np.int64, "r")
        self.size, self.window = size, window

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        start = (i * 7919) % (len(self.tokens) - self.window)
        return np.array(self.tokens[start : start + self.window])


class Jpegs:
    """JPEG files of 320x240, decoded with Pillow to 3x224x224."""

    def __init__(self, size: int = 1600, distinct: int = 64) -> None:
        from PIL import Image

        rng = np.random.default_rng(0)
        self.files = []
        for _ in range(distinct):
            noise = Image.fromarray(rng.integers(0, 255, (30, 40, 3), np.uint8)).resize((320, 240))
            file = io.BytesIO()
            noise.save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Any, int]:
        from PIL import Image

        image = Image.open(io.BytesIO(self.files[i % len(self.files)])).convert("RGB").resize((224, 224))
        return np.asarray(image).transpose(2, 0, 1), i % 1000


class Fields:
    """Dicts of 20 small arrays."""

    def __init__(self, size: int = 128 * 120) -> None:
        self.x = np.random.default_rng(0).random((size, 20, 8), np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = self.x[i]
        return {f"field{j}": row[j] for j in range(20)}
