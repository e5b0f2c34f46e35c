"""A model's tokenizer as it stands beside the weights, and what the tasks write with it."""

import json

import pytest
import torch
from tiny import as_llama2, byte_level, save_gpt2, save_reader
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

from iclutils import models
from iclutils.interp import readout
from iclutils.tasks import numbers, sources, text
from iclutils.tasks.prompts import Role
from iclutils.tasks.repeated import repeated_tokens, text_twice

SHOWN = [("a great film", "good"), ("a waste of time", "bad")]


def spelled(model, tokens):
    return model.tokenizer.convert_ids_to_tokens(list(map(int, tokens)))


def test_tokenizer_json_is_read_as_it_stands(tmp_path):
    """transformers would give a GPT-2 the tokenizer of its class, with these words as merges."""
    save_gpt2(tmp_path)
    known = {word: i for i, word in enumerate(["<unk>", "<s>", "the", "cat", "sat"])}
    core = Tokenizer(WordLevel(known, unk_token="<unk>"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    model = models.load(tmp_path)
    assert models.encode(models.words(model), ["The CAT sat"])["input_ids"] == [[2, 3, 4]]
    assert models.bos(model) == 1
    assert model.to_tokens("the cat").tolist() == [[1, 2, 3]]
    assert model.cfg.d_vocab == 60


def test_the_first_token_is_the_tokenizer_s(tmp_path):
    """config.json may name another, or none, and its class then fills in token 1."""
    reader = byte_level()
    save_reader(tmp_path / "other", reader, bos_token_id=1)
    absent = save_reader(tmp_path / "absent", reader)
    settings = json.loads((absent / "config.json").read_text())
    del settings["bos_token_id"]
    (absent / "config.json").write_text(json.dumps(settings))
    for folder in (tmp_path / "other", absent):
        model = models.load(folder)
        assert spelled(model, text_twice(model, "a great film").tokens[0])[:2] == ["<s>", "a"]


def test_prompts_begin_with_bos_where_the_tokenizer_gives_it(tmp_path):
    model = models.load(save_reader(tmp_path, byte_level()))
    reader = models.words(model)
    asked, _ = sources.own_prompt(model, SHOWN, "I loved it")
    whole = "Text: a great film\nLabel: good\nText: a waste of time\nLabel: bad\nText: I loved it"
    assert asked.tokens[0].tolist() == reader(f"{whole}\nLabel:")["input_ids"]
    assert asked.roles[0, 0] == Role.FORMAT
    assert spelled(model, asked.tokens[0, asked.label_pos[0]]) == ["Ġgood", "Ġbad"]
    assert numbers.of_model(model).start == (reader.bos_token_id,)
    plain = byte_level()
    plain.backend_tokenizer.post_processor = plain.backend_tokenizer.post_processor.__class__(
        single="$A", special_tokens=[]
    )
    assert models.start_tokens(plain) == []
    assert numbers.of_text(plain).start == ()


def test_text_is_text_whatever_stands_in_it(tmp_path):
    model = models.load(save_reader(tmp_path, byte_level()))
    end = model.tokenizer.eos_token_id
    shown = [("a great </s> film", "good"), SHOWN[1]]
    asked, _ = sources.own_prompt(model, shown, "I </s> loved it")
    assert end not in asked.tokens
    assert "</s>" in model.tokenizer.decode(asked.tokens[0])
    assert end not in text_twice(model, "a </s> film").tokens


def test_a_pad_token_beyond_the_embedding_is_never_read(tmp_path):
    reader = byte_level(pad_token="[PAD]")
    model = models.load(save_reader(tmp_path, reader, vocab=reader.pad_token_id))
    task = text.TextTask("t", "Text:", "Label:", (" good", " bad"))
    rows = [[("great", 0), ("bad", 1)]] * 2
    queries = [("good", 0), ("a long and bad text", 1)]
    asked = text.build(task, models.words(model), rows, queries, context=256)
    assert readout.target_logits(model, asked).shape == (2, len(reader) - 1)


def test_random_tokens_are_those_that_the_tokenizer_has(tmp_path):
    reader = byte_level()
    padded = models.load(save_reader(tmp_path, reader, vocab=len(reader) + 62))
    drawn = repeated_tokens(padded, 400, 20, torch.Generator().manual_seed(0)).tokens
    assert (drawn[:, 0] == reader.bos_token_id).all()
    assert drawn.max() < len(reader)
    assert not (drawn[:, 1:] == reader.bos_token_id).any()


@pytest.mark.parametrize(("digits", "line"), [(False, " 7 -> 5\n"), (True, "7 -> 5\n")])
def test_pieces_are_read_where_they_stand(digits, line):
    """Llama-2's tokenizer begins every text with a space, also that of a number or a label."""
    reader = as_llama2(digits)
    form = numbers.of_text(reader)
    xs, ys = (form.numbers[torch.tensor([[i, i, i]])] for i in (7, 5))
    ids = form.write(xs[..., None], ys)[0][0].tolist()
    assert ids == models.encode(reader, [(line * 3).lstrip()])["input_ids"][0]
    assert len(form.start) == digits
    first = text.first_tokens([" good", " bad"], reader, "Label:")
    assert reader.convert_ids_to_tokens(first) == ["▁good", "▁bad"]
    (whole,) = models.encode(reader, ["hot -> cold\n"])["input_ids"]
    cut = text.pieces_in_place(reader, [("hot", " ->", " cold", "\n")])[0]
    assert [token for piece in cut for token in piece] == whole
