"""Prometheus' text format is read as inference servers write it."""

from mrl.engines.metrics_text import metrics_of

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a model"} 3.0
vllm:generation_tokens_total{engine="0"} 12.0
vllm:generation_tokens_total{engine="1"} 30.0
plain 0.5
no number here
"""


def test_samples_of_one_metric_are_added_up_over_their_labels():
    """Comments and lines that are no samples count nothing."""
    assert metrics_of(TEXT) == {
        "vllm:num_requests_running": 3.0,
        "vllm:generation_tokens_total": 42.0,
        "plain": 0.5,
    }
