"""The SageMaker wire: translates its requests to our own model and back, and knows nothing else."""
