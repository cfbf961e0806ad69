"""Where the API server of a test cluster is, for processes that get a kubeconfig of their own."""

import base64
import ssl
from typing import Any

import yaml

from gristmill_testing.cluster import Cluster

Json = dict[str, Any]


def api_entry(cluster: Cluster) -> Json:
    """How its kubeconfig names it, with the certificate's authority in it."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    entry: Json = config["clusters"][0]["cluster"]
    if "certificate-authority-data" in entry:
        return entry
    pem = (cluster.kubeconfig.parent / entry["certificate-authority"]).read_bytes()
    data = base64.b64encode(pem).decode()
    return {"server": entry["server"], "certificate-authority-data": data}


def api_server(cluster: Cluster) -> tuple[str, ssl.SSLContext]:
    """Its address, and trust in its certificate."""
    entry = api_entry(cluster)
    pem = base64.b64decode(entry["certificate-authority-data"]).decode()
    return entry["server"], ssl.create_default_context(cadata=pem)
