"""`make cluster-tools`: the programs that `hosts.py` needs, installed where that is possible; else it says what lacks.

Never fails: without them the test of `ray up` is skipped, with the reason. Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.cluster.hosts import find, missing_packages


def main() -> None:
    """Install what is missing, on Debian and its like and as root."""
    missing = missing_packages()
    if not missing:
        return
    wanted = " ".join(missing)
    if os.geteuid() != 0 or find("apt-get") is None:
        print(f"cluster-tools: install {wanted} to have `ray up` tested (as root, with your package manager)")
        return
    print(f"cluster-tools: installing {wanted}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *missing]):
        done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"cluster-tools: apt-get {command[0]} failed: {done.stderr.strip()[-500:]}")
    if still := missing_packages():
        print(f"cluster-tools: still missing: {' '.join(still)}")


if __name__ == "__main__":
    main()
