"""The indirect object: sentences by their words, and the tests of a circuit by hand."""

import pytest
import torch
from random_layers import seeded

from iclutils import models
from iclutils.chapters.every_lens import ioi
from iclutils.interp import removal


@pytest.fixture(scope="module")
def said(reader):
    return ioi.sentences(models.text_tokenizer(reader), 2, seeded())


def test_the_subject_comes_twice_and_the_answer_once(reader, said):
    task, decode = said.task, reader.tokenizer.decode
    for row in range(8):
        end = int(said.place["end"][row])
        clean, corrupt = (decode(side[row, : end + 1]) for side in (task.clean, task.corrupt))
        io, s = (decode(i).strip() for i in task.choices[row])
        assert clean.endswith(" to")
        assert (clean.count(io), clean.count(s)) == (1, 2)
        assert not any(x in corrupt for x in (io, s))
        for name, token in (("S1", s), ("IO", io), ("S2", s)):
            assert decode(task.clean[row, said.place[name][row]]).strip() == token
        assert said.place["S1"][row] < said.place["S2"][row]
    first = [said.place["IO"][i] < said.place["S1"][i] for i in (0, 4)]
    assert first == [False, True]


def test_means_are_of_the_same_template_and_place(reader, said):
    new = ioi.three_names(reader, said)
    z = removal.outputs_on(reader, said.task.corrupt, "").by_layer[1]
    torch.testing.assert_close(new.by_layer[1][3], (z[3] + z[7]) / 2)
    assert "three names" in new.words


def test_a_circuit_is_tested_as_by_hand(reader, said):
    new = ioi.three_names(reader, said)
    parts = {"one": [(0, 1), (2, 0)], "two": [(1, 2)]}
    same = [[heads] * 8 for heads in parts.values()]
    found = ioi.assess(reader, said, same, new, 2, seeded())
    every = [(la, h) for la in range(3) for h in range(4)]

    def lead(kept):
        gone = [head for head in every if head not in kept]
        return removal.without(reader, said.task, [gone], new).margin[0]

    circuit = [head for part in parts.values() for head in part]
    torch.testing.assert_close(found.circuit, lead(circuit))
    torch.testing.assert_close(found.complete[0, 0], lead(parts["two"]))
    rest = [head for head in every if head not in parts["one"]]
    torch.testing.assert_close(found.complete[0, 1], lead(rest))
    assert found.complete.shape == (4, 2, 8)
    torch.testing.assert_close(found.minimal[0, 0], lead([(0, 1), (1, 2)]))
    torch.testing.assert_close(found.minimal[0, 1], lead([(1, 2)]))
    torch.testing.assert_close(found.minimal[2], torch.stack([lead(circuit), lead(parts["one"])]))


def test_classes_part_the_heads_and_random_circuits_keep_layers(reader, said):
    found = ioi.classes(reader, said)
    assert tuple(found) == ioi.CLASSES
    heads = [head for part in found.values() for head in part]
    assert len(heads) == len({*heads})
    parts = {"one": [(0, 1), (2, 0)], "two": [(1, 2)]}
    drawn = ioi.in_layers(parts, 4, 5, seeded())
    assert [[len(row) for row in part] for part in drawn] == [[2] * 5, [1] * 5]
    assert all(sorted(la for part in drawn for la, _ in part[row]) == [0, 1, 2] for row in range(5))


def test_a_summary_is_in_shares_of_the_lead_and_over_pairs():
    whole = torch.full((8,), 4.0)
    circuit = torch.tensor([3.0] * 4 + [1.0] * 4)
    complete = torch.stack([torch.zeros(2, 8), torch.stack([torch.full((8,), 2.0), whole])], 0)
    minimal = torch.stack([torch.stack([whole, whole]), torch.stack([whole, whole - 1])])
    found = ioi.summary(ioi.Assessment(circuit, complete, minimal), whole)
    assert found["faithful"] == pytest.approx((0.5, 0.25, 2))
    assert found["complete"] == pytest.approx((0.5, 0.0, 2))
    assert found["minimal"] == pytest.approx((0.5, 0.0, 2))
