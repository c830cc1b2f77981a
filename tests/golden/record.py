"""Writes the golden records of this kind of machine: `python -m tests.golden.record [PART ...]`.

With arguments, only cases whose names contain one of them are recorded, such as `toy-eager` or `-lantern++`. Other
records are kept.
"""

import sys
import time

from tests.golden import adapter
from tests.golden.cases import cases, key, read, write


def main(wanted: list[str]) -> None:
    known = {str(case) for case in cases()}
    records = read()
    mine = {name: entry for name, entry in records.get(key(), {}).items() if name in known}
    for case in cases():
        if wanted and not any(part in str(case) for part in wanted):
            continue
        begun = time.perf_counter()
        mine[str(case)] = adapter.decode(*case)
        write(records | {key(): mine})
        print(f"{case}: {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
