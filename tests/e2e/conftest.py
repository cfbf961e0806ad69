"""One running Gristmill for the whole folder, and the official SDK's environment for each module."""

from collections.abc import Iterator

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing.books import Books
from gristmill_testing.instance import RunningGristmill, running_gristmill
from gristmill_testing.raw_wire import GAP_TIMEOUT_S, ROLE_ARN, Clients, model_arn, raw_clients
from gristmill_testing.sdk_loop import SURFACE
from gristmill_testing.tiny_models import build_tiny_llama

SDK_GROUP = "sdk-tests"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that looks back at the others comes last."""
    items.sort(key=lambda item: item.path.name == "test_sdk_surface.py")


@pytest.fixture(scope="session")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGristmill]:
    model = build_tiny_llama(tmp_path_factory.mktemp("model"))
    settings = {"GRISTMILL_METER_GAP_TIMEOUT_S": str(GAP_TIMEOUT_S)}
    folder = tmp_path_factory.mktemp("gm")
    with running_gristmill(folder, model=model, environment=settings) as instance:
        yield instance


@pytest.fixture(scope="module")
def sdk_environment(instance: RunningGristmill) -> Iterator[dict[str, str]]:
    """What `eval "$(gristmill env)"` gives an unmodified script."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "AWS_PROFILE",
            "AWS_SESSION_TOKEN",
            "AWS_CONFIG_FILE",
            "AWS_SHARED_CREDENTIALS_FILE",
        ):
            patch.delenv(name, raising=False)
        for name, value in instance.environment.items():
            patch.setenv(name, value)
        yield instance.environment


@pytest.fixture(scope="module")
def recorded() -> Iterator[None]:
    """Mark every public name of the SDK that the module calls."""
    with SURFACE.recording():
        yield


@pytest.fixture(scope="module")
def service(
    sdk_environment: dict[str, str], recorded: None, request: pytest.FixtureRequest
) -> sdk.ServiceClient:
    """A service client with a package group of its own for the module."""
    registry = sdk.ServiceClient(role_arn=ROLE_ARN)._get_model_registry_client()
    name = f"{SDK_GROUP}-{request.module.__name__.rsplit('.')[-1].replace('_', '-')}"
    group = registry.create_model_package_group(ModelPackageGroupName=name)
    return sdk.ServiceClient(
        region=sdk_environment["AWS_REGION"],
        role_arn=ROLE_ARN,
        model_package_group_arn=group["ModelPackageGroupArn"],
        s3_output_path="s3://sdk-tests/output",
        session_name_prefix="sdk-test",
        max_pool_connections=16,
    )


@pytest.fixture(scope="module")
def base_model(instance: RunningGristmill, sdk_environment: dict[str, str]) -> str:
    return model_arn(sdk_environment["AWS_REGION"], instance.model)


@pytest.fixture
def client(service: sdk.ServiceClient, base_model: str) -> Iterator[sdk.TrainingClient]:
    with service.create_lora_training_client(base_model, rank=4, alpha=8) as client:
        yield client


@pytest.fixture(scope="module")
def clients(instance: RunningGristmill) -> Clients:
    """Raw boto3 clients of the default tenant."""
    return raw_clients(instance.environment)


@pytest.fixture(scope="module")
def books(instance: RunningGristmill) -> Books:
    """What the ledger has, by its API and by the command line."""
    return Books(ledger_url=instance.ledger_url, cli=instance.cli)
