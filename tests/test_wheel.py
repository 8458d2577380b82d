"""A wheel of this tree, installed where nothing else of it is, runs the demo and the compiled kernel."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distributions, version
from pathlib import Path

import pytest

from clearhead.kernels.extension import NOT_BUILT, native

ROOT = Path(__file__).parents[1]


def installed(name: str) -> bool:
    """By its metadata: Setuptools takes whoever looks for the module pip for pip, and leaves distutils as it is."""
    return any(True for _ in distributions(name=name))


MISSING = [name for name in ("scikit-build-core", "pip") if not installed(name)]
MISSING += [name for name in ("cmake", "ninja") if not (shutil.which(name) or importlib.util.find_spec(name))]
# what a plain installation brings: as here, so that the index is asked for little
BROUGHT = [f"{name}=={version(name)}" for name in ("numpy", "array-api-compat", "typer", "rich")]


def pip(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    # what built this interpreter's tools (cmake, ninja) lies beside them
    path = os.pathsep.join([str(Path(folder) / "bin") for folder in prefixes()] + [os.environ["PATH"]])
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path, **environment}, capture_output=True, text=True, check=False
    )


def prefixes() -> list[str]:
    """The environments whose packages are importable here."""
    return sorted({str(Path(entry).parents[2]) for entry in sys.path if Path(entry).name == "site-packages"})


@pytest.mark.skipif(bool(MISSING), reason=f"a wheel cannot be built without the index: {', '.join(MISSING)} missing")
@pytest.mark.skipif(bool(NOT_BUILT), reason="the compiled kernel cannot be built here")
@pytest.mark.skipif("CLEARHEAD_TEST_NATIVE" in os.environ, reason="another build is being tested")
def test_a_wheel_works_where_nothing_else_is(tmp_path: Path) -> None:
    # what the installation of this tree compiled is packed, not compiled again, which would take minutes
    settings = (f"cmake.define.CLEARHEAD_PREBUILT={native.__file__}", f"build-dir={tmp_path / 'build'}")
    chosen = [word for setting in settings for word in ("--config-settings", setting)]
    built = pip(
        "wheel", "--no-deps", "--no-build-isolation", *chosen, "--wheel-dir", str(tmp_path), ".", CIBUILDWHEEL="1"
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("clearhead/_native") for name in held), "without the compiled kernel"
    assert not [name for name in held if name.endswith((".cpp", ".h", ".pyc")) or name.startswith("tests")]
    assert wheel.stat().st_size < 4_000_000, f"{wheel.stat().st_size:,} bytes"

    place = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = str(place / ("Scripts" if os.name == "nt" else "bin") / "python")
    fetched = pip("--python", python, "install", "--quiet", *BROUGHT)
    if fetched.returncode != 0:
        pytest.skip(f"what clearhead needs cannot be fetched: {fetched.stderr.strip().splitlines()[-1:]}")
    installed = pip("--python", python, "install", "--quiet", "--no-index", str(wheel))
    assert installed.returncode == 0, installed.stderr

    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [python, str(ROOT / "tests" / "wheel_works.py")],
        cwd=tmp_path, env=clean, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the compiled kernel runs by" in done.stdout
    assert "the demo has" in done.stdout
