import argparse
import hashlib
import os
from pathlib import Path


def digest(path, block=1 << 20):
    state = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(block):
            state.update(chunk)
    return state.hexdigest()


def find_duplicates(root):
    by_size = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            if path.is_symlink() or not path.is_file():
                continue
            by_size.setdefault(path.stat().st_size, []).append(path)
    for size, paths in by_size.items():
        if size == 0 or len(paths) < 2:
            continue
        by_digest = {}
        for path in paths:
            by_digest.setdefault(digest(path), []).append(path)
        yield from (group for group in by_digest.values() if len(group) > 1)


parser = argparse.ArgumentParser(description="List files with the same content.")
parser.add_argument("root", type=Path, nargs="?", default=Path("."))
arguments = parser.parse_args()
for group in find_duplicates(arguments.root):
    print("\n".join(str(path) for path in sorted(group)), end="\n\n")
