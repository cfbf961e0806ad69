"""A small training loop on the official SDK, and the record of what of the SDK was used."""

import inspect
from enum import Enum

import sagemaker.train.training_session as sdk

from gristmill_testing.public_surface import Surface

SURFACE = Surface(
    [
        value
        for name in sdk.__all__
        if inspect.isclass(value := getattr(sdk, name)) and not issubclass(value, Enum)
    ],
    package="sagemaker.train.training_session",
)
"""Every public class of the SDK; one record for all modules that drive it."""

TOKENS = [[7, 11, 13, 17, 19, 23, 29], [5, 8, 12, 16, 20], [31, 37, 41, 43]]


def batch(rows: list[list[int]] = TOKENS) -> list[sdk.Datum]:
    """Next-token datums, as the SDK's users write them."""
    return [
        sdk.Datum(
            model_input=sdk.ModelInput.from_ints(row),
            loss_fn_inputs={
                "target_tokens": sdk.TensorData(
                    data=[*row[1:], row[0]], dtype=sdk.TensorDtype.INT64
                ),
                "weights": sdk.TensorData(data=[1.0] * len(row)),
            },
        )
        for row in rows
    ]


def step(
    client: sdk.TrainingClient, rows: list[list[int]] = TOKENS, learning_rate: float = 1e-2
) -> float:
    """One pass and one step, pipelined; returns the loss before the step."""
    passed = client.forward_backward(batch(rows))
    stepped = client.optim_step(sdk.AdamParams(learning_rate=learning_rate))
    stepped.result()
    return float(passed.result().metrics["actor/pg_loss"])


def status_of(service: sdk.ServiceClient, name: str) -> str:
    answer = service._sagemaker_client.describe_training_session(TrainingSessionName=name)
    return str(answer["TrainingSessionDetail"]["TrainingSessionStatus"])
