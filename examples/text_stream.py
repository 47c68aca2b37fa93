"""A stream of text: the standard library's own source, line by line from many files, shuffled, sharded over workers.

    python examples/text_stream.py --workers 2

The four shards belong to the pipeline, not to the machine: what is printed is the same for any number of workers.
"""

import argparse
import hashlib
import json
import re
import sysconfig
from collections import Counter
from pathlib import Path

from pipes import batch, execute, filter, from_lines, map, pipe, shard_by_worker, shuffle_buffer

PACKAGES = ["asyncio", "email", "json"]


def words(lines: list[str]) -> Counter[str]:
    """Count the words of some lines: this runs in the workers."""
    return Counter(re.findall(r"[a-z]{4,}", " ".join(lines).lower()))


def main() -> None:
    """Count words, and stop and go on in the middle of a file."""
    options = argparse.ArgumentParser(description="Count the words of the standard library.")
    options.add_argument("--workers", type=int, default=2)
    args = options.parse_args()

    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for package in PACKAGES for path in (library / package).glob("*.py"))
    lines = pipe(from_lines(files), shard_by_worker(4), filter(str.strip), shuffle_buffer(1000), batch(500))
    pipeline = pipe(lines, map(words))

    with execute(pipeline, workers=args.workers, seed=1) as loader:
        counts = list(loader)
        total: Counter[str] = sum(counts, Counter())
        order = hashlib.sha256(json.dumps(counts).encode()).hexdigest()[:16]
        print(f"{len(files)} files, {len(counts)} batches, {total.total()} words; their order is {order}")
        print(", ".join(f"{word} {count}" for word, count in total.most_common(8)))
        assert sum(loader, Counter()) == total, "the next epoch has the same lines"

    with execute(pipeline, workers=args.workers, seed=1) as loader:
        for position, count in enumerate(loader):
            assert count == counts[position]
            if position == 20:
                break
        state = json.loads(json.dumps(loader.state_dict()))

    with execute(pipeline, workers=args.workers + 1) as loader:
        loader.load_state_dict(state)
        assert list(loader) == counts[21:], "nothing lost, nothing twice, in the same order"
    print("cut after 21 batches and gone on with one more worker: the same batches in the same order")


if __name__ == "__main__":
    main()
