"""What `helm test` asks: do gateway and ledger answer, and does a session become Running?

Standard library alone: it runs in any image of ours.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

ACCOUNT = os.environ.get("CHECK_ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount")
MODEL = os.environ["CHECK_MODEL"]
NAMESPACE = os.environ["CHECK_TENANT_NAMESPACE"]
TIMEOUT_S = float(os.environ["CHECK_TIMEOUT_S"])
NAME = "helm-test"
ENDED = {"Failed", "Expired", "Stopped", "Blocked", "DeletionFailed"}
DIRECT = urllib.request.ProxyHandler({})


def healthy(part, url):
    """Ask until it answers 200, for a minute at most."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.build_opener(DIRECT).open(f"{url}/readyz", timeout=5) as answer:
                print(f"{part}: {answer.status} at {url}/readyz")
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"{part} is not ready: {error}; see `kubectl logs deployment/gristmill-{part}`"
                ) from error
            time.sleep(1)


def api(method, path, body=None):
    """(status, answer) of the API server."""
    with open(f"{ACCOUNT}/token") as file:
        token = file.read().strip()
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(
        f"https://{host}:{port}/apis/gristmill.dev/v1alpha1/namespaces/{NAMESPACE}/trainingsessions{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    opener = urllib.request.build_opener(DIRECT, urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def wait_for(what, deadline, look):
    """Look once a second until the answer is not None."""
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise SystemExit(
                f"{what} took longer than {TIMEOUT_S:.0f} s: `kubectl describe gms {NAME} -n {NAMESPACE}`"
            )
        time.sleep(1)


def state_that_tells():
    """Running, or None while it may still become so; ends with the reason where it cannot."""
    code, session = api("GET", f"/{NAME}")
    if code != 200:
        raise SystemExit(f"reading the session: {code} {session.get('message')}")
    status = session.get("status", {})
    state = status.get("state", "Created")
    if state in ENDED:
        reasons = [
            f"{c['type']}={c['status']} {c['reason']}: {c.get('message', '')}"
            for c in status.get("conditions", [])
        ]
        raise SystemExit(f"the session is {state}: {'; '.join(reasons)}")
    return state if state == "Running" else None


def gone():
    return True if api("GET", f"/{NAME}")[0] == 404 else None


def run_a_session():
    begin = time.monotonic()
    if api("DELETE", f"/{NAME}")[0] != 404:
        wait_for("deleting the session of an earlier test", begin + TIMEOUT_S, gone)
    code, answer = api(
        "POST",
        "",
        {
            "apiVersion": "gristmill.dev/v1alpha1",
            "kind": "TrainingSession",
            "metadata": {"name": NAME, "namespace": NAMESPACE},
            "spec": {
                "baseModelRef": {"name": MODEL, "profile": os.environ["CHECK_PROFILE"]},
                "lora": {"rank": 8},
                "storage": {"size": "1Gi", "retain": "Delete"},
            },
        },
    )
    if code not in (200, 201):
        raise SystemExit(
            f"creating a session on {MODEL} in {NAMESPACE}: {code} {answer.get('message')}"
        )
    try:
        wait_for("the session's start", begin + TIMEOUT_S, state_that_tells)
        print(
            f"session {NAMESPACE}/{NAME} on {MODEL}: Running after {time.monotonic() - begin:.1f} s"
        )
    finally:
        api("DELETE", f"/{NAME}")
    wait_for("deleting the session", time.monotonic() + TIMEOUT_S, gone)
    print("deleted, its usage is in the ledger")


def main():
    healthy("gateway", os.environ["CHECK_GATEWAY"])
    healthy("ledger", os.environ["CHECK_LEDGER"])
    if MODEL:
        run_a_session()
    return 0


if __name__ == "__main__":
    sys.exit(main())
