"""OCI images without a container engine: layers as plain tar files, several images in one archive.

Layers are reproducible: sorted, owned by root, without times. An archive may leave out layers that the
reader has already ("thin"): a change of our code then moves two megabytes, not two hundred.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = "io.containerd.image.name"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    path: Path
    digest: str  # sha256:...
    size: int  # bytes

    @property
    def descriptor(self) -> dict[str, object]:
        return {"mediaType": LAYER, "digest": self.digest, "size": self.size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    reference: str  # name:tag
    layers: Sequence[Layer]
    config: Mapping[str, object]  # Entrypoint, Env, User and so on


def write_layer(root: Path, path: Path) -> Layer:
    """Everything below root as one tar."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    with tarfile.open(new, "w", format=tarfile.PAX_FORMAT) as tar:
        for item in sorted(root.rglob("*")):
            tar.add(item, str(item.relative_to(root)), recursive=False, filter=_nobodys)
    new.replace(path)
    return read_layer(path)


def read_layer(path: Path) -> Layer:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Layer(path=path, digest=f"sha256:{digest}", size=path.stat().st_size)


def _nobodys(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    if info.isfile():
        info.mode = 0o755 if info.mode & 0o100 else 0o644
    elif info.isdir() and not info.mode & 0o1000:
        info.mode = 0o755
    return info


def write_archive(path: Path, images: Sequence[Image], leave_out: Sequence[Layer] = ()) -> None:
    """All images in one archive that `ctr images import` takes."""
    blobs: dict[str, bytes | Path] = {}
    manifests = []
    for image in images:
        config = _json({**_platform(), "config": image.config, "rootfs": _rootfs(image.layers)})
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": CONFIG, "digest": _digest(config), "size": len(config)},
                "layers": [layer.descriptor for layer in image.layers],
            }
        )
        blobs |= {_digest(config): config, _digest(manifest): manifest}
        blobs |= {layer.digest: layer.path for layer in image.layers if layer not in leave_out}
        manifests.append(_entry(image.reference, manifest))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    with tarfile.open(new, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(
            tar,
            "index.json",
            _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}),
        )
        for digest, content in blobs.items():
            _add(tar, f"blobs/sha256/{digest.removeprefix('sha256:')}", content)
    new.replace(path)


def references(archive: Path) -> dict[str, str]:
    """name:tag -> digest of every image in the archive."""
    with tarfile.open(archive) as tar:
        stream = tar.extractfile("index.json")
        if stream is None:
            raise ValueError(f"{archive} has no index.json: it is no OCI archive")
        index = json.load(stream)
    return {entry["annotations"][NAME]: entry["digest"] for entry in index["manifests"]}


def pinned(reference: str, digest: str) -> str:
    """`name@sha256:...` of a `name:tag`."""
    return f"{reference.rpartition(':')[0]}@{digest}"


def _entry(reference: str, manifest: bytes) -> dict[str, object]:
    tag = reference.rpartition(":")[2]
    return {
        "mediaType": MANIFEST,
        "digest": _digest(manifest),
        "size": len(manifest),
        "platform": _platform(),
        "annotations": {NAME: reference, "org.opencontainers.image.ref.name": tag},
    }


def _platform() -> dict[str, str]:
    machine = os.uname().machine
    return {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
        "os": "linux",
    }


def _rootfs(layers: Sequence[Layer]) -> dict[str, object]:
    return {"type": "layers", "diff_ids": [layer.digest for layer in layers]}


def _json(content: object) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _add(tar: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    info = tarfile.TarInfo(name)
    if isinstance(content, bytes):
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
        return
    info.size = content.stat().st_size
    with content.open("rb") as stream:
        tar.addfile(info, stream)


def copy_tree(source: Path, target: Path, leave_out: Sequence[str] = ()) -> None:
    """A tree as it is, links as links, without what compilers and tests leave behind."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.a", *leave_out)
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=ignored)
