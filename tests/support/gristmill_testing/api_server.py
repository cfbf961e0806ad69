"""The API server by plain HTTP: objects sent as anybody, and the exact words of a refusal."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import urllib3
import yaml

from gristmill_testing.cluster import Cluster

Json = dict[str, Any]

PLURALS: Final = {
    "TrainingSession": "trainingsessions",
    "Tenant": "tenants",
    "BaseModel": "basemodels",
    "RateCard": "ratecards",
    "Namespace": "namespaces",
    "Pod": "pods",
    "Job": "jobs",
    "RoleBinding": "rolebindings",
}
CRDS: Final = Path(__file__).resolve().parents[3] / "crds"


@dataclass(frozen=True, slots=True)
class Reply:
    """A status code, and an object or a Status."""

    code: int
    body: Json

    @property
    def refusals(self) -> list[str]:
        """`field: text` of each cause, or the message where there are no causes; empty = accepted."""
        if self.code < 400:
            return []
        causes = self.body.get("details", {}).get("causes", [])
        named = [f"{each['field']}: {words(each['message'])}" for each in causes if "field" in each]
        return named or [self.body["message"]]


def words(message: str) -> str:
    """What is wrong, without the value that the server puts before it."""
    return re.sub(r'^Invalid value: (("([^"\\\\]|\\\\.)*"|-?[0-9]+): )?', "", message)


class ApiServer:
    """Calls as the cluster's administrator, or as whom `user` names."""

    def __init__(self, cluster: Cluster) -> None:
        access = yaml.safe_load(cluster.kubeconfig.read_text())
        self._host: str = access["clusters"][0]["cluster"]["server"]
        user = access["users"][0]["user"]
        self._pool = urllib3.PoolManager(
            ca_certs=access["clusters"][0]["cluster"]["certificate-authority"],
            cert_file=user["client-certificate"],
            key_file=user["client-key"],
        )

    def call(
        self,
        verb: str,
        path: str,
        body: object = None,
        *,
        user: str = "",
        groups: Sequence[str] = (),
        kind: str = "application/json",
    ) -> Reply:
        """`user` with `groups` are impersonated; the administrator is a member of system:masters."""
        headers = urllib3.HTTPHeaderDict({"Content-Type": kind, "Accept": "application/json"})
        if user:
            headers.add("Impersonate-User", user)
        for group in groups:
            headers.add("Impersonate-Group", group)
        text = None if body is None else json.dumps(body)
        answer = self._pool.request(
            verb, f"{self._host}{path}", body=text, headers=headers, timeout=30
        )
        return Reply(answer.status, json.loads(answer.data))

    def create(self, thing: Json, **who: Any) -> Reply:
        return self.call("POST", collection(thing), thing, **who)

    def merge(self, thing: Json, change: Mapping[str, Any], **who: Any) -> Reply:
        """A JSON merge patch of an object that exists."""
        return self.call(
            "PATCH", path_of(thing), change, kind="application/merge-patch+json", **who
        )

    def get(self, thing: Json) -> Reply:
        return self.call("GET", path_of(thing))

    def delete(self, thing: Json) -> Reply:
        return self.call("DELETE", path_of(thing))


def collection(thing: Json) -> str:
    group = thing["apiVersion"]
    root = "/api/v1" if group == "v1" else f"/apis/{group}"
    namespace = thing["metadata"].get("namespace")
    place = f"/namespaces/{namespace}" if namespace and thing["kind"] != "Namespace" else ""
    return f"{root}{place}/{PLURALS[thing['kind']]}"


def path_of(thing: Json) -> str:
    return f"{collection(thing)}/{thing['metadata']['name']}"
