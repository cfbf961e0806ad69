"""Raw boto3 clients of the two SageMaker services, for what the official SDK hides.

A client-side check is turned off where asked for, so that the server's own answer is seen.
"""

import itertools
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

RAW_CONFIG = Config(
    retries={"max_attempts": 1, "mode": "standard"}, parameter_validation=False, read_timeout=60
)
"""One attempt, nothing checked before sending: what the server says is what the test sees."""
ROLE_ARN = "arn:aws:iam::000000000000:role/researcher"
GAP_TIMEOUT_S = 8.0
"""What the end-to-end instance is started with; a session waits 5 minutes by default."""
TERMINAL = frozenset({"Completed", "Failed", "Skipped"})


@dataclass(frozen=True, slots=True)
class Clients:
    """One tenant's raw clients."""

    control: Any
    runtime: Any
    region: str


def raw_clients(environment: Mapping[str, str], config: Config = RAW_CONFIG) -> Clients:
    """Clients from the variables that `gristmill env` prints; nothing is read from this process."""
    region = environment["AWS_REGION"]
    session = boto3.Session(
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=region,
    )
    control = session.client(
        "sagemaker", endpoint_url=environment["SAGEMAKER_TRAINING_SESSION_ENDPOINT"], config=config
    )
    runtime = session.client(
        "sagemakertrainingsessionruntime",
        endpoint_url=environment["SAGEMAKER_TRAINING_SESSION_RUNTIME_ENDPOINT"],
        config=config,
    )
    return Clients(control=control, runtime=runtime, region=region)


def model_arn(region: str, name: str) -> str:
    return f"arn:aws:sagemaker:{region}:aws:hub-content/SageMakerPublicHub/Model/{name}"


@dataclass(slots=True)
class RawSession:
    """One training session, driven call by call. `numbers` hands out sequence numbers from 1."""

    clients: Clients
    name: str
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def describe(self) -> dict[str, Any]:
        answer = self.clients.control.describe_training_session(TrainingSessionName=self.name)
        detail: dict[str, Any] = answer["TrainingSessionDetail"]
        return detail

    @property
    def status(self) -> str:
        return str(self.describe()["TrainingSessionStatus"])

    def submit(
        self, config: dict[str, Any], number: int | None = None, token: str | None = ""
    ) -> str:
        """Send one training operation; returns its id. token "" makes one, None sends none."""
        fields: dict[str, Any] = {"clientToken": str(uuid.uuid4()) if token == "" else token}
        answer = self.clients.runtime.execute_training_operation(
            trainingSessionName=self.name,
            sequenceNumber=next(self.numbers) if number is None else number,
            operationConfig=config,
            **({} if token is None else fields),
        )
        return str(answer["operationId"])

    def get(self, operation_id: str) -> dict[str, Any]:
        """Poll a training operation until it is terminal."""
        return _until_terminal(
            lambda: self.clients.runtime.get_training_operation_result(
                trainingSessionName=self.name, operationId=operation_id
            )
        )

    def peek(self, operation_id: str) -> str:
        """The status that one poll shows."""
        answer = self.clients.runtime.get_training_operation_result(
            trainingSessionName=self.name, operationId=operation_id
        )
        return str(answer["status"])

    def run(self, config: dict[str, Any]) -> dict[str, Any]:
        return self.get(self.submit(config))

    def submit_sampling(self, config: dict[str, Any]) -> str:
        answer = self.clients.runtime.execute_sampling_operation(
            trainingSessionName=self.name, operationConfig=config
        )
        return str(answer["operationId"])

    def get_sampling(self, operation_id: str) -> dict[str, Any]:
        return _until_terminal(
            lambda: self.clients.runtime.get_sampling_operation_result(
                trainingSessionName=self.name, operationId=operation_id
            )
        )

    def run_sampling(self, config: dict[str, Any]) -> dict[str, Any]:
        return self.get_sampling(self.submit_sampling(config))

    def chat(self, body: dict[str, Any], package: str | None = None) -> dict[str, Any]:
        """SampleTrainingSession: an OpenAI chat body in and out."""
        answer = self.clients.runtime.sample_training_session(
            trainingSessionName=self.name,
            contentType="application/json",
            accept="application/json",
            body=json.dumps(body).encode(),
            **({} if package is None else {"modelPackageArn": package}),
        )
        decoded: dict[str, Any] = json.loads(
            answer["body"].read() if hasattr(answer["body"], "read") else answer["body"]
        )
        return decoded

    def chat_stream(self, body: dict[str, Any]) -> Any:
        """SampleTrainingSessionWithResponseStream: the raw server-sent events, unread."""
        answer = self.clients.runtime.sample_training_session_with_response_stream(
            trainingSessionName=self.name,
            contentType="application/json",
            accept="text/event-stream",
            body=json.dumps({**body, "stream": True}).encode(),
        )
        return answer["body"]

    def stop(self) -> None:
        """Stop it, as its user would, unless it failed: a failed session has nothing to stop."""
        if self.status == "Failed":
            return
        self.clients.control.stop_training_session(TrainingSessionName=self.name)
        wait_until(lambda: self.status in {"Stopped", "Failed"}, f"session {self.name} to stop")

    def delete(self) -> None:
        self.clients.control.delete_training_session(TrainingSessionName=self.name)


