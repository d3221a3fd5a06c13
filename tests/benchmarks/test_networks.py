"""benchmarks/networks.py: the networks are those of their papers, and a short training has its figures."""

from dataclasses import replace

import known_networks
import networks
import pytest
import torch


def test_resnet20_has_as_many_parameters_as_in_its_paper() -> None:
    """0.27 million; images of one channel and not three save 2 x 9 x 16 weights of the first layer."""
    count = sum(p.numel() for p in known_networks.resnet20().parameters())
    assert count == 269_722 - 2 * 9 * 16


def test_the_gpt_does_not_look_ahead() -> None:
    model = known_networks.NETWORKS["gpt"].model(0)
    x = torch.zeros(1, known_networks.CONTEXT, dtype=torch.long)
    other = x.clone()
    other[0, -1] = 1
    with torch.no_grad():
        torch.testing.assert_close(model(x)[0, :-1], model(other)[0, :-1])


def test_a_text_says_of_each_character_the_next_one() -> None:
    x, y, held_out, _ = known_networks.text()
    assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
    assert len(held_out) == known_networks.HELD_OUT


def test_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of two ways, after three global batches: the base's own row is 1, and no sample is
    missing.
    """
    vgg = replace(known_networks.NETWORKS["vgg"], batches=3)
    monkeypatch.setitem(known_networks.NETWORKS, "vgg", vgg)
    ways = networks.EVEN, networks.WAYS[3]
    found = {("vgg", way, 0): networks.trained(("vgg", way, 0)) for way in ways}
    assert all(r.samples == 3 * 64 for r in found.values())
    monkeypatch.setattr(networks, "WAYS", ways)
    rows = [line for line in networks.compared("vgg", found, range(1)).splitlines() if line.startswith("| ")]
    assert [cell.strip() for cell in rows[1].split("|")[2:-1]] == ["1.00", "1.00", "1.00"]
    assert found["vgg", ways[1], 0].seconds < found["vgg", ways[0], 0].seconds
