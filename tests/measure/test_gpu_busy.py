from raydali.measure.gpu_busy import covered


def test_time_that_spans_cover_counts_once() -> None:
    assert covered([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (7.0, 8.0)]) == 3.0 + 3.0
    assert covered([]) == 0.0
