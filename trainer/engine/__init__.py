"""One rank: DeepSpeed, the policy network, parallelism, memory given back, export."""

from keel.model.imports import not_found

# DeepSpeed's autotuner, which no run uses, loads MLflow where that is installed, and with it web
# servers and stores: a tenth of what a rank imports. First of all here, whatever is imported next.
with not_found("mlflow"):
    import deepspeed  # noqa: F401
