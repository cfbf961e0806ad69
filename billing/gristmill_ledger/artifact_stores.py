"""Which artifact store the settings ask for, and where bodies of operations are kept beside it."""

from typing import Final

from gristmill_ledger.artifact_port import ArtifactStore
from gristmill_ledger.artifacts import LocalArtifactStore
from gristmill_ledger.artifacts_s3 import S3ArtifactStore, S3Location, s3_client
from gristmill_ledger.settings import LedgerSettings

BODIES: Final = ".bodies"
"""No tenant can be called so: what lies here is in no list of a tenant's artifacts."""
HEADS: Final = ".heads"


def artifact_store(settings: LedgerSettings) -> ArtifactStore | None:
    """Where checkpoints are kept; None = in a folder that all parts share. Raises OSError for missing files."""
    if settings.artifacts_url:
        return _bucket(settings, "")
    if settings.artifacts_dir is None:
        return None
    return LocalArtifactStore(
        root=settings.artifacts_dir, free_bytes_min=settings.artifacts_free_bytes_min
    )


def body_store(settings: LedgerSettings) -> ArtifactStore:
    """Where payloads and results of operations are kept: in the artifact store, else beside the database."""
    if settings.artifacts_url:
        return _bucket(settings, BODIES + "/")
    return LocalArtifactStore(
        root=(settings.artifacts_dir or settings.data_dir) / BODIES,
        free_bytes_min=settings.artifacts_free_bytes_min,
    )


def head_store(settings: LedgerSettings) -> ArtifactStore | None:
    """Where signed heads are copied to; None = nowhere."""
    if settings.chain_copies_dir is not None:
        return LocalArtifactStore(root=settings.chain_copies_dir, free_bytes_min=0)
    return _bucket(settings, HEADS + "/") if settings.artifacts_url else None


def _bucket(settings: LedgerSettings, below: str) -> S3ArtifactStore:
    bucket, _, folder = settings.artifacts_url.removeprefix("s3://").partition("/")
    prefix = folder.rstrip("/") + "/" if folder.rstrip("/") else ""
    access_key = secret_key = ""
    if settings.artifacts_credentials_dir is not None:
        access_key, secret_key = (
            (settings.artifacts_credentials_dir / name).read_text().strip()
            for name in ("access-key-id", "secret-access-key")
        )
    at = S3Location(
        bucket=bucket,
        prefix=prefix + below,
        endpoint=settings.artifacts_endpoint,
        region=settings.artifacts_region,
        access_key=access_key,
        secret_key=secret_key,
    )
    return S3ArtifactStore(client=s3_client(at), bucket=at.bucket, prefix=at.prefix)
