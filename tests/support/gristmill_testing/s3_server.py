"""An S3-compatible service in this process: moto's server on a loopback port."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from gristmill_ledger.artifacts_s3 import S3, S3Location, s3_client


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    endpoint: str

    def location(self, bucket: str, prefix: str = "") -> S3Location:
        return S3Location(
            bucket=bucket,
            prefix=prefix,
            endpoint=self.endpoint,
            access_key="AKIDEXAMPLE",
            secret_key="secret",
        )

    def client(self) -> S3:
        return s3_client(self.location("any"))

    def make_bucket(self, name: str) -> S3Location:
        self.client().create_bucket(Bucket=name)
        return self.location(name)

    def keys(self, bucket: str) -> list[str]:
        found = self.client().list_objects_v2(Bucket=bucket)
        return [each["Key"] for each in found.get("Contents", ())]


@contextmanager
def running_s3() -> Iterator[S3Server]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(endpoint=f"http://{host}:{port}")
    finally:
        server.stop()
