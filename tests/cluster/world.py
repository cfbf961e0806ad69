"""The world outside the cluster: a network namespace behind the node, with one web server.

    world.py GATEWAY_ADDRESS OTHER_ADDRESS ...

A pod that may reach the internet reaches OTHER_ADDRESS:80; one that may not, does not. It answers every path
with the address it sees, so a test can tell who has asked. /hits is the number of requests until now.
"""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
from pathlib import Path

NODE_IP, POD_CIDR = "172.30.0.2", "10.88.0.0/16"


class Hello(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hits = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path != "/hits":
            with Hello.lock:
                Hello.hits += 1
        seen = Hello.hits if self.path == "/hits" else f"outside sees {self.client_address[0]}"
        body = f"{seen}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


def join(gateway: str, others: list[str]) -> None:
    """Take the addresses; the node's side moves `world0` in here a moment after this process has started."""
    ip("link", "set", "lo", "up")
    for address in others:
        ip("address", "add", f"{address}/32", "dev", "lo")
    while "world0" not in Path("/proc/self/net/dev").read_text():
        time.sleep(0.02)
    ip("address", "add", f"{gateway}/24", "dev", "world0")
    ip("link", "set", "world0", "up")
    ip("route", "add", POD_CIDR, "via", NODE_IP)


if __name__ == "__main__":
    join(sys.argv[1], sys.argv[2:])
    http.server.ThreadingHTTPServer(("", 80), Hello).serve_forever()
