"""What a tenant's access key shows of its sessions and the models, asked of the gateway."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from gristmill_cli.cluster.signing import Credentials, signed_headers
from gristmill_cli.environment import REGION
from gristmill_cli.errors import CommandError

Shape = dict[str, Any]  # Any: a shape of the SageMaker API as JSON
TIMEOUT_S: Final = 30
HUB: Final = "SageMakerPublicHub"
CONTENTS: Final = "HubContentSummaries"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Every call raises CommandError with the gateway's own words."""

    url: str
    credentials: Credentials
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    def call(self, operation: str, body: Shape) -> Shape:
        data = json.dumps(body).encode()
        headers = signed_headers(self.url, operation, data, self.credentials, self.clock())
        request = urllib.request.Request(f"{self.url}/", data, headers, method="POST")  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                shape: Shape = json.load(answer)
        except urllib.error.HTTPError as error:
            raise CommandError(refusal(error.code, error.read())) from error
        except (OSError, ValueError) as error:
            raise CommandError(
                f"the gateway at {self.url} does not answer ({error}); check --endpoint"
            ) from error
        return shape

    def pages(self, operation: str, body: Shape, field: str) -> Iterator[Shape]:
        """The items of `field` on all pages."""
        token: str | None = None
        while True:
            page = self.call(operation, {**body, **({"NextToken": token} if token else {})})
            yield from page[field]
            token = page.get("NextToken")
            if not token:
                return

    def sessions(self) -> list[Shape]:
        """TrainingSessionDetail of each, the newest first."""
        found = self.pages("ListTrainingSessions", {}, "TrainingSessionSummaries")
        return [self.session(each["TrainingSessionArn"].rpartition("/")[2]) for each in found]

    def session(self, name: str) -> Shape:
        answer = self.call("DescribeTrainingSession", {"TrainingSessionName": name})
        detail: Shape = answer["TrainingSessionDetail"]
        return detail

    def models(self) -> list[Shape]:
        """DescribeHubContentResponse of each, by name."""
        asked = {"HubName": HUB, "HubContentType": "Model"}
        names = [each["HubContentName"] for each in self.pages("ListHubContents", asked, CONTENTS)]
        return [self.model(name) for name in sorted(names)]

    def model(self, name: str) -> Shape:
        asked = {"HubName": HUB, "HubContentType": "Model", "HubContentName": name}
        return self.call("DescribeHubContent", asked)


def refusal(code: int, body: bytes) -> str:
    """The words of an error answer."""
    try:
        told = json.loads(body)
        return str(told.get("Message") or told["message"])
    except (ValueError, KeyError, AttributeError):
        return f"the gateway answered {code}"


def open_gateway(url: str, environ: Mapping[str, str] = os.environ) -> Gateway:
    """With the access key of the environment, as the SDK takes it. Raises CommandError without one."""
    key_id, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    if not key_id or not secret:
        raise CommandError(
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set; they are the accessKeyId and "
            "secretAccessKey of a Secret gristmill-key-<name> in your tenant's namespace"
        )
    region = environ.get("AWS_REGION") or REGION
    return Gateway(
        url=url.rstrip("/"),
        credentials=Credentials(key_id=key_id, secret=secret, region=region),
    )
