"""Language models load from everywhere, agree with Hugging Face, can be read and edited."""

import pytest
import torch
from tiny import BOS, VOCAB, save_gpt2, save_grouped
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from iclutils import IclError, models, zoo
from iclutils.models import language


def test_a_tokenizer_is_the_model_s_own_or_given(tmp_path):
    """A folder without one gives a model without one; zoo models write numbers."""
    network = save_gpt2(tmp_path).half()
    network.save_pretrained(tmp_path)
    bare = models.load(tmp_path)
    assert not any(p.requires_grad for p in bare.parameters())
    assert {p.dtype for p in bare.parameters()} == {torch.float32}
    with pytest.raises(IclError, match=r"no tokenizer: .* as tokenizer="):
        models.text_tokenizer(bare)
    numbers = models.load(tmp_path, tokenizer="numbers")
    assert numbers.to_tokens("3 4").tolist() == [[BOS, 3, 4]]
    with pytest.raises(IclError, match="its tokens are numbers"):
        models.text_tokenizer(numbers)
    letters = Tokenizer(WordLevel({chr(32 + i): i for i in range(VOCAB)}, unk_token=chr(32 + BOS)))
    given = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=chr(32 + BOS))
    read = models.text_tokenizer(models.load(tmp_path, tokenizer=given))
    assert read.convert_ids_to_tokens([1]) == ["!"]


def test_random_weights_are_those_of_transformer_lens(capsys):
    from transformer_lens.tools.analysis import random_init_bridge

    ours = models.random_init("induction-0", seed=3)
    theirs = random_init_bridge(
        str(zoo.folder("induction-0")), seed=3, device="cpu", tokenizer=language._numbers(512, 511)
    )
    expected = dict(theirs.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in ours.named_parameters())


def test_edits_and_twins(tmp_path):
    """Catches an edit, or a twin with random weights, of the network after it was written out."""
    save_grouped(tmp_path)
    seen = []

    def edit(network):
        seen.append(network.model.layers[0].self_attn.k_proj.weight.shape)
        network.model.layers[0].self_attn.k_proj.weight[8:] = 0

    edited = models.edit_weights(tmp_path, edit)
    assert seen == [(16, 24)], "an edit is of the published network"
    assert edited.W_K.shape == edited.W_Q.shape == (3, 4, 24, 8)
    assert edited.W_K[0, :2].any()
    assert not edited.W_K[0, 2:].any()
    twin = models.random_init(tmp_path, 0)
    assert torch.equal(twin.W_V[:, 0], twin.W_V[:, 1])
    assert not torch.equal(twin.W_V[:, 1], twin.W_V[:, 2])
