"""The key that signs heads: a file of its own, made on first start where the ledger has a folder."""

import logging
import os
from pathlib import Path

from gristmill_contracts.chain.notes import (
    SigningKey,
    VerifierKey,
    new_key_pem,
    parse_keys,
    read_key_pem,
)  # fmt: skip
from gristmill_ledger.settings import LedgerSettings

log = logging.getLogger(__name__)
KEY_FILE = "chain-key.pem"


def open_key(settings: LedgerSettings) -> SigningKey | None:
    """The key of the settings; None = heads are not signed, for PostgreSQL needs one that is given.

    Raises OSError or ValueError for a file that cannot be read or holds no key.
    """
    path = _path(settings)
    if path is None:
        log.warning("chain_unsigned", extra={"remedy": "set chain_key_file"})
        return None
    if settings.chain_key_file is None:
        _make(path)
    return read_key_pem(path.read_bytes(), settings.chain_name)


def existing_key(settings: LedgerSettings) -> SigningKey | None:
    """As `open_key`, and None where no key was made yet."""
    path = _path(settings)
    if path is None or (settings.chain_key_file is None and not path.exists()):
        return None
    return read_key_pem(path.read_bytes(), settings.chain_name)


def told_keys(own: SigningKey | None, old: str) -> list[VerifierKey]:
    """The keys that heads of this ledger are signed with: today's, and those before it."""
    keys = [] if own is None else [own.verifier]
    return keys + [key for key in parse_keys(old) if key not in keys]


def _path(settings: LedgerSettings) -> Path | None:
    if settings.chain_key_file is not None:
        return settings.chain_key_file
    return None if settings.url.startswith("postgresql") else _beside(settings) / KEY_FILE


def _beside(settings: LedgerSettings) -> Path:
    """The folder of the SQLite file."""
    return Path(settings.url.partition("///")[2]).parent


def _make(path: Path) -> None:
    """Write a new key unless there is one. Nobody else may read it, from the first byte on."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(new_key_pem())
        file.flush()
        os.fsync(file.fileno())
    try:
        # Not `replace`: a process that starts beside us may have been first.
        os.link(fresh, path)
        log.info("chain_key_made", extra={"path": str(path)})
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
