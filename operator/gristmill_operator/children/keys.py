"""Client keys: a Secret for each key of a tenant that is not revoked."""

import base64

from gristmill_contracts.secrets import access_key_id, access_key_secret
from gristmill_contracts.tenant import Tenant
from gristmill_operator.children.manifest import Manifest, tenant_labels
from gristmill_operator.children.namespace import namespace_name
from gristmill_operator.children.seating import key_secret_name


def client_keys(tenant: Tenant, cluster_key: bytes) -> list[Manifest]:
    """The gateway derives the same two parts from the tenant and the cluster key."""
    return [
        _client_key(tenant, key.name, cluster_key) for key in tenant.spec.keys if not key.revoked
    ]


def _client_key(tenant: Tenant, key: str, cluster_key: bytes) -> Manifest:
    identifier = access_key_id(tenant.metadata.uid, key)
    parts = {
        "accessKeyId": identifier,
        "secretAccessKey": access_key_secret(cluster_key, identifier),
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": key_secret_name(key),
            "namespace": namespace_name(tenant),
            "labels": tenant_labels(tenant.metadata.name),
        },
        "type": "Opaque",
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in parts.items()},
    }
