"""Resources of the local store alone: in a cluster both are derived from the cluster's key."""

from typing import Literal

from gristmill_contracts.resources import Model, Resource


class AccessKeySpec(Model):
    """A credential of a tenant. Embedded, it lies in the local store (mode 0600)."""

    access_key_id: str
    secret_access_key: str
    tenant: str
    service_account: str = ""
    """system:serviceaccount:<namespace>:<name> whose rights the key has; empty = all of the tenant's."""
    description: str = ""
    revoked_us: int | None = None


class AccessKey(Resource):
    kind: Literal["AccessKey"] = "AccessKey"
    spec: AccessKeySpec


class EndpointSecretSpec(Model):
    """Per-attempt secret between gateway and meter, and where the meter listens."""

    session_uid: str
    attempt: int
    endpoint: str
    secret: str


class EndpointSecret(Resource):
    kind: Literal["EndpointSecret"] = "EndpointSecret"
    spec: EndpointSecretSpec
