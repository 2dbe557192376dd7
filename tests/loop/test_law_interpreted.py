"""The law on the kernels themselves, interpreted: what runs on a GPU, at a size a CPU bears."""

import dataclasses

import numpy as np
import pytest

from tests import kit
from tests.kernels.compare import assert_close
from tests.loop.test_law import differences

pytestmark = [pytest.mark.usefixtures("strict_dtypes"), pytest.mark.slow]


def test_the_interpreted_kernels_obey_the_law_and_decode_as_xla_does():
    """DFlash2, two sequences; one reaches a second segment of keys, which the other leaves dead."""
    params = kit.pair("qwen3", "dflash2", layers="one", block=4).params
    fixed = kit.sizes(params, 2, max_context=80)
    requests = [kit.Request(kit.prompt(58), 12), kit.Request(kit.prompt(7), 9)]
    options = dataclasses.replace(kit.OPTIONS, impl="interpret")
    want = kit.plain(params, fixed, requests, options=options)
    got = kit.run(params, fixed, requests, options=options)
    assert not differences(got, want)
    assert any(count > 1 for counts in got.committed for count in counts), "no draft was accepted"
    by_xla = kit.run(params, fixed, requests)
    assert got.tokens == by_xla.tokens
    for row in range(2):
        caches = kit.committed_kv(got.carriers, row), kit.committed_kv(by_xla.carriers, row)
        for ours, theirs in zip(*caches, strict=True):
            assert_close(ours, np.asarray(theirs))
