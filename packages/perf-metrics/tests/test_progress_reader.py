"""A display that nobody reads any more must not end the run."""

import logging
import os
from types import SimpleNamespace

import pytest

from perf_metrics import ProgressCallback


def test_a_reader_that_has_gone_ends_the_display_only(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    state = SimpleNamespace(is_world_process_zero=True, global_step=1, max_steps=5, epoch=0.1)
    stream = os.fdopen(writing, "w")
    callback = ProgressCallback(use_tqdm=False, output_stream=stream)
    callback.on_train_begin(None, state, None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            callback.on_log(None, state, None, logs={"loss": 1.0})
    assert [record.message for record in caplog.records] == [
        "nobody reads the progress display any more; the run continues without it"
    ]
    with pytest.raises(BrokenPipeError):
        stream.close()
