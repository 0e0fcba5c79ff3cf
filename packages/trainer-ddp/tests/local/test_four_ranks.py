"""PostLocalSGD on two hosts of two ranks each."""

import pytest

pytestmark = pytest.mark.xdist_group("worlds")


def test_hosts_stay_together_and_come_apart(four):
    # Gradients averaged among; whether ranks 1, 2, 3 have the weights of rank 0, and rank 3 those of rank 2.
    together = [True, True, True, True]
    apart = [True, False, False, True]
    assert four.agreed("nodes") == [
        ["all", *together],
        ["node", *apart],
        ["node", *apart],
        ["node", *together],
    ]
