"""The node's images: pause, a bare Python, and ours, all five from three layers.

The layers are the interpreter of this machine, the packages that our extras name at the pinned versions, and
our wheel. The first two are imported once as a base; a change of our code makes a new third layer of a few
megabytes. torch and transformers are in no image: a worker reads them from a volume, see `package_folders`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

import cache
import oci
import python_layer
from parts import ENVIRONMENT, GROUP, PARTS, REGISTRY, Part
from plan import HERE, ROOT

PAUSE = f"{REGISTRY}/pause:1"
PYTHON = f"{REGISTRY}/python:1"
PACKAGES = f"{REGISTRY}/packages:1"  # holds the second layer while no part's image is imported
FROM_VOLUME = ("torch", "transformers")
CONSTRAINTS = ROOT / "requirements/constraints.txt"
PROJECT = ROOT / "pyproject.toml"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = Path(f"usr/local/lib/python{VERSION}/site-packages")


def built(programs: Path) -> tuple[Path, ...]:
    """The archives to import, in this order: the base, then the one with our code."""
    return base_archive(programs) / "base.tar", code_archive() / "gristmill.tar"


def pinned_references(archives: tuple[Path, ...]) -> dict[str, str]:
    """name:tag -> name@digest of all that the archives hold."""
    return {
        reference: oci.pinned(reference, digest)
        for archive in archives
        for reference, digest in oci.references(archive).items()
    }


# --- archives


def base_archive(programs: Path) -> Path:
    def make(folder: Path) -> None:
        pause = pause_layer(programs, folder / "pause.layer")
        layers = base_layers()
        python = {"Entrypoint": ["python"], "WorkingDir": "/tmp", "Env": environment()}
        images = [
            oci.Image(reference=PAUSE, layers=[pause], config={"Entrypoint": ["/pause"]}),
            oci.Image(reference=PYTHON, layers=layers[:1], config=python),
            oci.Image(reference=PACKAGES, layers=layers, config=python),
        ]
        oci.write_archive(folder / "base.tar", images)
        pause.path.unlink()

    return cache.made(
        "base", cache.key_of(own_sources(), programs.name, python_key(), packages_key()), make
    )


def code_archive() -> Path:
    def make(folder: Path) -> None:
        code = code_layer(folder / "code.layer")
        base = base_layers()
        images = [
            oci.Image(reference=p.reference, layers=[*base, code], config=config(p)) for p in PARTS
        ]
        oci.write_archive(folder / "gristmill.tar", images, leave_out=base)
        code.path.unlink()

    return cache.made(
        "code", cache.key_of(code_sources(), python_key(), packages_key(), repr(PARTS)), make
    )


def config(part: Part) -> dict[str, object]:
    return {
        "Entrypoint": part.entry_point,
        "User": f"{part.user}:{GROUP}",
        "WorkingDir": "/tmp",
        "Env": environment(),
    }


def environment() -> list[str]:
    path = "/usr/local/bin:/usr/bin:/bin"
    return [f"PATH={path}", *(f"{name}={value}" for name, value in ENVIRONMENT.items())]


# --- layers


def base_layers() -> list[oci.Layer]:
    python = cache.made("python", python_key(), lambda folder: _layer(folder, python_layer.fill))
    packages = cache.made("packages", packages_key(), lambda folder: _layer(folder, fill_packages))
    return [oci.read_layer(folder / "layer.tar") for folder in (python, packages)]


def _layer(folder: Path, fill: python_layer.Fill) -> None:
    with tempfile.TemporaryDirectory(dir=cache.root()) as stage:
        fill(Path(stage))
        oci.write_layer(Path(stage), folder / "layer.tar")


def pause_layer(programs: Path, path: Path) -> oci.Layer:
    with tempfile.TemporaryDirectory(dir=cache.root()) as stage:
        target = Path(stage) / "pause"
        target.write_bytes((programs / "pause").read_bytes())
        target.chmod(0o755)
        return oci.write_layer(Path(stage), path)


def code_layer(path: Path) -> oci.Layer:
    """Our wheel, as pip would install it."""
    with tempfile.TemporaryDirectory(dir=cache.root()) as scratch:
        wheels, stage = Path(scratch) / "wheels", Path(scratch) / "stage"
        pip(
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            f"--wheel-dir={wheels}",
            str(ROOT),
            tools=build_tools(),
        )
        (wheel,) = wheels.glob("gristmill-*.whl")
        pip("install", "--no-deps", "--no-compile", f"--target={stage / SITE}", str(wheel))
        python_layer.compile_bytes(stage, SITE)
        return oci.write_layer(stage, path)


def fill_packages(stage: Path) -> None:
    pip(
        "install",
        "--no-compile",
        f"--target={stage / SITE}",
        f"--constraint={CONSTRAINTS}",
        *requirements(),
    )
    python_layer.compile_bytes(stage, SITE)


def requirements() -> list[str]:
    """What the extras of all parts name, but for the packages that come by volume."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    named = {*project["dependencies"], *(line for part in PARTS for line in extras[part.name])}
    return sorted(line for line in named if not line.startswith(FROM_VOLUME))


def build_tools() -> Path:
    """The wheel's build backend, kept: a change of our code then needs no package index."""
    wanted = tomllib.loads(PROJECT.read_text())["build-system"]["requires"]
    key = cache.key_of([], sys.version, *wanted)
    return cache.made("tools", key, lambda folder: pip("install", f"--target={folder}", *wanted))


def pip(*arguments: str, tools: Path | None = None) -> None:
    verb, *rest = arguments
    command = [sys.executable, "-m", "pip", verb, "-q", "--disable-pip-version-check", *rest]
    environment = {**os.environ, **({"PYTHONPATH": str(tools)} if tools else {})}
    subprocess.run(command, check=True, env=environment)


# --- what they are made from


def own_sources() -> list[Path]:
    return [HERE / name for name in ("images.py", "oci.py", "python_layer.py", "parts.py")]


def python_key() -> str:
    return cache.key_of([HERE / "python_layer.py", HERE / "oci.py"], sys.version, sys.base_prefix)


def packages_key() -> str:
    return cache.key_of(
        [CONSTRAINTS, HERE / "python_layer.py", HERE / "oci.py"], sys.version, *requirements()
    )


def code_sources() -> list[Path]:
    """All that the wheel is made from, and what makes an image of it."""
    wheel = tomllib.loads(PROJECT.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    files = [
        path
        for package in wheel["packages"]
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return [*files, PROJECT, *own_sources()]


def package_folders() -> tuple[Path, ...]:
    """Where this machine's Python finds the packages that come by volume."""
    folders = [Path(sysconfig.get_path("purelib"))]
    for name in FROM_VOLUME:
        where = [
            sys.executable,
            "-c",
            f"import importlib.util as u; print(u.find_spec('{name}').origin)",
        ]
        origin = subprocess.run(where, check=True, capture_output=True, text=True).stdout
        folder = Path(origin.strip()).parents[1]
        if folder not in folders:
            folders.append(folder)
    return tuple(folders)
