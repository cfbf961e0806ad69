"""How the command line shows itself to the ledger: by the cluster's key, where there is one."""

from dataclasses import dataclass
from pathlib import Path

from gristmill_cli.errors import CommandError
from gristmill_contracts.http import SERVICE_HEADER
from gristmill_contracts.secrets import CLUSTER_KEY_BYTES, service_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAccess:
    """Where the ledger is, and the headers of every call."""

    url: str
    headers: dict[str, str]


def ledger_access(url: str, key_file: Path | None) -> LedgerAccess:
    """Raises CommandError if the key cannot be read. No key: a ledger that trusts everybody."""
    url = url.rstrip("/")
    if key_file is None:
        return LedgerAccess(url=url, headers={})
    try:
        key = key_file.read_bytes()
    except OSError as error:
        raise CommandError(f"the cluster's key {key_file} cannot be read: {error}") from error
    if len(key) != CLUSTER_KEY_BYTES:
        raise CommandError(
            f"the cluster's key {key_file} has {len(key)} bytes, not {CLUSTER_KEY_BYTES}; it is the entry "
            "cluster.key of the Secret gristmill-cluster-key, decoded"
        )
    headers = {"Authorization": f"Bearer {service_secret(key, 'cli')}", SERVICE_HEADER: "cli"}
    return LedgerAccess(url=url, headers=headers)
