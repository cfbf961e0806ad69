"""Refuse an uninstall while there are TrainingSessions. Standard library alone: it runs in any image of ours."""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

ACCOUNT = os.environ.get("CHECK_ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount")
HOST = os.environ["KUBERNETES_SERVICE_HOST"]
PORT = os.environ["KUBERNETES_SERVICE_PORT"]
SHOWN = 10


def sessions():
    """(namespace/name, state) of every session; none where the kind is not served."""
    with open(f"{ACCOUNT}/token") as file:
        token = file.read().strip()
    host = f"[{HOST}]" if ":" in HOST else HOST
    request = urllib.request.Request(
        f"https://{host}:{PORT}/apis/gristmill.dev/v1alpha1/trainingsessions",
        headers={"Authorization": f"Bearer {token}"},
    )
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")),
    )
    try:
        with opener.open(request, timeout=30) as answer:
            items = json.load(answer)["items"]
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return []
        raise
    return [
        (
            f"{each['metadata']['namespace']}/{each['metadata']['name']}",
            each.get("status", {}).get("state", "Created"),
        )
        for each in items
    ]


def main():
    found = sessions()
    if not found:
        print("no TrainingSession is left: the operator can go")
        return 0
    listed = ", ".join(f"{name} ({state})" for name, state in found[:SHOWN])
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    print(
        f"{len(found)} TrainingSessions exist: {listed}{more}. Without the operator nobody brings their usage into "
        "the ledger or takes off their finalizer. Delete them and wait: "
        "`kubectl delete trainingsessions --all --all-namespaces`; then uninstall again. To leave them as they are "
        "for an operator that comes back: `helm uninstall --no-hooks`."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
