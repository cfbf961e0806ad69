"""The cluster key: made once, by the leader, if nobody has made it; read by everybody."""

import base64
import binascii
import logging
import secrets
from pathlib import Path
from typing import Protocol

from gristmill_contracts import labels
from gristmill_contracts.errors import InvalidRequestError, NotFoundError
from gristmill_contracts.secrets import CLUSTER_KEY_BYTES
from gristmill_operator.kinds import SECRETS, Kind
from gristmill_operator.problems import AlreadyExistsError
from gristmill_operator.seams import Json

logger = logging.getLogger(__name__)


class SecretApi(Protocol):
    async def get(self, kind: Kind, namespace: str, name: str) -> Json: ...

    async def create(self, kind: Kind, body: Json) -> Json: ...


async def ensure_key(api: SecretApi, namespace: str, file: Path | None) -> bytes:
    """The key from `file` if that is there, else from the Secret, which is made if it is missing.

    Raises InvalidRequestError if what is there is no key.
    """
    if file is not None and file.exists():
        return _checked(file.read_bytes(), str(file))
    where = f"Secret {namespace}/{labels.CLUSTER_KEY_SECRET}"
    try:
        secret = await api.get(SECRETS, namespace, labels.CLUSTER_KEY_SECRET)
    except NotFoundError:
        try:
            secret = await api.create(SECRETS, _new_secret(namespace))
            logger.info("cluster_key_made", extra={"namespace": namespace})
        except AlreadyExistsError:
            secret = await api.get(SECRETS, namespace, labels.CLUSTER_KEY_SECRET)
    text = (secret.get("data") or {}).get(labels.CLUSTER_KEY_ENTRY, "")
    try:
        return _checked(base64.b64decode(text, validate=True), where)
    except binascii.Error as error:
        raise InvalidRequestError(f"{where} is not base64; delete it, or restore it") from error


def _new_secret(namespace: str) -> Json:
    key = base64.b64encode(secrets.token_bytes(CLUSTER_KEY_BYTES)).decode()
    return {
        "metadata": {
            "namespace": namespace,
            "name": labels.CLUSTER_KEY_SECRET,
            "labels": {
                "app.kubernetes.io/name": "gristmill",
                labels.MANAGED_BY: labels.MANAGER,
            },
        },
        "type": "Opaque",
        "data": {labels.CLUSTER_KEY_ENTRY: key},
    }


def _checked(key: bytes, where: str) -> bytes:
    if len(key) != CLUSTER_KEY_BYTES:
        raise InvalidRequestError(
            f"the cluster key in {where} (entry {labels.CLUSTER_KEY_ENTRY}) has {len(key)} bytes, not "
            f"{CLUSTER_KEY_BYTES}; restore the one that this installation was made with"
        )
    return key