def create_session(
    clients: Clients, model: str, *, name: str = "", rank: int = 4, alpha: int = 8
) -> RawSession:
    """Create a session with a raw call and wait until it runs."""
    name = name or f"raw-{uuid.uuid4().hex[:8]}"
    clients.control.create_training_session(**create_fields(clients, model, name, rank, alpha))
    session = RawSession(clients=clients, name=name)
    wait_until(lambda: session.status == "Running", f"session {name} to run")
    return session


def create_fields(
    clients: Clients, model: str, name: str, rank: int = 4, alpha: int = 8
) -> dict[str, Any]:
    return {
        "TrainingSessionName": name,
        "LoraConfig": {"Rank": rank, "Alpha": alpha},
        "RoleArn": ROLE_ARN,
        "ModelConfig": {"BaseModelArn": model_arn(clients.region, model)},
        "OutputConfig": {"S3Location": {"Path": f"s3://gristmill-test/{name}/output"}},
    }


def datum(
    tokens: list[int], targets: list[int] | None = None, weights: list[float] | None = None
) -> dict[str, Any]:
    """A cross-entropy datum in wire form; targets default to the tokens shifted by one."""
    targets = targets if targets is not None else [*tokens[1:], tokens[0]]
    weights = weights if weights is not None else [1.0] * len(tokens)
    return {
        "modelInput": model_input(tokens),
        "lossFnInputs": {
            "target_tokens": {"data": targets, "dtype": "int64", "shape": [len(targets)]},
            "weights": {"data": weights, "dtype": "float32", "shape": [len(weights)]},
        },
    }


def model_input(tokens: list[int]) -> dict[str, Any]:
    return {"chunks": [{"tokens": tokens, "type": "encoded_text"}]}


def forward_backward(*datums: dict[str, Any], loss: str = "cross_entropy") -> dict[str, Any]:
    return {"forwardBackward": {"lossFnName": loss, "datumList": list(datums)}}


def forward(*datums: dict[str, Any]) -> dict[str, Any]:
    return {"forward": {"lossFnName": "cross_entropy", "datumList": list(datums)}}


def optimizer_step(learning_rate: float = 1e-3) -> dict[str, Any]:
    return {"optimizerStep": {"adamParamsConfig": {"learningRate": learning_rate}}}


def sample(
    tokens: list[int], *, samples: int = 1, max_tokens: int = 8, **params: Any
) -> dict[str, Any]:
    return {
        "sample": {
            "prompt": model_input(tokens),
            "numSamples": samples,
            "samplingParams": {"maxTokens": max_tokens, **params},
        }
    }


def compute_logprobs(tokens: list[int]) -> dict[str, Any]:
    return {"computeLogprobs": {"prompt": model_input(tokens)}}


def refusal(call: Callable[[], Any]) -> tuple[str, str, int]:
    """The error code, message and HTTP status that a call is refused with. Fails if it succeeds."""
    try:
        answer = call()
    except ClientError as error:
        status = int(error.response["ResponseMetadata"]["HTTPStatusCode"])
        return error.response["Error"]["Code"], error.response["Error"]["Message"], status
    raise AssertionError(f"the call was expected to be refused, but answered {answer}")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll until a condition holds. The pause between polls only spares the CPU."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s in vain for {what}")
        time.sleep(0.05)


def _until_terminal(poll: Callable[[], dict[str, Any]], timeout_s: float = 120.0) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while True:
        answer = poll()
        if answer["status"] in TERMINAL:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"operation is still {answer['status']} after {timeout_s:.0f} s")
        time.sleep(0.02)
