"""The ledger's settings: environment variables `GRISTMILL_LEDGER_*`, read once in `__main__`."""

from pathlib import Path
from typing import Final, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gristmill_contracts import limits
from gristmill_contracts.chain.notes import parse_keys
from gristmill_contracts.errors import InvalidRequestError

ENV_PREFIX: Final = "GRISTMILL_LEDGER_"


class LedgerSettings(BaseSettings):
    """A field is set by its upper-case name behind the prefix, as in GRISTMILL_LEDGER_PORT."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on. Without cluster_key_file anybody who reaches it is trusted."""
    port: int = Field(default=8460, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one, which the log names."""
    data_dir: Path = Path("gristmill-data")
    """Folder of the SQLite file. Not used when database_url is set."""
    database_url: str = ""
    """sqlite:////absolute/path or postgresql://user@host/name. Empty: ledger.sqlite3 in data_dir."""
    database_url_file: Path | None = None
    """File that holds the database_url, such as a mounted secret. Not with database_url."""
    cluster_key_file: Path | None = None
    """File of the cluster's key, 32 bytes. With it callers must show a secret that derives from it."""
    chain_key_file: Path | None = None
    """File of the Ed25519 key (PEM) that signs heads. Not set: made beside the SQLite file; none with PostgreSQL."""
    chain_name: str = "gristmill"
    """Name of that key in signed heads: one for each ledger, without spaces and plus signs."""
    chain_old_keys: str = ""
    """Verifier keys that heads were signed with before that one, with spaces between. The ledger tells them too."""
    chain_copies_dir: Path | None = None
    """Folder on another volume that signed heads are copied to. Not set: the bucket of artifacts_url, if any."""
    artifacts_dir: Path | None = None
    """Folder of the artifact store. Not set: checkpoints stay in a folder that all parts share."""
    artifacts_url: str = Field(
        default="", pattern=r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/]+)*/?)?$"
    )
    """s3://bucket/prefix in place of artifacts_dir: the store is in a bucket of an S3-compatible service."""
    artifacts_endpoint: str = Field(default="", pattern="^(https?://.+)?$")
    """Address of that service. Empty: Amazon's own."""
    artifacts_region: str = "us-east-1"
    """Region of the bucket."""
    artifacts_credentials_dir: Path | None = None
    """Folder with the files access-key-id and secret-access-key, such as a mounted secret. Not set: what
    the AWS SDK finds by itself: a role, variables, files."""
    artifacts_free_bytes_min: int = Field(default=limits.ARTIFACT_FREE_BYTES_MIN, ge=0)
    """Uploads are refused when the store's volume has less than this left."""
    busy_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """How long a statement waits for a lock of another process before the caller is told to retry."""
    readers: int = Field(default=4, ge=1, le=64)
    """Threads, and database connections, that answer queries. Writes have one thread."""
    writes_pending_max: int = Field(default=limits.LEDGER_WRITES_PENDING_MAX, ge=1)
    """Writes that may wait for the writer; past it 429."""
    price_book: str = "default"
    """The price book that usage is shown with."""
    shutdown_s: int = Field(default=10, ge=1, le=600)
    """How long open requests may take to end after SIGTERM."""
    shutdown_delay_s: float = Field(default=0.0, ge=0, le=600)
    """How long new requests are still served after SIGTERM, while others learn to go elsewhere."""
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")

    @field_validator("chain_old_keys")
    @classmethod
    def _are_keys(cls, text: str) -> str:
        try:
            parse_keys(text)
        except InvalidRequestError as error:
            raise ValueError(error.message) from error
        return text

    @model_validator(mode="after")
    def _one_url(self) -> Self:
        if self.database_url and self.database_url_file is not None:
            raise ValueError("database_url and database_url_file are both set; keep one")
        return self

    @model_validator(mode="after")
    def _one_store(self) -> Self:
        if self.artifacts_url and self.artifacts_dir is not None:
            raise ValueError("artifacts_url and artifacts_dir are both set; keep one")
        if not self.artifacts_url and (
            self.artifacts_endpoint or self.artifacts_credentials_dir is not None
        ):
            raise ValueError(
                "artifacts_endpoint or artifacts_credentials_dir without artifacts_url"
            )
        return self

    @property
    def url(self) -> str:
        """Where the database is, with the default filled in. Raises OSError for a missing file."""
        if self.database_url_file is not None:
            return self.database_url_file.read_text().strip()
        return self.database_url or f"sqlite:///{self.data_dir.resolve() / 'ledger.sqlite3'}"
