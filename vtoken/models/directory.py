"""Publish a directory whole or not at all, with a manifest by which a later run recognises it.

    lock the parent -> sweep leftovers -> build in a hidden sibling -> write manifest -> rename onto the target

A killed run leaves at most a hidden sibling, which the next run sweeps away: it holds the lock, so whatever it finds is
dead.  The lock is on the parent directory itself, so no lock file stays behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vtoken.models.errors import ModelError
from vtoken.models.wheel import sha256_of

MANIFEST_NAME = "vtoken-manifest.json"
MANIFEST_VERSION = 1


def is_complete(target: Path, source: dict[str, Any]) -> bool:
    """True if `target` was published from exactly this `source` and every file still has its checksum."""
    manifest = _read_manifest(target)
    if manifest is None or manifest.get("source") != source:
        return False
    files: dict[str, str] = manifest["files"]
    return all((target / name).is_file() and sha256_of(target / name) == digest for name, digest in files.items())


@contextmanager
def publishing(target: Path, source: dict[str, Any]) -> Iterator[Path | None]:
    """Yield an empty directory to fill, or None if `target` is complete; at a clean exit it becomes `target`.

    If the body raises, `target` is as before and the half-made directory is gone.  A concurrent call for the same
    parent waits for this one, and then finds the target complete.

    Args:
        target: where the directory shall appear. Replaced if it carries our manifest, refused otherwise.
        source: what it is made from and how, as JSON values; written into the manifest.

    Raises:
        ModelError: `target` exists and was not made by us, or its parent cannot be written.
    """
    with _locked_parent(target):
        if is_complete(target, source):
            yield None
            return
        _refuse_foreign(target)
        _sweep(target)
        staging = _sibling(target, "new")
        staging.mkdir()
        try:
            yield staging
            _write_manifest(staging, source)
            _swap_in(staging, target)
        finally:
            _sweep(target)


@contextmanager
def _locked_parent(target: Path) -> Iterator[None]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target.parent, os.O_RDONLY)
    except OSError as error:
        raise ModelError(
            f"cannot use directory {target.parent}: {error.strerror}; choose another with --out"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sibling(target: Path, role: str) -> Path:
    """A name beside the target, so that the final rename never crosses file systems."""
    return target.with_name(f".{target.name}.{role}")


def _sweep(target: Path) -> None:
    for role in ("new", "old"):
        shutil.rmtree(_sibling(target, role), ignore_errors=True)


def _refuse_foreign(target: Path) -> None:
    if target.is_dir() and any(target.iterdir()) and not (target / MANIFEST_NAME).is_file():
        raise ModelError(f"{target} exists and was not made by prepare-model: remove it or choose another --out")
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target} is a file: remove it or choose another --out")


def _swap_in(staging: Path, target: Path) -> None:
    # A directory cannot be renamed over a non-empty one; between the two renames there is no target, never half of one.
    if target.exists():
        os.replace(target, _sibling(target, "old"))
    os.replace(staging, target)


def _write_manifest(directory: Path, source: dict[str, Any]) -> None:
    files = {path.name: sha256_of(path) for path in sorted(directory.iterdir())}
    manifest = {"version": MANIFEST_VERSION, "source": source, "files": files}
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    usable = isinstance(manifest, dict) and manifest.get("version") == MANIFEST_VERSION
    return manifest if usable and isinstance(manifest.get("files"), dict) else None
