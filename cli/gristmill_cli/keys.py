"""Tenants and their access keys in the store."""

import base64
import secrets
from typing import Final

from gristmill_cli.errors import CommandError
from gristmill_contracts.credentials import AccessKey, AccessKeySpec
from gristmill_contracts.errors import ConflictError, NotFoundError
from gristmill_contracts.resources import Metadata
from gristmill_contracts.tenant import Tenant
from gristmill_contracts.units import now_us
from gristmill_sessions.port import ResourceStore

KEY_ID_PREFIX: Final = "AKIA"
"""Clients of this wire take only identifiers that look like this."""
KEY_ID_BYTES: Final = 10
SECRET_BYTES: Final = 30


def ensure_tenant(store: ResourceStore, name: str) -> Tenant:
    """The tenant of that name; made if there is none. Raises CommandError for a bad name."""
    try:
        return store.get(Tenant, "", name)
    except NotFoundError:
        pass
    try:
        metadata = Metadata(name=name, namespace="")
    except ValueError as error:
        raise CommandError(
            f"tenant name {name!r} is not valid: write at most 40 lower-case letters, digits and hyphens"
        ) from error
    try:
        return store.create(Tenant(metadata=metadata))
    except ConflictError:
        return store.get(Tenant, "", name)


def create_key(store: ResourceStore, tenant: str, description: str = "") -> AccessKey:
    """A new key of the tenant, which is made if there is none of that name."""
    ensure_tenant(store, tenant)
    random = base64.b32encode(secrets.token_bytes(KEY_ID_BYTES)).decode()
    key_id = KEY_ID_PREFIX + random
    return store.create(
        AccessKey(
            metadata=Metadata(name=key_id.lower(), namespace=tenant),
            spec=AccessKeySpec(
                access_key_id=key_id,
                secret_access_key=secrets.token_urlsafe(SECRET_BYTES),
                tenant=tenant,
                description=description,
            ),
        )
    )


def list_keys(store: ResourceStore, tenant: str | None = None) -> list[AccessKey]:
    """Keys in the order in which they were made, revoked ones included."""
    return store.list(AccessKey, tenant)


def valid_key(store: ResourceStore, tenant: str) -> AccessKey | None:
    """The oldest key of the tenant that was not revoked."""
    return next((key for key in list_keys(store, tenant) if key.spec.revoked_us is None), None)


def revoke_key(store: ResourceStore, key_id: str) -> AccessKey:
    """From now on no request signed with it is let in. Raises CommandError if there is no such key."""
    found = next((key for key in list_keys(store) if key.spec.access_key_id == key_id), None)
    if found is None:
        raise CommandError(f"there is no key {key_id!r}; `gristmill keys list` shows all")
    if found.spec.revoked_us is not None:
        return found
    spec = found.spec.model_copy(update={"revoked_us": now_us()})
    return store.update(found.model_copy(update={"spec": spec}))
